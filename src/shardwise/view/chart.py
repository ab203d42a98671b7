"""Pictures in letters: the pipeline's timeline, and bars that add up to the whole step."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from statistics import median

from rich.text import Text

from shardwise.schedule import Slot, Timeline
from shardwise.schedule.table import Action, Op
from shardwise.units import format_seconds

IDLE, GOES_ON = ".", "-"
MAX_ROWS = 16
MAX_LINES = 36
"""Of one picture: a long step is drawn in bands, one under the other, so that no action is too short to be seen."""

STYLES = {"F": "blue", "B": "green", "W": "magenta", IDLE: "dim"}


@dataclass(frozen=True, slots=True)
class _Scale:
    """How a picture is drawn. `named`: actions have names, not letters; `chunked`: ranks hold several stages."""

    slice_s: float
    room: int
    bands: int
    named: bool
    chunked: bool


def pipeline(timeline: Timeline, width: int) -> Text:
    """The step, true to scale: a row for each pipeline rank, a column for each slice of time."""
    ranks = pick(len(timeline.rows), MAX_ROWS)
    label = len(f"rank {ranks[-1]}") + 1
    scale = _scale(timeline, max(10, width - label), len(ranks))
    bands = list(range(scale.bands))
    omits = scale.bands > 2 and scale.bands * (len(ranks) + 1) > MAX_LINES
    if omits:
        start = max(1, MAX_LINES // 3 // (len(ranks) + 1))
        bands = [*bands[:start], bands[-1]]
    text = Text(no_wrap=True, overflow="crop")
    for band in bands:
        first_s = band * scale.room * scale.slice_s
        if scale.bands > 1:
            gap = " (what lies between is not drawn)" if omits and band == bands[-1] else ""
            text.append(f"from {format_seconds(first_s)}{gap}\n", "dim")
        for rank in ranks:
            text.append(f"{f'rank {rank}':{label}}")
            _draw(text, _row(timeline, rank, first_s, scale), scale.named)
            text.append("\n")
    text.append(_legend(timeline, len(ranks), scale), "dim")
    return text


def _scale(timeline: Timeline, room: int, ranks: int) -> _Scale:
    """Actions with their names where the picture's lines suffice, else letters; the last band ends with the step."""
    pp = len(timeline.rows)
    chunked = any(slot.action.stage >= pp for row in timeline.rows for slot in row)
    longest = max((len(_name(slot.action, pp, chunked)) for row in timeline.rows for slot in row), default=1)
    shortest_s = _shortest_s(timeline)

    def bands(columns: int) -> int:
        return max(1, math.ceil(timeline.span_s / shortest_s * columns / room - 1e-6))

    named = bands(longest) * (ranks + 1) <= MAX_LINES
    count = bands(longest if named else 1)
    return _Scale(timeline.span_s / (room * count), room, count, named, chunked)


def _shortest_s(timeline: Timeline) -> float:
    """The usual length of the kind of action that is shortest: a stage may have a shorter one than all others."""
    lengths: dict[str, list[float]] = {}
    for row in timeline.rows:
        for slot in row:
            if slot.end_s > slot.start_s:
                lengths.setdefault(str(slot.action.op), []).append(slot.end_s - slot.start_s)
    return min((median(found) for found in lengths.values()), default=timeline.span_s or 1.0)


def _row(timeline: Timeline, rank: int, first_s: float, scale: _Scale) -> str:
    """What runs at the middle of each slice: name and dashes, or a letter, in lower case for odd micro-batches."""
    slots = timeline.rows[rank]
    starts = [slot.start_s for slot in slots]
    out: list[str] = []
    before, name = -1, ""
    for column in range(scale.room):
        time_s = first_s + (column + 0.5) * scale.slice_s
        i = bisect_right(starts, time_s) - 1
        if i < 0 or time_s >= slots[i].end_s:
            out.append(IDLE)
            continue
        action = slots[i].action
        if not scale.named:
            out.append(action.op[0].lower() if action.micro_batch % 2 else action.op[0])
            continue
        if i != before:
            name = _part_of_name(slots[i], _name(action, len(timeline.rows), scale.chunked), column, first_s, scale)
        before = i
        out.append(name[:1] or GOES_ON)
        name = name[1:]
    return "".join(out)


def _part_of_name(slot: Slot, name: str, column: int, first_s: float, scale: _Scale) -> str:
    """What this band says of an action's name: all where it has the room, a letter or nothing where another has."""
    if column == 0 and _said_above(slot, name, first_s, scale.slice_s):
        return ""
    end_s = first_s + scale.room * scale.slice_s
    goes_on = slot.end_s > end_s + scale.slice_s / 2
    return name[0] if goes_on and not _said_above(slot, name, end_s, scale.slice_s) else name


def _said_above(slot: Slot, name: str, border_s: float, slice_s: float) -> bool:
    """Whether an action's name stands above the border of two bands that it crosses."""
    above = int(max(0.0, border_s - slot.start_s) / slice_s + 0.5)
    below = math.ceil(max(0.0, slot.end_s - border_s) / slice_s - 0.5)
    return above > 0 and above >= min(len(name), below)


def _name(action: Action, pp: int, chunked: bool) -> str:
    """F3, B3, W3; with several chunks on a rank a letter for the chunk: F3a, F3b."""
    return f"{action.op[0]}{action.micro_batch}{chr(ord('a') + action.stage // pp % 26) if chunked else ''}"


def _draw(text: Text, row: str, named: bool) -> None:
    """The row in colours; what follows an action's letter has that letter's."""
    style = ""
    for letter in row:
        style = STYLES.get(letter if named else letter.upper(), style)
        text.append(letter, style)


def _legend(timeline: Timeline, shown: int, scale: _Scale) -> str:
    split = any(slot.action.op is Op.W for row in timeline.rows for slot in row)
    names = "F forward, B input gradient, W weight gradient" if split else "F forward, B backward"
    several = " and the chunk" if scale.chunked else ""
    part = f"with the micro-batch{several}" if scale.named else "in lower case for odd micro-batches"
    idle = sorted(100 * seconds / timeline.span_s for seconds in timeline.idle_s)
    rows = f"{shown} of {len(timeline.rows)} ranks shown; " if shown < len(timeline.rows) else ""
    spread = f"{idle[0]:.1f} %" if idle[-1] - idle[0] < 0.05 else f"{idle[0]:.1f} to {idle[-1]:.1f} %"
    column = format_seconds(scale.slice_s)
    return f"{names}, {part}; {IDLE} idle\n{rows}a column is {column}; the ranks are idle {spread} of the time"


def pick(count: int, most: int) -> list[int]:
    """At most `most` of 0 .. count - 1, evenly spaced, both ends among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def waterfall(values: list[float], width: int) -> list[str]:
    """One bar a value, each beginning where the one before it ends: together they fill the width."""
    total = sum(values)
    bars: list[str] = []
    done = 0.0
    for value in values:
        start, end = (round(width * x / total) if total > 0 else 0 for x in (done, done + value))
        mark = "█" * (end - start) or ("▏" if value > 0 else "")
        bars.append(" " * min(start, width - 1) + mark)
        done += value
    return bars
