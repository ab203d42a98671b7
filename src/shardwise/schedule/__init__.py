"""Table 1: generators by name, the passes over their rows, the live set and the timeline."""

from shardwise.schedule.check import check
from shardwise.schedule.errors import ScheduleError
from shardwise.schedule.exchange import dump, load
from shardwise.schedule.live import LiveState, live_states, profile, rank_states
from shardwise.schedule.passes import add_p2p
from shardwise.schedule.periodic import PeriodicSpan, walk_periodic
from shardwise.schedule.registry import (
    NAMES,
    About,
    about,
    build,
    capped,
    copies,
    fault,
    overlaps,
    parse,
    period,
    placement,
    possible,
    rank_span,
    rows,
    saturation,
    span,
    splits_weight_gradient,
    transfers,
    virtual_stages,
)
from shardwise.schedule.table import pairs
from shardwise.schedule.walk import Slot, Timeline, walk

__all__ = [
    "NAMES",
    "About",
    "LiveState",
    "PeriodicSpan",
    "ScheduleError",
    "Slot",
    "Timeline",
    "about",
    "add_p2p",
    "build",
    "capped",
    "check",
    "copies",
    "dump",
    "fault",
    "live_states",
    "load",
    "overlaps",
    "pairs",
    "parse",
    "period",
    "placement",
    "possible",
    "profile",
    "rank_span",
    "rank_states",
    "rows",
    "saturation",
    "span",
    "splits_weight_gradient",
    "transfers",
    "virtual_stages",
    "walk",
    "walk_periodic",
]
