"""The blocks as declared against the blocks as executed: which ops run, and what each saves, tensor by tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from shardwise.collective import Labels
from shardwise.model.spec import Cut, Model, TensorDesc
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.train import ops
from shardwise.train.comm import Comm
from shardwise.train.rank import Rank, build_rank
from shardwise.train.threads import run_threads
from tests.support.models import job, tiny

torch.set_num_threads(1)
SIZES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.int64: 8}
Saved = list[tuple[int, int]]


def declared(model: Model, kind: str, cut: Cut) -> list[Saved]:
    """(elements, bytes) of what each op of a block saves, in the order of the ops."""
    block = next(b for b in model.blocks if b.kind == kind)
    values: dict[str, TensorDesc] = {d.name: d for d in block.inputs}
    out: list[Saved] = []
    for op in block.ops:
        values |= {d.name: d for d in op.outputs}
        descs = [values[name] for name in op.saves] + list(op.keeps)
        out.append([(cut.elements(model, d.dims), cut.bytes(model, d)) for d in descs])
    return out


class Trace(threading.local):
    """What the ranks' threads packed, each its own."""

    def __init__(self) -> None:
        self.saved: Saved = []
        self.counts: list[int] = []


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

    for name in ("rms_norm", "column_linear", "row_linear", "attention", "swiglu", "embed", "cross_entropy"):
        monkeypatch.setattr(ops, name, noting(getattr(ops, name)))
    return trace


def executed(rank: Rank, unit: str, trace: Trace) -> list[Saved]:
    """(elements, bytes) that each op of the code saves: autograd's own account of what each node packs."""
    trace.saved, trace.counts = [], []
    module = rank.executor.modules[unit]

    def pack(x: torch.Tensor) -> torch.Tensor:
        trace.saved.append((x.numel(), x.numel() * SIZES[x.dtype]))
        return x

    x = torch.randn(rank.executor.shape, dtype=rank.executor.dtype).requires_grad_()
    ids = torch.zeros(rank.job.cut(rank.layout).tokens, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        match module.unit.block.kind:
            case "embedding":
                module.embedding(ids)
            case "layer":
                module.layer(x)
            case _:
                module.head(x, ids, torch.ones((), dtype=rank.wide))
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


def test_saved_activations_fall_with_one_over_tp() -> None:
    """Under sequence parallelism every saved byte of a layer is cut by tp (Korthikanti et al. 2022, eq. 4)."""
    model = tiny(2)

    def saved(tp: int) -> int:
        cut = Cut(64, tp, tp > 1, 2, 4)
        return sum(size for op in declared(model, "layer", cut) for _, size in op)

    assert [saved(1) / saved(tp) for tp in (2, 4, 8)] == [2, 4, 8]
