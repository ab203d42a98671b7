"""Long steps at the price of short ones: walk the ends of the step, continue its steady state by the period."""

from __future__ import annotations

from math import isclose
from typing import NamedTuple

from shardwise.schedule.registry import build, period, rows
from shardwise.schedule.walk import Delays, Durations, Pairs, Timeline, walk

TOLERANCE = 1e-3
"""By how much, relatively, two periods may differ that count as equal."""


class PeriodicSpan(NamedTuple):
    """`span_s` of a step of `micro_batches`, of which `walked` were walked."""

    span_s: float
    walked: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.span_s:.6g} s ({self.walked} of {self.micro_batches} micro-batches walked)"


def walk_periodic(
    name: str, pp: int, micro_batches: int, durations: Durations, p2p_s: Delays = 0.0, pair_s: Pairs | None = None
) -> PeriodicSpan:
    """The span of `micro_batches`, walking fewer where the steady state is reached, to TOLERANCE.

    That is where two successive periods take the same time, and as much as the busiest rank needs for one: before its
    pace has spread to the ends of the step they may be equal too. Else twice as many are walked, up to all. A ring of
    messages that is slower than any rank, by little, may show up later than that (seen in dualpipe: 0.8 %).
    """

    def timeline(m: int) -> Timeline:
        return walk(rows(name, pp, m), build(name, pp, m), durations, p2p_s, pair_s)

    step = period(name, pp)
    walked = 4 * pp + 4
    while True:
        walked += (micro_batches - walked) % step  # the last group is as short as that of the whole step
        if walked >= micro_batches:
            return PeriodicSpan(timeline(micro_batches).span_s, micro_batches, micro_batches)
        last, before, earlier = (timeline(walked - k * step) for k in (0, 1, 2))
        each_s = last.span_s - before.span_s
        busiest_s = max(a - b for a, b in zip(last.busy_s, before.busy_s, strict=True))
        steady = isclose(each_s, before.span_s - earlier.span_s, rel_tol=TOLERANCE)
        if steady and each_s >= busiest_s * (1 - TOLERANCE):
            return PeriodicSpan(last.span_s + (micro_batches - walked) // step * each_s, walked, micro_batches)
        walked *= 2
