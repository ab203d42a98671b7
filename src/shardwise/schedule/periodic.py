"""Long steps at the price of short ones: walk the ends of the step, continue its steady state by the period."""

from __future__ import annotations

from functools import lru_cache
from math import isclose
from typing import NamedTuple

from shardwise.schedule.graph import Graph, graph_of
from shardwise.schedule.registry import build, period, rows
from shardwise.schedule.walk import Delays, Durations, Seconds, end_times

TOLERANCE = 1e-3
"""By how much, relatively, two periods may differ that count as equal."""


class PeriodicSpan(NamedTuple):
    """`span_s` of a step of `micro_batches`, of which `walked` were walked."""

    span_s: float
    walked: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.span_s:.6g} s ({self.walked} of {self.micro_batches} micro-batches walked)"


@lru_cache(maxsize=8)
def _graph(name: str, pp: int, micro_batches: int) -> Graph:
    """Layouts that a search walks one after the other differ in their seconds more often than in their rows."""
    return graph_of(rows(name, pp, micro_batches), build(name, pp, micro_batches))


def walk_periodic(name: str, pp: int, micro_batches: int, durations: Durations, p2p_s: Delays = 0.0) -> PeriodicSpan:
    """The span of `micro_batches`, walking fewer where the steady state is reached, to TOLERANCE.

    That is where two successive periods take the same time, and as much as the busiest rank needs for one: before its
    pace has spread to the ends of the step they may be equal too. Else twice as many are walked, up to all. A ring of
    messages that is slower than any rank, by little, may show up later than that (seen in dualpipe: 0.8 %).
    """
    seconds = Seconds(durations, p2p_s)

    def span_s(m: int) -> float:
        return max(end_times(_graph(name, pp, m), seconds))

    step = period(name, pp)
    walked = 4 * pp + 4
    while True:
        walked += (micro_batches - walked) % step  # the last group is as short as that of the whole step
        if walked >= micro_batches:
            return PeriodicSpan(span_s(micro_batches), micro_batches, micro_batches)
        last_s, before_s, earlier_s = (span_s(walked - k * step) for k in (0, 1, 2))
        each_s = last_s - before_s
        steady = isclose(each_s, before_s - earlier_s, rel_tol=TOLERANCE)
        if steady and each_s >= _busiest_s(name, pp, seconds) * (1 - TOLERANCE):
            return PeriodicSpan(last_s + (micro_batches - walked) // step * each_s, walked, micro_batches)
        walked *= 2


def _busiest_s(name: str, pp: int, seconds: Seconds) -> float:
    """What the busiest rank computes in one period."""
    actions = build(name, pp, period(name, pp)).rows
    return max(sum(seconds.of((op, stage)) for op, stage, _ in row) for row in actions)
