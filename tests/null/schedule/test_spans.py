"""Closed forms against the walk, the walk itself, and its continuation by the period."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedule import add_p2p, build, span, virtual_stages, walk, walk_periodic
from shardwise.schedule.table import Op

FBW = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.5))


def walked(
    name: str, pp: int, m: int, scale: list[float], fbw: tuple[float, float, float], p2p_s: float = 0.0
) -> float:
    schedule = build(name, pp, m)
    return walk(add_p2p(schedule), schedule, seconds(scale, fbw), p2p_s).span_s


def seconds(scale: list[float], fbw: tuple[float, float, float]) -> dict[tuple[Op, int], float]:
    f, b, w = fbw
    units = {Op.F: f, Op.B: b, Op.W: w, Op.BW: b + w}
    return {(op, stage): unit * x for op, unit in units.items() for stage, x in enumerate(scale)}


def closed(
    name: str, pp: int, m: int, scale: list[float], fbw: tuple[float, float, float], p2p_s: float = 0.0
) -> float:
    f, b, w = (np.array(scale) * unit for unit in fbw)
    return float(span(name, pp, m, f, b, w, p2p_s))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved:2", "interleaved:3"]),
    pp=st.integers(1, 8),
    m=st.integers(1, 20),
    fbw=st.sampled_from(FBW),
)
def test_exact_for_equal_stages(name: str, pp: int, m: int, fbw: tuple[float, float, float]) -> None:
    scale = [1.0] * pp * virtual_stages(name)
    # a short last group of interleaving is fitted, not derived
    near = 0.02 if name.startswith("inter") and m % pp else 1e-9
    assert closed(name, pp, m, scale, fbw) == pytest.approx(walked(name, pp, m, scale, fbw), rel=near)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    pp=st.integers(2, 8),
    m=st.integers(1, 20),
    fbw=st.sampled_from(FBW),
    data=st.data(),
)
def test_within_3_percent_for_any_stages(
    name: str, pp: int, m: int, fbw: tuple[float, float, float], data: st.DataObject
) -> None:
    scale = data.draw(st.lists(st.floats(0.9, 1.1), min_size=pp, max_size=pp))
    assert closed(name, pp, m, scale, fbw) == pytest.approx(walked(name, pp, m, scale, fbw), rel=0.03)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved:2", "interleaved:4"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_near_for_embedding_head_and_one_long_stage(name: str, pp: int) -> None:
    stages = pp * virtual_stages(name)
    near = 0.04 if name == "interleaved:2" else 0.03  # worst at p=2
    for m in (2 * pp, 3 * pp, 5 * pp):
        for first, middle, last in ((0.8, 1.0, 1.3), (1.1, 1.0, 0.9), (1.0, 1.15, 1.0), (1.0, 1.0, 1.2)):
            scale = [1.0] * stages
            scale[stages // 2 - 1] = middle
            scale[0], scale[-1] = first, last
            for fbw in FBW:
                assert closed(name, pp, m, scale, fbw) == pytest.approx(walked(name, pp, m, scale, fbw), rel=near)


@pytest.mark.golden
def test_one_long_stage() -> None:
    """p=4, m=16, one stage 30 % longer costs 25 %: 71.4 instead of 57.0."""
    fbw = (1.0, 1.0, 1.0)
    assert walked("1f1b", 4, 16, [1.0] * 4, fbw) == pytest.approx(57.0)
    assert closed("1f1b", 4, 16, [1.0] * 4, fbw) == pytest.approx(57.0)
    assert walked("1f1b", 4, 16, [1.0, 1.0, 1.0, 1.3], fbw) == pytest.approx(71.4)
    assert closed("1f1b", 4, 16, [1.0, 1.0, 1.0, 1.3], fbw) == pytest.approx(71.4)


@pytest.mark.golden
@pytest.mark.parametrize(("pp", "slope"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_transfers_in_the_closed_form(pp: int, slope: float) -> None:
    fbw, scale, c = (1.0, 1.0, 1.0), [1.0] * pp, 0.01
    for m in (1, 2, pp, 4 * pp, 5 * pp + 1):
        schedule = build("1f1b", pp, m)
        free_of_queues = walk(schedule.rows, schedule, seconds(scale, fbw), c).span_s
        assert closed("1f1b", pp, m, scale, fbw, c) == pytest.approx(free_of_queues, rel=1e-9)
    more = closed("1f1b", pp, 5 * pp, scale, fbw, c) - closed("1f1b", pp, 4 * pp, scale, fbw, c)  # one round trip
    assert (more - pp * 3.0) / (pp * c) == pytest.approx(slope)


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "interleaved:2", "interleaved:4"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_transfers_that_stop_growing_with_the_micro_batches(name: str, pp: int) -> None:
    fbw, scale, c = (1.0, 1.2, 0.8), [1.0] * pp * virtual_stages(name), 0.01
    for m in (1, pp, 2 * pp, 6 * pp):
        schedule = build(name, pp, m)
        free_of_queues = walk(schedule.rows, schedule, seconds(scale, fbw), c).span_s
        assert closed(name, pp, m, scale, fbw, c) == pytest.approx(free_of_queues, rel=1e-9)


def test_the_closed_form_broadcasts() -> None:
    f = np.linspace(1.0, 1.2, 12).reshape(3, 4)
    for name in ("gpipe", "1f1b", "zb-h1"):
        many = span(name, 4, np.array([2, 8, 16]), f, f, f)
        assert many.shape == (3,)
        assert many == pytest.approx([float(span(name, 4, m, x, x, x)) for m, x in zip((2, 8, 16), f, strict=True)])
        assert span(name, 4, np.array([[2], [8]]), f, f, f).shape == (2, 3)
    with pytest.raises(ValueError, match="has 8 stages, not 4"):
        span("interleaved:2", 4, 8, f, f, f)


def test_busy_and_idle() -> None:
    schedule = build("1f1b", 2, 3)
    timeline = walk(add_p2p(schedule), schedule, seconds([1.0, 2.0], (1.0, 1.0, 1.0)), {(0, 1): 0.5, (1, 0): 0.25})
    assert timeline.busy_s == (9.0, 18.0)
    assert timeline.rows[1][0].start_s == 1.5
    # Rank 1 waits for its first F and, in the exchange after its second BW, for its third; rank 0 ends the step.
    assert timeline.span_s == pytest.approx(1.5 + 18.0 + 0.5 + 0.25 + 2.0)
    assert timeline.idle_s == pytest.approx((timeline.span_s - 9.0, timeline.span_s - 18.0))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved:2", "zb-h1"])
@pytest.mark.parametrize("scale", [1.0, 1.3, 1.02])
@pytest.mark.parametrize("p2p_s", [0.0, 0.05])
def test_continued_by_the_period(name: str, scale: float, p2p_s: float) -> None:
    stages = [1.0] * 4 * virtual_stages(name)
    stages[1] = scale
    for m in (12, 90, 122):
        found = walk_periodic(name, 4, m, seconds(stages, (1.0, 1.2, 0.8)), p2p_s)
        assert found.micro_batches == m
        assert found.walked == m if m == 12 else found.walked < m or scale == 1.02
        assert found.span_s == pytest.approx(walked(name, 4, m, stages, (1.0, 1.2, 0.8), p2p_s), rel=1e-3)


def test_zero_bubble_shorter_than_the_pipeline() -> None:
    """m < p and a long second stage: the weight gradients that it put off end the step."""
    scale, fbw = [1.0, 1.3, 1.0, 1.0], (1.0, 1.0, 1.0)
    assert walked("zb-h1", 4, 2, scale, fbw) == pytest.approx(12.2)
    assert closed("zb-h1", 4, 2, scale, fbw) == pytest.approx(12.2)
