"""`check` must catch what is wrong; each test breaks a sound schedule in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.schedule import ScheduleError, add_p2p, build, check, possible, walk
from shardwise.schedule.table import P2P, Action, Op, Row, Schedule, Step

NAMES = ("gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")


def edit(rows: tuple[Row, ...], rank: int, change: Callable[[list[Step]], object]) -> tuple[Row, ...]:
    row = list(rows[rank])
    change(row)
    return (*rows[:rank], tuple(row), *rows[rank + 1 :])


def edit_actions(schedule: Schedule, rank: int, change: Callable[[list[Action]], object]) -> Schedule:
    row = list(schedule.rows[rank])
    change(row)
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


def swap(i: int, j: int) -> Callable[[list[Any]], None]:
    def change(row: list[Any]) -> None:
        row[i], row[j] = row[j], row[i]

    return change


def depends(later: Action, earlier: Action) -> bool:
    """On one rank: a gradient on its forward, W on its B."""
    same = (later.stage, later.micro_batch) == (earlier.stage, earlier.micro_batch)
    return same and earlier.op is not Op.W and later.op is not Op.F


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), pp=st.integers(1, 5), m=st.integers(1, 8), data=st.data())
def test_dropped_or_doubled_action(name: str, pp: int, m: int, data: st.DataObject) -> None:
    assume(possible(name, pp, m))
    schedule = build(name, pp, m)
    rank = data.draw(st.integers(0, pp - 1))
    index = data.draw(st.integers(0, len(schedule.rows[rank]) - 1))
    action = schedule.rows[rank][index]
    for broken in (
        edit_actions(schedule, rank, lambda row: row.pop(index)),
        edit_actions(schedule, rank, lambda row: row.append(action)),
    ):
        with pytest.raises(ScheduleError, match=f"stage {action.stage}, micro-batch {action.micro_batch}: "):
            check(broken)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), pp=st.integers(1, 5), m=st.integers(1, 8), data=st.data())
def test_two_actions_of_a_row_change_places(name: str, pp: int, m: int, data: st.DataObject) -> None:
    assume(possible(name, pp, m))
    schedule = build(name, pp, m)
    rank = data.draw(st.integers(0, pp - 1))
    row = schedule.rows[rank]
    pairs = [(i, j) for j in range(len(row)) for i in range(j) if depends(row[j], row[i])]
    i, j = data.draw(st.sampled_from(pairs))
    with pytest.raises(ScheduleError, match="deadlock"):
        check(edit_actions(schedule, rank, swap(i, j)))
    rows = add_p2p(schedule)
    places = [k for k, step in enumerate(rows[rank]) if isinstance(step, Action)]
    with pytest.raises(ScheduleError, match=f"rank {rank}, action {i}"):
        check(schedule, edit(rows, rank, swap(places[i], places[j])))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), pp=st.integers(2, 5), m=st.integers(2, 8), data=st.data())
def test_two_batches_change_places(name: str, pp: int, m: int, data: st.DataObject) -> None:
    """Messages between two ranks in one direction must keep their order, or both queues stop."""
    assume(possible(name, pp, m))
    schedule = build(name, pp, m)
    rows = add_p2p(schedule)
    rank = data.draw(st.integers(0, pp - 1))
    places = [k for k, step in enumerate(rows[rank]) if not isinstance(step, Action)]
    i, j = sorted(data.draw(st.lists(st.sampled_from(places), min_size=2, max_size=2, unique=True)))
    ways = [{(o.send, o.peer) for o in rows[rank][k] if isinstance(o, P2P)} for k in (i, j)]
    assume(ways[0] & ways[1])
    with pytest.raises(ScheduleError):
        check(schedule, edit(rows, rank, swap(i, j)))


def test_deadlock_names_ranks_and_operations() -> None:
    schedule = build("gpipe", 2, 2)
    rows = add_p2p(schedule)
    receives = [k for k, step in enumerate(rows[1]) if not isinstance(step, Action) and not step[0].send]
    late = edit(rows, 1, swap(receives[0], receives[1]))
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 .*SEND F of stage 0, micro-batch 0 to rank 1.*; rank 1"):
        walk(late, schedule, lambda *_: 1.0)


def test_crossed_exchange_deadlocks_unless_in_one_batch() -> None:
    """Two ranks that both receive before they send: the classical deadlock of an unbuffered send."""
    schedule = build("1f1b", 2, 3)
    rows = add_p2p(schedule)
    check(schedule, rows)
    for rank in (0, 1):
        place = next(k for k, step in enumerate(rows[rank]) if not isinstance(step, Action) and len(step) == 2)
        pair = sorted(o for o in rows[rank][place] if isinstance(o, P2P))  # RECV first
        rows = edit(rows, rank, lambda row, p=place, ops=pair: row.__setitem__(slice(p, p + 1), [(ops[0],), (ops[1],)]))
    with pytest.raises(ScheduleError, match="deadlock"):
        check(schedule, rows)


def test_missing_receive_extra_send_and_early_send() -> None:
    schedule = build("1f1b", 2, 3)
    rows = add_p2p(schedule)
    first = next(k for k, step in enumerate(rows[1]) if not isinstance(step, Action))
    with pytest.raises(ScheduleError, match="0 RECV instead of 1: F of stage 0, micro-batch 0 from rank 0 to rank 1"):
        check(schedule, edit(rows, 1, lambda row: row.pop(first)))
    with pytest.raises(ScheduleError, match="2 SEND instead of 1"):
        check(schedule, edit(rows, 0, lambda row: row.append((P2P(True, Op.F, 0, 0, 1),))))
    with pytest.raises(ScheduleError, match="before it is made"):
        check(schedule, edit(rows, 0, swap(0, 1)))


def test_action_on_the_wrong_rank() -> None:
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match=r"rank 0 runs 1F0 but holds stages \(0,\)"):
        check(edit_actions(schedule, 0, lambda row: row.append(Action(Op.F, 1, 0))))


def test_action_on_the_other_copy() -> None:
    """Rank 0 of 4 holds stage 3 of copy 1, whose micro-batches are the odd ones."""
    schedule = build("dualpipe", 4, 4)
    with pytest.raises(ScheduleError, match=r"rank 0 runs 3F2 but holds stages \(0,\) of copy 0, which takes"):
        check(edit_actions(schedule, 0, lambda row: row.append(Action(Op.F, 3, 2))))
