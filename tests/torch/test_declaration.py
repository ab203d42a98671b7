"""The blocks as declared against the blocks as executed: which ops run, and what each saves, tensor by tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from shardwise.collective import Labels
from shardwise.model.spec import Cut, Model, TensorDesc
from shardwise.plan.job import Job
from shardwise.plan.layout import RECOMPUTED, Layout, parse
from shardwise.train import again, attention, ends, ops
from shardwise.train.comm import Comm
from shardwise.train.rank import Rank, build_rank
from shardwise.train.threads import run_threads
from tests.support import families
from tests.support.models import job, tiny

torch.set_num_threads(1)
SIZES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.int64: 8}
Saved = list[tuple[int, int]]

OPERATIONS = {
    ops: ("norm", "norm_after", "norm_inside", "column_linear", "row_linear", "gated", "activation"),
    attention: ("attention",),
    ends: ("embed", "positions", "cross_entropy"),
}
"""Each call of one of these is one op of a block."""


def declared(model: Model, kind: str, cut: Cut, recompute: str = "none") -> list[Saved]:
    """(elements, bytes) of what each op of a block saves, in the order of the ops. What is computed again leaves its
    results out, but for the output of attention."""
    block = next(b for b in model.blocks if b.kind == kind)
    values: dict[str, TensorDesc] = {d.name: d for d in block.inputs}
    again = block.again(recompute)
    left = {d.name for op in again if op.kind != "attention" for d in op.outputs}
    out: list[Saved] = []
    for op in block.ops:
        values |= {d.name: d for d in op.outputs}
        descs = [values[name] for name in op.saves if name not in left] + list(op.keeps if op not in again else ())
        out.append([(cut.elements(model, d.dims), cut.bytes(model, d)) for d in descs])
    return out


class Trace(threading.local):
    """What the ranks' threads packed, each its own."""

    def __init__(self) -> None:
        self.saved: Saved = []
        self.counts: list[int] = []

    def hooks(self, pack: Callable[..., object], unpack: Callable[..., torch.Tensor]) -> saved_tensors_hooks:
        """Hooks that note what stays a tensor."""

        def noting(x: torch.Tensor) -> object:
            packed = pack(x)
            if isinstance(packed, torch.Tensor):
                self.saved.append((x.numel(), x.numel() * SIZES[x.dtype]))
            return packed

        return saved_tensors_hooks(noting, unpack)


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Every op of the runtime notes how much was saved when it ended."""
    trace = Trace()

    def noting(original: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            result = original(*args, **kwargs)
            trace.counts.append(len(trace.saved))
            return result

        return wrapped

    for module, names in OPERATIONS.items():
        for name in names:
            monkeypatch.setattr(module, name, noting(getattr(module, name)))
    monkeypatch.setattr(again, "saved_tensors_hooks", trace.hooks)
    return trace


def executed(rank: Rank, unit: str, trace: Trace) -> list[Saved]:
    """(elements, bytes) that each op of the code saves: autograd's own account of what each node packs."""
    trace.saved, trace.counts = [], []
    module = rank.executor.modules[unit]
    x = torch.randn(rank.executor.shape, dtype=rank.executor.dtype).requires_grad_()
    ids = torch.zeros(rank.job.cut(rank.layout).tokens, dtype=torch.int64)
    with trace.hooks(lambda x: x, lambda x: x):
        match module.unit.block.kind:
            case "embedding":
                module.embedding(ids)
            case "head":
                module.head(x, ids, torch.ones((), dtype=rank.wide))
            case _:
                module.layer(x)
    starts = [0, *trace.counts]
    return [trace.saved[a:b] for a, b in zip(starts, trace.counts, strict=False)]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("text", ["mb=2", "tp=2 sp=0 mb=2", "tp=4 mb=1"])
def test_every_op_saves_what_it_declares(text: str, precision: str, trace: Trace) -> None:
    layout: Layout = parse(text)
    work: Job = job(tiny(2), f"{layout.world_size}xcpu", precision=precision)

    def rank(comm: Comm) -> dict[str, list[Saved]]:
        built = build_rank(work, layout, comm, Labels())
        return {name: executed(built, name, trace) for name in ("embedding", "layers.1", "head")}

    for found in run_threads(layout.world_size, rank):
        for unit, saves in found.items():
            kind = "layer" if unit.startswith("layers") else unit
            assert saves == declared(work.model, kind, work.cut(layout)), f"{unit}: saved tensors differ"


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("text", ["mb=2", "tp=2 sp=0 mb=2", "tp=4 mb=1"])
@pytest.mark.parametrize("name", families.named())
def test_every_op_of_every_family_saves_what_it_declares(name: str, text: str, precision: str, trace: Trace) -> None:
    """Op by op, of a unit of every kind."""
    layout: Layout = parse(text)
    work = families.job_of(families.CONFIGS[name], layout, precision)
    model = work.model
    units = {u.block.kind: u.name for u in model.units()}
    assert set(units) == set(model.kinds)

    def rank(comm: Comm) -> dict[str, list[Saved]]:
        built = build_rank(work, layout, comm, Labels())
        return {kind: executed(built, unit, trace) for kind, unit in units.items()}

    for found in run_threads(layout.world_size, rank):
        for kind, saves in found.items():
            wanted = declared(model, kind, work.cut(layout))
            names = [op.name for op in model.block(kind).ops]
            assert dict(zip(names, saves, strict=True)) == dict(zip(names, wanted, strict=True)), f"{kind} differs"


@pytest.mark.parametrize("recompute", [",".join(s) for n in range(1, 4) for s in combinations(RECOMPUTED, n)])
@pytest.mark.parametrize("name", families.named())
def test_what_is_computed_again_leaves_what_it_declares(name: str, recompute: str, trace: Trace) -> None:
    """Op by op, of every kind of layer."""
    layout = parse(f"tp=2 mb=2 recompute={recompute}")
    work = families.job_of(families.CONFIGS[name], layout, "bf16")
    model = work.model
    units = {u.block.kind: u.name for u in model.units() if u.block.recomputable}

    def rank(comm: Comm) -> dict[str, list[Saved]]:
        built = build_rank(work, layout, comm, Labels())
        return {kind: executed(built, unit, trace) for kind, unit in units.items()}

    for found in run_threads(layout.world_size, rank):
        for kind, saves in found.items():
            wanted = declared(model, kind, work.cut(layout), recompute)
            names = [op.name for op in model.block(kind).ops]
            assert dict(zip(names, saves, strict=True)) == dict(zip(names, wanted, strict=True)), f"{kind} differs"


def test_saved_activations_fall_with_one_over_tp() -> None:
    """Under sequence parallelism every saved byte of a layer is cut by tp (Korthikanti et al. 2022, eq. 4)."""
    model = tiny(2)

    def saved(tp: int) -> int:
        cut = Cut(64, tp, tp > 1, 2, 4)
        return sum(size for op in declared(model, "layer", cut) for _, size in op)

    assert [saved(1) / saved(tp) for tp in (2, 4, 8)] == [2, 4, 8]
