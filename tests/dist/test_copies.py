"""Fewer kv heads than tensor-parallel ranks, a vocabulary that they do not divide: neighbours hold the same keys and
values, the last ranks hold padding. Held against plain torch in one process, and against the plan.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from shardwise.account.comm import predict_ledger
from shardwise.account.static import columns_of
from shardwise.account.units import unit_memory
from shardwise.collective import Kind, Labels
from shardwise.model.spec import Model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rules import findings
from shardwise.plan.runs import runs_here
from shardwise.plan.shards import COPIES
from shardwise.train.comm import Comm
from shardwise.train.distributed import close_world, open_world
from shardwise.train.rank import Rank, build_rank, gradients
from shardwise.train.threads import run_threads
from tests.support.models import job, tiny
from tests.support.parity import SETTINGS, assert_parity, batches, local_data, run_rank
from tests.support.proof import assert_exact

torch.set_num_threads(1)

CROSSINGS = (
    "tp=4 mb=2",
    "tp=4 sp=0 mb=2",
    "tp=8 mb=1",
    "tp=8 sp=0 mb=4 recompute=full",
    "tp=4 dp=2 mb=1",
    "tp=4 dp=2 zero=1 mb=1",
    "tp=4 dp=2 zero=2 sp=0 mb=1",
    "tp=4 dp=2 zero=3 mb=1 recompute=full",
    "tp=4 dp_replicate=2 dp_shard=2 zero=3 mb=1",
    "tp=4 pp=2 schedule=gpipe mb=2",
    "tp=4 pp=2 schedule=zb-h1 sp=0 mb=1 recompute=full",
    "tp=4 pp=2 schedule=zb-v mb=1",
    "tp=4 pp=2 dp=2 zero=1 schedule=interleaved:2 mb=1",
    "tp=4 pp=2 dp=2 zero=3 schedule=zb-h1 mb=1",
    "tp=4 pp=2 schedule=dualpipe mb=1",
)
"""Every way to cut the state, sequence parallelism or not, schedules with and without W, whole layers recomputed."""

MODELS = {"two kv heads": (2, False, 41), "two, tied": (2, True, 42), "one kv head": (1, True, 41)}
"""kv heads, tied ends, rows of the vocabulary: of 41 in parts of 11 (or 6) the last is short."""


def made(text: str, name: str, precision: str = "fp64") -> tuple[Job, Layout]:
    """The smallest model that fills the stages; legal, and run."""
    kv_heads, tied, vocab = MODELS[name]
    layout = parse(text)
    work = job(tiny(max(2, layout.stages - 1), tied, vocab=vocab, kv_heads=kv_heads), f"{layout.world_size}xcpu")
    work = job(work.model, work.cluster, precision=precision)
    assert not [*findings(layout, work), *runs_here(layout, work)]
    return work, layout


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", CROSSINGS)
def test_copies_and_padding_equal_one_process(text: str, name: str) -> None:
    """Loss, each gradient by name, clip norm, three steps of AdamW; what several ranks hold is bit-equal."""
    work, layout = made(text, name)
    assert_parity(run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, True)), work, True)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("text", CROSSINGS)
def test_copies_and_padding_are_proved(text: str, name: str, precision: str) -> None:
    """On the first rank, a middle one, and the last, which holds padding; all but losses to come is exact."""
    work, layout = made(text, name, precision)
    for rank in sorted({0, layout.world_size // 2, layout.world_size - 1}):
        assert_exact(work, layout, rank)


@pytest.mark.parametrize(("kv_heads", "tp", "ranks"), [(2, 4, (2, 3)), (2, 8, (0, 1, 2, 3)), (1, 4, (0, 1, 2, 3))])
def test_the_ranks_of_a_kv_head_sum_its_gradient_once_a_step(kv_heads: int, tp: int, ranks: tuple[int, ...]) -> None:
    """One all-reduce a layer of both weights: 2 x head dim 4 x hidden 32 elements, whatever the micro-batches."""
    layout = parse(f"tp={tp} mb=1")
    work = job(tiny(3, kv_heads=kv_heads), f"{tp}xcpu", precision="bf16")
    ledger = predict_ledger(work, layout, ranks[-1])
    found = {c: n for c, n in ledger.items() if c.key.axis == COPIES[0]}
    assert {c.key.module for c in found} == {"layers.0", "layers.1", "layers.2"}
    assert set(found.values()) == {1}
    assert {(c.kind, c.ranks, c.payload_bytes, c.dtype) for c in found} == {
        (Kind.ALL_REDUCE, ranks, 2 * 4 * 32 * 4, "float32")
    }


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_without_copies_nothing_is_summed(kv_heads: int) -> None:
    ledger = predict_ledger(job(tiny(2, kv_heads=kv_heads), "4xcpu"), parse("tp=4 mb=1"), 0)
    assert not [c for c in ledger if c.key.axis == COPIES[0]]


@pytest.mark.parametrize(("kv_heads", "more"), [(8, 0), (4, 0), (2, 1), (1, 0)])
def test_copies_have_a_communicator_unless_all_ranks_are_copies(kv_heads: int, more: int) -> None:
    """Beside the tensor-parallel group's, in the account and in a rank's own world."""
    layout, work = parse("tp=4 mb=1"), job(tiny(2, kv_heads=kv_heads), "4xcpu")
    comm = open_world("fake", 0, 4, labels=Labels())
    try:
        build_rank(work, layout, comm, Labels(), seed=None)
        opened = len({id(g.handle) for g in comm._groups.values()})
    finally:
        close_world()
    assumed = int(columns_of(work, LayoutBatch.of([layout]).expanded(2)).groups.item())
    assert assumed == opened == 1 + more


def padding(rank: Rank) -> dict[str, list[torch.Tensor]]:
    """By parameter: of weights, gradient and moments what lies behind the rank's part of the whole."""
    found: dict[str, list[torch.Tensor]] = {}
    for state in rank.states.values():
        for r in state.storage.records:
            rows = r.box(rank.world.index("tp"))[0]
            own = max(0, rows.stop - rows.start - state.index * r.rows)
            flat = (state.master, state.gradient_shard, *state.moments.values())
            parts = [x[r.offset : r.offset + r.shard_numel].view(r.rows, -1)[own:] for x in flat]
            parts.append(state.slots[r.name].weight[rows.stop - rows.start :])
            found[r.name] = parts
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("text", ["tp=8 mb=2", "tp=8 dp=3 zero=1 mb=1", "tp=4 pp=2 dp=2 zero=2 mb=1"])
def test_padding_begins_as_zero_and_stays(text: str, tied: bool) -> None:
    """Of 20 rows in parts of 3 the seventh rank has two, the last none: weights, gradients and moments there are 0."""
    layout = parse(text)
    work = job(tiny(2, tied, vocab=20, kv_heads=2), f"{layout.world_size}xcpu", batch=12)

    def rank(comm: Comm) -> Counter[str]:
        built = build_rank(work, layout, comm, Labels(), settings=SETTINGS)
        for ids, targets in batches(20, work.seq_len, 12, True):
            mine = [local_data(work, layout, built, x) for x in (ids, targets)]
            result = gradients(built, mine[0], mine[1])
            assert result.loss.isfinite()
            assert not any(part.any() for parts in padding(built).values() for part in parts)
            built.optimizer.step(result.norm)
        found = padding(built)
        assert not any(part.any() for parts in found.values() for part in parts)
        return Counter({name: sum(p.numel() for p in parts) for name, parts in found.items()})

    padded = sum(run_threads(layout.world_size, rank), Counter[str]())
    assert {"embedding.weight", *(() if tied else ("head.output.weight",))} <= padded.keys()


