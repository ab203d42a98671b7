"""Pictures in letters: the pipeline's timeline, and bars that add up to the whole step."""

from __future__ import annotations

from bisect import bisect_right

from rich.text import Text

from shardwise.schedule import Slot, Timeline
from shardwise.schedule.table import Op
from shardwise.units import format_seconds

IDLE = "."
MAX_ROWS = 16
STYLES = {"F": "blue", "B": "green", "W": "magenta", IDLE: "dim"}


def pipeline(timeline: Timeline, width: int) -> Text:
    """The whole step, true to scale: a row for each pipeline rank, a column for each slice of time."""
    ranks = pick(len(timeline.rows), MAX_ROWS)
    label = len(f"rank {ranks[-1]}") + 1
    room = max(10, width - label)
    slice_s = timeline.span_s / room
    text = Text(no_wrap=True, overflow="crop")
    for rank in ranks:
        text.append(f"{f'rank {rank}':{label}}")
        for letter in _row(timeline.rows[rank], slice_s, room):
            text.append(letter, STYLES[letter.upper()])
        text.append("\n")
    letters = {letter.upper() for rank in ranks for letter in _row(timeline.rows[rank], slice_s, room)}
    text.append(_legend(len(ranks), len(timeline.rows), slice_s, split="W" in letters), "dim")
    return text


def _row(slots: tuple[Slot, ...], slice_s: float, room: int) -> str:
    """What runs at the middle of each slice; neighbouring micro-batches differ in case."""
    starts = [slot.start_s for slot in slots]
    out: list[str] = []
    for column in range(room):
        time_s = (column + 0.5) * slice_s
        i = bisect_right(starts, time_s) - 1
        if i < 0 or time_s >= slots[i].end_s:
            out.append(IDLE)
            continue
        letter = "B" if slots[i].action.op is Op.BW else str(slots[i].action.op)
        out.append(letter.lower() if slots[i].action.micro_batch % 2 else letter)
    return "".join(out)


def _legend(shown: int, ranks: int, slice_s: float, split: bool) -> str:
    rows = f"{shown} of {ranks} ranks shown; " if shown < ranks else ""
    names = "F forward, B input gradient, W weight gradient" if split else "F forward, B backward"
    return (
        f"{names}, {IDLE} idle;\n{rows}upper and lower case part micro-batches; a column is {format_seconds(slice_s)}"
    )


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
