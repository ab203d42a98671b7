"""Table 1: generators by name, the passes over their rows, the live set and the timeline."""

from shardwise.schedule.check import check
from shardwise.schedule.errors import ScheduleError
from shardwise.schedule.live import LiveState, live_states, profile
from shardwise.schedule.passes import add_p2p
from shardwise.schedule.periodic import PeriodicSpan, walk_periodic
from shardwise.schedule.registry import (
    NAMES,
    build,
    capped,
    parse,
    period,
    rows,
    saturation,
    span,
    splits_weight_gradient,
    virtual_stages,
)
from shardwise.schedule.walk import Slot, Timeline, walk

__all__ = [
    "NAMES",
    "LiveState",
    "PeriodicSpan",
    "ScheduleError",
    "Slot",
    "Timeline",
    "add_p2p",
    "build",
    "capped",
    "check",
    "live_states",
    "parse",
    "period",
    "profile",
    "rows",
    "saturation",
    "span",
    "splits_weight_gradient",
    "virtual_stages",
    "walk",
    "walk_periodic",
]
