"""The lowered rows of ranks that share something: what they sum together, in one order."""

from __future__ import annotations

import pytest

from shardwise import schedule as schedules
from shardwise.plan.buckets import buckets_of
from shardwise.plan.layout import parse
from shardwise.plan.rows import lowered_row
from shardwise.plan.shards import rank_units, stages_of
from shardwise.schedule.lowering import Do, Instruction
from tests.support.models import tiny

TWICE = [name for name in schedules.NAMES if schedules.copies(name.replace(":V", ":2")) > 1]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", TWICE)
def test_ranks_with_the_same_stages_sum_their_gradients_last_and_in_one_order(
    name: str, zero: int, micro_batches: int
) -> None:
    """Each bucket once, wherever the two rows end its gradients; one that saw no micro-batch too."""
    layout, model = parse(f"pp=4 dp=2 zero={zero} schedule={name} mb=1"), tiny(6, tied=True)
    sums: dict[tuple[int, ...], list[list[str]]] = {}
    for rank in range(layout.pp):
        row = lowered_row(model, layout, micro_batches, rank)
        twins = [x.unit for x in row if isinstance(x, Instruction) and x.do is Do.TWIN]
        assert [x.unit for x in row[-len(twins) :] if isinstance(x, Instruction)] == twins
        assert sorted(twins) == sorted(buckets_of(rank_units(model, layout, rank), layout))
        held = sorted(s.index for s in stages_of(model, layout) if s.rank == rank)
        sums.setdefault(tuple(held), []).append(twins)
    assert all(len(each) == 2 and each[0] == each[1] for each in sums.values())


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_stages_that_are_held_once_have_nobody_to_sum_with(name: str) -> None:
    layout, model = parse(f"pp=4 dp=2 zero=1 schedule={name} mb=1"), tiny(8, tied=True)
    rows = [lowered_row(model, layout, 8, rank) for rank in range(layout.pp)]
    assert not [x for row in rows for x in row if isinstance(x, Instruction) and x.do is Do.TWIN]
