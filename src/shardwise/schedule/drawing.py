"""Draws a schedule as text: a line for each rank, a cell for each unit of time."""

from __future__ import annotations

from shardwise.schedule.table import Action, Op, Schedule
from shardwise.schedule.walk import Durations, Timeline, walk

IDLE, GOES_ON = ".", "-"

MAX_BANDS = 3

_CHUNKS = {
    (2, 1): "small letters: the rank's second stage",
    (2, 2): "small letters: second copy of the weights",
    (3, 1): "a, b, .. chunk",
}
_UNITS = {Op.F: 1.0, Op.B: 1.0, Op.W: 1.0, Op.BW: 2.0}


def grid(schedule: Schedule, durations: Durations | None = None, cell_s: float | None = None) -> list[list[str]]:
    """`grid[rank][time]`: the action that starts in the cell, GOES_ON or IDLE; communication takes no time.

    Without `durations`, F = B = W = 1 and BW = 2. `cell_s` is by default the shortest action, so that none is lost.
    """
    timeline = walk(schedule.rows, schedule, durations or (lambda op, _: _UNITS[op]))
    if cell_s is None:
        lengths = (slot.end_s - slot.start_s for row in timeline.rows for slot in row)
        cell_s = min((length for length in lengths if length > 0), default=1.0)
    return _cells(schedule, timeline, cell_s)


def render(schedule: Schedule, durations: Durations | None = None, columns: int = 80) -> str:
    """The grid with its legend, at most `columns` wide, in up to MAX_BANDS bands one below the other; what does not
    fit is said, never dropped in silence.
    """
    cells = grid(schedule, durations)
    length = max(map(len, cells))
    width = max(len(cell) for row in cells for cell in row) + 1
    label = len(f"rank {schedule.pp - 1}")
    room = max(1, (columns - label - 3) // width)
    shown = min(length, room * MAX_BANDS)
    lines = [f"{schedule.name}, {schedule.pp} ranks, {schedule.micro_batches} micro-batches"]
    for first in range(0, shown, room):
        lines += [""] if first else []
        more = " …" if shown < length and first + room >= shown else ""
        for rank, row in enumerate(cells):
            text = "".join(cell.rjust(width) for cell in row[first : first + room])
            lines.append(f"{f'rank {rank}':{label}}{text}{more}")
    if shown < length:
        lines.append(f"… {shown} of {length} time units shown")
    return "\n".join([*lines, *_legend(schedule, columns)])


def _cells(schedule: Schedule, timeline: Timeline, cell_s: float) -> list[list[str]]:
    length = max(1, round(timeline.span_s / cell_s))
    cells = [[IDLE] * length for _ in timeline.rows]
    for rank, row in enumerate(timeline.rows):
        stages = schedule.stages_of(rank)
        for slot in row:
            first = min(round(slot.start_s / cell_s), length - 1)
            last = min(max(round(slot.end_s / cell_s), first + 1), length)
            cells[rank][first:last] = [GOES_ON] * (last - first)
            cells[rank][first] = _name(slot.action, stages)
    return cells


def _name(action: Action, stages: tuple[int, ...]) -> str:
    """F3, B3, W3; f3, b3, w3 on the second of two chunks; of more, a letter for the chunk: F3a, F3b. BW is drawn as a
    B, twice as long.
    """
    chunk, name = stages.index(action.stage), f"{action.op[0]}{action.micro_batch}"
    if len(stages) > 2:
        return f"{name}{chr(ord('a') + chunk % 26)}"
    return name.lower() if chunk else name


def _legend(schedule: Schedule, columns: int) -> list[str]:
    split = any(action.op is Op.W for row in schedule.rows for action in row)
    words = ["F forward", "B input gradient, W weight gradient" if split else "B backward", f"{IDLE} idle"]
    chunks = len(schedule.stages_of(0))
    if chunks > 1:
        words.insert(2, _CHUNKS[min(chunks, 3), schedule.copies])
    lines = [""]
    for word in words:
        joined = f"{lines[-1]}; {word}" if lines[-1] else word
        lines = [*lines[:-1], joined] if len(joined) <= columns else [*lines, word]
    return lines
