"""The compositions of the front against plain torch in one process: loss, each gradient by name, norm, AdamW."""

from __future__ import annotations

import pytest
import torch

from shardwise.mesh import Axes
from shardwise.plan.buckets import Bucket, GradientMove, buckets_of
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rules import findings
from shardwise.plan.shards import COPIES, rank_units
from shardwise.train.threads import run_threads
from tests.support.filled import filled_by
from tests.support.front import NAMES, ODD, TWICE, Case, cases, odd
from tests.support.models import job, tiny
from tests.support.parity import assert_parity, run_rank

torch.set_num_threads(1)


def check(layout: Layout, work: Job, masked: bool) -> None:
    traces = run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, masked))
    assert_parity(traces, work, masked)


@pytest.mark.parametrize("case", cases(8, NAMES), ids=str)
def test_a_composition_of_the_front_equals_one_process(case: Case) -> None:
    check(case.layout, case.job(), masked=False)


@pytest.mark.parametrize("micro_batches", ODD)
@pytest.mark.parametrize("text", TWICE)
def test_an_odd_number_of_micro_batches_on_two_copies_equals_one_process(text: str, micro_batches: int) -> None:
    check(*odd(text, micro_batches), masked=micro_batches > 1)


AWKWARD = {
    "unequal token masks, a rank with no valid token": "tp=2 pp=2 dp=2 zero=1 mb=1",
    "the same under ZeRO-3 and the split backward": "pp=2 dp_replicate=2 dp_shard=2 zero=3 schedule=zb-h1 mb=1",
    "fewer micro-batches than stages": "pp=4 dp=2 zero=1 mb=4",
    "fewer micro-batches than stages, interleaved": "pp=2 dp=4 zero=3 schedule=interleaved:2 mb=2",
    "a short last group of interleaved micro-batches": "pp=2 tp=2 schedule=interleaved:2 mb=8",
    "a split of the user's": "pp=2 schedule=interleaved:2 split=0,3,1,0 mb=2",
    "uneven stages in a V": "pp=2 schedule=dualpipe-v split=0,3,1,0 mb=2",
    "uneven stages, held twice, under ZeRO-2": "pp=2 dp=2 zero=2 schedule=dualpipe split=1,3 mb=2",
    "fewer micro-batches than ranks, on two copies": "pp=4 dp=2 zero=3 schedule=dualpipe mb=2",
    "fewer micro-batches than ranks, without idle time": "pp=4 dp=2 zero=2 schedule=zb-h2 mb=4",
    "rows that do not divide, and fewer than the ranks": "dp=8 zero=3 mb=1",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_sizes_equal_one_process(text: str, tied: bool) -> None:
    layout = parse(text)
    model = tiny(4, tied, hidden=36, ffn=24, vocab=20)
    work = job(model, f"{layout.world_size}xcpu", batch=8)
    assert not findings(layout, work)
    check(layout, work, masked=True)


@pytest.mark.parametrize(
    "text",
    [
        "pp=2 schedule=interleaved:4 mb=2",
        "pp=2 tp=2 dp=2 zero=3 schedule=interleaved:4 mb=1 recompute=full",
        "pp=2 dp_replicate=2 dp_shard=2 zero=1 schedule=interleaved:3 mb=1",
    ],
)
def test_more_than_two_stages_a_rank_equal_one_process(text: str) -> None:
    layout = parse(text)
    work = job(tiny(7, tied=True), f"{layout.world_size}xcpu", batch=12)
    assert not findings(layout, work)
    check(layout, work, masked=True)


@pytest.mark.parametrize("numel", [1, 5_000], ids=["a unit each", "a few units each"])
@pytest.mark.parametrize(
    "text",
    [
        "dp=2 mb=2",
        "tp=2 dp=2 mb=1",
        "tp=2 dp=2 sp=0 mb=1 recompute=full",
        "pp=2 dp=2 mb=1",
        "pp=2 dp=2 schedule=zb-v mb=1",
        "pp=2 dp=2 schedule=dualpipe mb=1",
        "pp=2 tp=2 dp=2 schedule=interleaved:2 mb=1",
    ],
)
def test_gradients_in_several_buckets_equal_one_process(text: str, numel: int) -> None:
    layout = parse(text)
    work = job(tiny(6, tied=True, kv_heads=1), f"{layout.world_size}xcpu")
    with filled_by(numel):
        held = [rank_units(work.model, layout, rank) for rank in range(layout.pp)]
        found = [bucket for units in held for bucket in buckets_of(units, layout).values()]
        assert len(found) > layout.pp
        assert (max(len(b.storages) for b in found) > 1) is (numel > 1)
        check(layout, work, masked=True)


@pytest.mark.parametrize("axes", [("tp",), COPIES])
def test_the_harness_sees_a_wrong_gradient(axes: Axes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping one reduction (norm gradients under sequence parallelism, those of kv heads that two ranks hold) must
    fail, or the harness proves nothing."""
    moves = Bucket.moves

    def some(bucket: Bucket, zero: int, final: bool) -> list[GradientMove]:
        return [m for m in moves(bucket, zero, final) if m.axes != axes]

    monkeypatch.setattr(Bucket, "moves", some)
    layout = parse("tp=2 mb=2")
    with pytest.raises(AssertionError, match=r"norm|differ"):
        check(layout, job(tiny(3, kv_heads=1), "2xcpu"), masked=False)
