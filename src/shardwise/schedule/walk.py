"""Gives the rows times: when each action starts and ends if computes take `durations` and messages take `p2p_s`.

What waits for what is the graph's business (`graph.py`); all that is left is max and plus, node after node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from shardwise.schedule.graph import Cost, Drawn, Graph, graph_of
from shardwise.schedule.table import Action, Op, Schedule, Step

Durations = Mapping[tuple[Op, int], float] | Callable[[Op, int], float]
"""(op, stage) -> seconds."""

Delays = float | Mapping[tuple[int, int], float] | Callable[[int, int], float]
"""(from rank, to rank) -> seconds of one message."""

Pairs = Mapping[tuple[int, int], float] | Callable[[int, int], float]
"""(stage of the F, stage of the BW) -> seconds of both, run as one."""

_Key = TypeVar("_Key", Op, int)


class Slot(NamedTuple):
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """`rows[rank]` has the actions in order; the span runs from 0 to the end of the last action of any rank."""

    rows: tuple[tuple[Slot, ...], ...]
    span_s: float
    busy_s: tuple[float, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Per rank: the span less its busy time."""
        return tuple(self.span_s - busy for busy in self.busy_s)


class Seconds(NamedTuple):
    """What a walk is asked. With `pair_s`, each F and BW of `pairs` run as one in a schedule that overlaps."""

    durations: Durations
    p2p_s: Delays = 0.0
    pair_s: Pairs | None = None

    def of(self, cost: Cost) -> float:
        """Of what a node of the graph stands for."""
        match cost:
            case None:
                return 0.0
            case Op() as op, stage:
                return _ask(self.durations, op, stage)
            case str(), forward, backward:
                assert self.pair_s is not None
                return _ask(self.pair_s, forward, backward)
            case source, target:
                return _ask(self.p2p_s, source, target)


def _ask(
    seconds: float | Mapping[tuple[_Key, int], float] | Callable[[_Key, int], float], one: _Key, other: int
) -> float:
    if callable(seconds):
        return float(seconds(one, other))
    return float(seconds[one, other] if isinstance(seconds, Mapping) else seconds)


def walk(
    rows: Sequence[Sequence[Step]],
    schedule: Schedule,
    durations: Durations,
    p2p_s: Delays = 0.0,
    pair_s: Pairs | None = None,
) -> Timeline:
    """Time the rows: those of `add_p2p`, with `pair_s` those of `add_p2p(schedule, paired=True)`; or `schedule.rows` as
    they are, with messages that no queue ever holds up. Raises `ScheduleError` as `graph_of` does.
    """
    graph, seconds = graph_of(rows, schedule, pair_s is not None), Seconds(durations, p2p_s, pair_s)
    ends = end_times(graph, seconds)
    slots = tuple(tuple(_slots(row, ends, seconds)) for row in graph.rows)
    return Timeline(slots, max(ends), tuple(sum(slot.end_s - slot.start_s for slot in row) for row in slots))


def end_times(graph: Graph, seconds: Seconds) -> list[float]:
    """Of each node; the latest is the span of the step, as every message is waited for."""
    costs = [seconds.of(cost) for cost in graph.costs]
    ends: list[float] = []
    take = ends.append
    take(0.0)
    nodes = zip(graph.first, graph.second, graph.cost, strict=True)
    next(nodes)  # that is node 0
    for first, second, cost in nodes:
        a, b = ends[first], ends[second]
        take((a if a > b else b) + costs[cost])
    return ends


def _slots(row: list[Drawn], ends: list[float], seconds: Seconds) -> list[Slot]:
    slots: list[Slot] = []
    for action, end, after, pair in row:
        start_s, end_s = max(ends[after[0]], ends[after[1]]), ends[end]
        if pair is not None:
            forward, backward = pair
            f_s, bw_s = seconds.of((Op.F, forward)), seconds.of((Op.BW, backward))
            turn_s = start_s + (end_s - start_s) * f_s / ((f_s + bw_s) or 1.0)
            start_s, end_s = (start_s, turn_s) if action.op is Op.F else (turn_s, end_s)
        slots.append(Slot(action, start_s, end_s))
    return slots
