"""Published bubbles and micro-batches in flight, and properties of every schedule."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.schedule import (
    NAMES,
    about,
    add_p2p,
    build,
    check,
    copies,
    fault,
    pairs,
    parse,
    placement,
    possible,
    splits_weight_gradient,
    virtual_stages,
    walk,
)
from shardwise.schedule.table import Action, Op, Schedule

ALL = (
    "gpipe", "1f1b", "interleaved:1", "interleaved:2", "interleaved:3", "interleaved:4",
    "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v",
)  # fmt: skip
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


@pytest.mark.parametrize("name", ALL)
def test_the_stages_lie_where_every_table_has_them(name: str) -> None:
    for pp, m in ((2, 1), (4, 3), (6, 20)):
        assert build(name, pp, m).placement == placement(name, pp)


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
        assert bubble("zb-h2", pp, 2 * m, f, b, w) == pytest.approx((pp - 1) * max(f, f + b - 2 * w))
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
            assert in_flight(build("zb-h2", pp, m), rank) == min(m, 2 * pp - 1)
    for m in (pp, 4 * pp):
        for v in (2, 3):
            schedule = build(f"interleaved:{v}", pp, m)
            for rank in range(pp):
                assert in_flight(schedule, rank) == min(m * v, 2 * (pp - 1 - rank) + (v - 1) * pp + 1)


@pytest.mark.golden
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_chunks_in_flight(pp: int) -> None:
    """2p chunks in ZB-V, 2p + 1 in DualPipeV, p + 1 in DualPipe: on some rank that many, on none more."""
    for m in (2 * pp, 4 * pp + 1):
        for name, most in (("zb-v", 2 * pp), ("dualpipe-v", 2 * pp + 1), ("dualpipe", pp + 1)):
            if possible(name, pp, m):
                schedule = build(name, pp, m)
                assert max(in_flight(schedule, rank) for rank in range(pp)) == min(most, 2 * m)


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
    assume(possible(name, pp, m))
    schedule = build(name, pp, m)
    rows = add_p2p(schedule)
    check(schedule)
    check(schedule, rows)
    check(schedule, add_p2p(schedule, paired=True))
    sends = [o for row in rows for step in row if not isinstance(step, Action) for o in step if o.send]
    hops = sum(a != b for a, b in pairwise(schedule.placement[0]))
    assert len(sends) == len({o.message for o in sends}) == 2 * hops * m
    assert schedule.copies == copies(name)
    assert all(len(schedule.stages_of(rank)) == virtual_stages(name) * copies(name) for rank in range(pp))
    splits = any(a.op is Op.W for a in schedule.rows[0])
    assert splits is splits_weight_gradient(name) or (schedule.overlaps and m < 2 * pp)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(ALL), pp=st.integers(1, 8), m=st.integers(1, 20))
def test_never_more_in_flight_than_promised(name: str, pp: int, m: int) -> None:
    assume(possible(name, pp, m))
    schedule = build(name, pp, m)
    v = virtual_stages(name)
    for rank in range(pp):
        most = {
            "gpipe": m,
            "1f1b": pp - rank,
            "interleaved": 2 * (pp - 1 - rank) + (v - 1) * pp + 1,
            "zb-h1": pp,
            "zb-h2": 2 * pp - 1,
            "zb-v": 2 * pp,
            "dualpipe": pp + 1,
            "dualpipe-v": 2 * pp + 1,
        }[parse(name)[0]]
        assert in_flight(schedule, rank) <= min(m * v, most)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(["dualpipe", "dualpipe-v"]), pp=st.integers(1, 8), m=st.integers(1, 20))
def test_pairs_can_run_as_one(name: str, pp: int, m: int) -> None:
    """Two that wait for nothing of each other; and half of the backwards find a partner in a long step."""
    assume(possible(name, pp, m))
    schedule = build(name, pp, m)
    for row in schedule.rows:
        partners = pairs(row)
        for forward, backward in partners.items():
            assert (forward.op, backward.op) == (Op.F, Op.BW)
            assert forward.micro_batch != backward.micro_batch
            assert row.index(backward) == row.index(forward) + 1
        assert len(partners) == len(set(partners.values()))
        if m >= 6 * pp:
            assert len(partners) >= len(row) / 6


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
    assert parse("zb-v") == ("zb-v", 2)
    assert parse("dualpipe") == ("dualpipe", 1)
    for name in (
        "interleaved",
        "interleaved:0",
        "interleaved:-1",
        "interleaved:²",
        "1f1b:2",
        "1F1B",
        "",
        "gpipe:",
        "zbv",
        "zb-v:2",
    ):
        with pytest.raises(ValueError, match="unknown schedule") as raised:
            parse(name)
        assert all(known in str(raised.value) for known in NAMES)
    with pytest.raises(ValueError, match="pp=0"):
        build("1f1b", 0, 4)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("zbv", "zb-v"),
        ("dualpipev", "dualpipe-v"),
        ("DualPipeV", "dualpipe-v"),
        ("1F1B", "1f1b"),
        ("interleaved", "interleaved:2"),
        ("zb_h1", "zb-h1"),
        ("gpip", "gpipe"),
    ],
)
def test_did_you_mean(written: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {meant}\\?"):
        parse(written)


def test_about() -> None:
    for name in NAMES:
        summary, source = about(name)
        assert summary.endswith(".")
        assert source
    assert about("interleaved:7") == about("interleaved:V")


@given(name=st.sampled_from(ALL), pp=st.integers(0, 6), m=st.integers(0, 6))
def test_a_fault_is_what_build_refuses(name: str, pp: int, m: int) -> None:
    wrong = fault(name, pp, m)
    assert possible(name, pp, [m, m]).tolist() == [wrong is None] * 2
    if wrong is None:
        build(name, pp, m)
    else:
        with pytest.raises(ValueError, match="pp="):
            build(name, pp, m)


def test_the_fix_is_the_nearest_size() -> None:
    assert fault("dualpipe", 5, 8) == (
        "dualpipe feeds micro-batches from both ends: pp=5 must be even",
        "use pp=4 or pp=6",
    )
    assert fault("dualpipe", 1, 8) == ("dualpipe feeds micro-batches from both ends: pp=1 must be even", "use pp=2")


def test_dualpipe_is_two_mirrored_halves() -> None:
    """Ranks r and p-1-r run the same on the other copy."""
    schedule = build("dualpipe", 6, 14)
    for rank in range(6):
        mirrored = [(a.op, a.stage, a.micro_batch ^ 1) for a in schedule.rows[5 - rank]]
        assert [tuple(a) for a in schedule.rows[rank]] == mirrored
    assert schedule.stages_of(1) == (1, 4)
    assert [schedule.rank_of(1, schedule.copy_of(i)) for i in (0, 1)] == [1, 4]
