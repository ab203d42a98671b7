"""Published bubbles and micro-batches in flight, and properties of every schedule."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedule import NAMES, add_p2p, build, check, parse, splits_weight_gradient, virtual_stages, walk
from shardwise.schedule.table import Action, Op, Schedule

ALL = ("gpipe", "1f1b", "interleaved:1", "interleaved:2", "interleaved:3", "interleaved:4", "zb-h1")
FBW = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.5))


def bubble(name: str, pp: int, micro_batches: int, f: float, b: float, w: float) -> float:
    """In F, B, W of a whole rank."""
    schedule, v = build(name, pp, micro_batches), virtual_stages(name)
    seconds = {Op.F: f / v, Op.B: b / v, Op.W: w / v, Op.BW: (b + w) / v}
    return walk(add_p2p(schedule), schedule, lambda op, _: seconds[op]).span_s - micro_batches * (f + b + w)


def in_flight(schedule: Schedule, rank: int) -> int:
    """Most micro-batches (of any chunk) between F and the last of their gradients."""
    releases = (Op.W, Op.BW)
    change = (1 if a.op is Op.F else -1 if a.op in releases else 0 for a in schedule.rows[rank])
    return max(accumulate(change))


@pytest.mark.golden
@pytest.mark.parametrize("fbw", FBW)
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_bubbles(pp: int, fbw: tuple[float, float, float]) -> None:
    """Narayanan et al. 2104.04473, section 2.2; Qi et al. 2401.10241, table 1."""
    f, b, w = fbw
    for m in (pp, 2 * pp, 5 * pp):
        assert bubble("gpipe", pp, m, f, b, w) == pytest.approx((pp - 1) * (f + b + w))
        assert bubble("1f1b", pp, m, f, b, w) == pytest.approx((pp - 1) * (f + b + w))
        assert bubble("zb-h1", pp, m, f, b, w) == pytest.approx((pp - 1) * (f + b - w))
        for v in (2, 4):
            assert bubble(f"interleaved:{v}", pp, m, f, b, w) == pytest.approx((pp - 1) * (f + b + w) / v)


@pytest.mark.golden
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_in_flight(pp: int) -> None:
    for m in (1, pp, 3 * pp + 1):
        for rank in range(pp):
            assert in_flight(build("gpipe", pp, m), rank) == m
            assert in_flight(build("1f1b", pp, m), rank) == min(m, pp - rank)
            assert in_flight(build("zb-h1", pp, m), rank) == min(m, pp)
    for m in (pp, 4 * pp):
        for v in (2, 3):
            schedule = build(f"interleaved:{v}", pp, m)
            for rank in range(pp):
                assert in_flight(schedule, rank) == min(m * v, 2 * (pp - 1 - rank) + (v - 1) * pp + 1)


@pytest.mark.golden
@pytest.mark.parametrize(("pp", "slope"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_transfers_exposed_by_1f1b(pp: int, slope: float) -> None:
    """2(p-1)/p of a transfer per micro-batch if no queue holds up a message; one FIFO a rank exposes more."""
    c, seconds = 0.05, {Op.F: 1.0, Op.BW: 2.0, Op.B: 1.0, Op.W: 1.0}

    def span_s(m: int, queued: bool, p2p_s: float) -> float:
        schedule = build("1f1b", pp, m)
        return walk(add_p2p(schedule) if queued else schedule.rows, schedule, lambda op, _: seconds[op], p2p_s).span_s

    for queued, expected in ((False, slope), (True, 1.0 if pp == 2 else 2.0)):
        longer = span_s(6 * pp, queued, c) - span_s(2 * pp, queued, c)
        assert (longer - 4 * pp * 3.0) / (4 * pp * c) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(ALL), pp=st.integers(1, 8), m=st.integers(1, 20))
def test_every_schedule_is_complete_and_runs(name: str, pp: int, m: int) -> None:
    schedule = build(name, pp, m)
    rows = add_p2p(schedule)
    check(schedule)
    check(schedule, rows)
    sends = [o for row in rows for step in row if not isinstance(step, Action) for o in step if o.send]
    hops = sum(a != b for a, b in zip(schedule.placement[0], schedule.placement[0][1:], strict=False))
    assert len(sends) == len({o.message for o in sends}) == 2 * hops * m
    assert any(a.op is Op.W for a in schedule.rows[0]) is splits_weight_gradient(name)


@settings(max_examples=40, deadline=None)
@given(v=st.integers(1, 4), pp=st.integers(1, 8), m=st.integers(1, 20))
def test_a_short_last_group_holds_no_more(v: int, pp: int, m: int) -> None:
    schedule = build(f"interleaved:{v}", pp, m)
    for rank in range(pp):
        assert in_flight(schedule, rank) <= min(m * v, 2 * (pp - 1 - rank) + (v - 1) * pp + 1)


def test_neighbours_exchange_in_one_batch() -> None:
    """The steady state of 1F1B: the activation down and the gradient up are posted together, on both ends."""
    rows = add_p2p(build("1f1b", 2, 4))
    for rank in (0, 1):
        pairs = [step for step in rows[rank] if not isinstance(step, Action) and len(step) == 2]
        assert len(pairs) == 2
        assert all({o.send for o in pair} == {True, False} for pair in pairs)


def test_names() -> None:
    assert parse("interleaved:12") == ("interleaved", 12)
    assert parse("zb-h1") == ("zb-h1", 1)
    for name in ("interleaved", "interleaved:0", "interleaved:-1", "interleaved:²", "1f1b:2", "1F1B", "", "gpipe:"):
        with pytest.raises(ValueError, match="unknown schedule") as raised:
            parse(name)
        assert all(known in str(raised.value) for known in NAMES)
    with pytest.raises(ValueError, match="pp=0"):
        build("1f1b", 0, 4)
