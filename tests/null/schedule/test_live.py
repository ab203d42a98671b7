"""The live profile against a count that knows only the definitions, and its saturation."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.schedule import LiveState, add_p2p, build, capped, live_states, period, possible, profile, saturation
from shardwise.schedule.table import Action, Op, Row, Schedule

V = ("zb-v", "dualpipe", "dualpipe-v")
NAMES = ("gpipe", "1f1b", "interleaved:1", "interleaved:2", "interleaved:3", "zb-h1", "zb-h2", *V)


def brute_force(rows: tuple[Row, ...], schedule: Schedule, rank: int) -> set[LiveState]:
    """Every state, each counted anew from the whole row."""
    row, stages = rows[rank], schedule.stages_of(rank)
    states: set[LiveState] = set()
    for now, action in enumerate(row):
        if not isinstance(action, Action):
            continue
        past = [a for a in row[:now] if isinstance(a, Action)]
        future = [a for a in row[now + 1 :] if isinstance(a, Action)]
        did = {(a.op, a.stage, a.micro_batch) for a in past}
        will = {(a.op, a.stage, a.micro_batch) for a in future}
        every = range(schedule.micro_batches)
        in_flight = [
            sum((Op.F, s, i) in did and bool({(Op.B, s, i), (Op.BW, s, i)} & will) for i in every) for s in stages
        ]
        queued = [sum((Op.B, s, i) in did and (Op.W, s, i) in will for i in every) for s in stages]
        batches = [step for step in row[:now] if not isinstance(step, Action)]
        started = {
            (Op.F if a.op is Op.F else Op.B, a.stage, a.micro_batch) for a in (*past, action) if a.op is not Op.W
        }
        received = {(o.tensor, o.stage, o.micro_batch) for batch in batches for o in batch if not o.send}
        waiting = len((received | handed_over(past, schedule, rank)) - started)
        following = (future[0].op, stages.index(future[0].stage)) if future else None
        preceding = (past[-1].op, stages.index(past[-1].stage)) if past else None
        sends = sum(o.send for o in batches[-1]) if batches else 0
        chunk = stages.index(action.stage)
        counts = (tuple(in_flight), tuple(queued), sends, waiting)
        states.add(LiveState(action.op, chunk, following, *counts, preceding))
    return states


def handed_over(past: list[Action], schedule: Schedule, rank: int) -> set[tuple[Op, int, int]]:
    """Inputs of the rank's own stages that the rank itself has made."""
    made = {(a.op, a.stage + (1 if a.op is Op.F else -1), a.micro_batch) for a in past if a.op is not Op.W}
    inner = {(Op.F if op is Op.F else Op.B, s, i) for op, s, i in made if 0 <= s < schedule.stages}
    return {(op, s, i) for op, s, i in inner if schedule.rank_of(s, schedule.copy_of(i)) == rank}


def exceeds(a: LiveState, b: LiveState) -> bool:
    at_least = all(x >= y for x, y in zip(flat(a), flat(b), strict=True))
    return a != b and (a[:3], a.preceding) == (b[:3], b.preceding) and at_least


def flat(state: LiveState) -> tuple[int, ...]:
    return (*state.in_flight, *state.queued, state.send_buffers, state.recv_buffers)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), pp=st.integers(1, 5), m=st.integers(1, 10))
def test_against_brute_force(name: str, pp: int, m: int) -> None:
    assume(possible(name, pp, m))
    schedule = build(name, pp, m)
    rows = add_p2p(schedule)
    for rank in range(pp):
        every = brute_force(rows, schedule, rank)
        maximal = {a for a in every if not any(exceeds(b, a) for b in every)}
        found = live_states(schedule)[rank]
        assert len(found) == len(set(found))
        assert set(found) == maximal


@pytest.mark.parametrize("name", ["1f1b", "interleaved:1", "interleaved:2", "interleaved:3", "zb-h1", "zb-h2", *V])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6])
def test_saturation(name: str, pp: int) -> None:
    if not possible(name, pp, 1):
        return
    enough, step = saturation(name, pp), period(name, pp)
    assert enough is not None
    for m in range(enough, enough + step):
        shortest = as_sets(name, pp, m)
        for more in (m + step, m + 2 * step, m + 5 * step):
            assert as_sets(name, pp, more) == shortest
            assert [frozenset(states) for states in profile(name, pp, more)] == shortest


def as_sets(name: str, pp: int, m: int) -> list[frozenset[LiveState]]:
    return [frozenset(states) for states in live_states(build(name, pp, m))]


@pytest.mark.parametrize("name", NAMES)
def test_a_group_has_the_largest_states_of_its_ranks(name: str) -> None:
    schedule = build(name, 6, 7)
    alone = [state for states in live_states(schedule)[1:4] for state in states]
    maximal = {a for a in alone if not any(exceeds(b, a) for b in alone)}
    (together,) = live_states(schedule, [(1, 2, 3)])
    assert len(together) == len(set(together))
    assert set(together) == maximal


@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_two_short_profiles_tell_a_long_one_of_gpipe(pp: int) -> None:
    groups = tuple({(0,), (pp - 1,), tuple(range(pp))})
    for m in range(1, 3 * pp + 6):
        found = profile("gpipe", pp, m, groups)
        assert [set(x) for x in found] == [set(x) for x in live_states(build("gpipe", pp, m), groups)]


def test_saturation_is_not_idle() -> None:
    """One micro-batch less than p is a smaller profile; and in flight never saturates in gpipe."""
    assert as_sets("1f1b", 4, 3) != as_sets("1f1b", 4, 6)
    assert saturation("gpipe", 4) is None
    assert capped("gpipe", 4, 1000) == 1000
    assert capped("1f1b", 4, 1000) == 6
    assert capped("interleaved:2", 4, 1001) == 13


def test_states_of_the_last_rank_of_1f1b() -> None:
    """Nothing else is in flight; while BW runs, the input of the next F may already have come in."""
    states = profile("1f1b", 2, 4)[1]
    assert {state.in_flight for state in states} == {(0,)}
    assert {(state.op, state.recv_buffers) for state in states if state.recv_buffers} == {(Op.BW, 1)}
    assert max(state.send_buffers for state in states) == 1


def test_zero_bubble_queues_weight_gradients() -> None:
    """ZB-H1 puts r weight gradients off on rank r."""
    for rank, states in enumerate(profile("zb-h1", 4, 20)):
        while_b = [state.queued[0] for state in states if state.op is Op.B]
        assert max(while_b) == rank