def saved_by_layers(model: Model, text: str) -> list[int]:
    """Bytes that every rank keeps for the backward of the layers, from the running code: what autograd packs, less
    what is packed twice."""
    layout = parse(text)
    work = job(model, f"{layout.world_size}xcpu", precision="bf16")

    def rank(comm: Comm) -> int:
        built = build_rank(work, layout, comm, Labels())
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x.detach()

        x = torch.randn(built.executor.shape, dtype=built.executor.dtype).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            for i in range(model.layers):
                x = built.executor.modules[f"layers.{i}"].layer(x)
        return sum(storage.nbytes() for storage in kept.values())

    return run_threads(layout.world_size, rank)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_saved_activations_scale_with_one_over_tp(tp: int) -> None:
    """Under sequence parallelism every byte that a layer saves is cut by tp (Korthikanti et al. 2205.05198, eq. 4): as
    the code runs, and as the account has it. Without it the stream's part is whole; kv heads that are copied are too.
    """
    model = tiny(3)
    once = saved_by_layers(model, "mb=2")[0]
    for text, of, exact in ((f"tp={tp} mb=2", model, True), (f"tp={tp} sp=0 mb=2", model, False)):
        layout = parse(text)
        cut = job(of, f"{tp}xcpu", precision="bf16").cut(layout)
        (found,) = set(saved_by_layers(of, text))
        assert found == of.layers * unit_memory(of, "layer", cut, "none").saved
        assert (found * tp == once) == (exact or tp == 1)


def test_copied_kv_heads_are_saved_by_each_rank_that_holds_them() -> None:
    """Of two kv heads over 8 ranks each rank keeps one, four times its share of keys and of values."""
    once, copied = (saved_by_layers(tiny(2, kv_heads=2), text)[0] for text in ("mb=2", "tp=8 mb=2"))
    tokens, head_dim, bf16 = 2 * 16, 4, 2
    whole = 2 * 2 * tokens * 2 * head_dim * bf16  # layers, k and v, tokens, kv heads, ...
    assert copied * 8 - once == whole * (8 // 2 - 1)
