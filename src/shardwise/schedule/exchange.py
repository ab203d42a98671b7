"""Schedules in the form that torch.distributed.pipelining reads and writes: its compute-only CSV.

A line is a rank, a cell an action: stage, kind, micro-batch, as in `2F0`. The kinds are F, I input gradient, W weight
gradient, B both; `(0F6;7B2)OVERLAP_F_B` is an F and a B run as one (`pairs`). An empty cell is a rank that waits, which
says nothing here: the order of the actions is the schedule. torch reads what `dump` writes
(`_PipelineScheduleRuntime._load_csv`, seen in 2.13) and the other way round.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from shardwise.schedule.check import check
from shardwise.schedule.errors import ScheduleError
from shardwise.schedule.table import Action, Op, Schedule, pairs

MAX_CHARACTERS = 8 * 2**20
"""Longest text that `load` looks at: about a million actions."""

_KIND = {Op.F: "F", Op.B: "I", Op.W: "W", Op.BW: "B"}
_OP = {kind: op for op, kind in _KIND.items()}
_ACTION = re.compile(r"([0-9]{1,7})([FIWB])([0-9]{1,7})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_OTHER = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_[FB]|RECV_[FB])[0-9]*")
_SHOWN = 5


def dump(schedule: Schedule) -> str:
    """The CSV, without the cells that wait. Raises ValueError for two copies of the weights, which torch lacks."""
    if schedule.copies > 1:
        raise ValueError(
            f"{schedule.name} holds {schedule.copies} copies of the weights; torch's form knows one rank for each "
            "stage: use dualpipe-v"
        )
    return "".join(f"{','.join(_cells(row, schedule.overlaps))}\n" for row in schedule.rows)


def load(text: str, pp: int | None = None) -> Schedule:
    """The schedule of a CSV, named "csv", checked; on `pp` ranks if that is given.

    Raises ScheduleError with the first few faults: cells that are no compute actions, stages on two ranks or on none,
    actions that are missing or doubled, pairs that cannot run as one, an order that cannot run.
    """
    if len(text) > MAX_CHARACTERS:
        raise ScheduleError(f"the CSV has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    lines = text.strip("\r\n").splitlines()
    _raise([] if pp in (None, len(lines)) else [f"{len(lines)} lines for {pp} ranks: one a rank is wanted"])
    faults: list[str] = []
    together: set[tuple[Action, Action]] = set()
    rows = tuple(tuple(_row(rank, line, faults, together)) for rank, line in enumerate(lines))
    _raise(faults)
    schedule = Schedule(
        "csv", (_placement(rows),), rows, _count(a.micro_batch for r in rows for a in r), bool(together)
    )
    check(schedule)
    if together:
        _raise(_unlike(together, {pair for row in rows for pair in pairs(row).items()}))
    return schedule


def _raise(faults: Sequence[str]) -> None:
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ScheduleError(f"schedule CSV: {'; '.join(faults[:_SHOWN])}{more}")


def _count(numbers: Iterator[int]) -> int:
    return max(numbers, default=-1) + 1


def _cells(row: Sequence[Action], overlaps: bool) -> Iterator[str]:
    partner = pairs(row) if overlaps else {}
    done = set(partner.values())
    for action in row:
        if action in partner:
            yield f"({_name(action)};{_name(partner[action])})OVERLAP_F_B"
        elif action not in done:
            yield _name(action)


def _name(action: Action) -> str:
    return f"{action.stage}{_KIND[action.op]}{action.micro_batch}"


def _row(rank: int, line: str, faults: list[str], together: set[tuple[Action, Action]]) -> Iterator[Action]:
    """The actions of a line; what is wrong goes to `faults`, pairs to `together`."""
    for place, cell in enumerate(line.split(",")):
        words = cell.strip()
        if not words:
            continue
        pair = _PAIR.fullmatch(words)
        found = [_ACTION.fullmatch(word.strip()) for word in (pair.groups() if pair else (words,))]
        actions = [Action(_OP[m[2]], int(m[1]), int(m[3])) for m in found if m]
        if len(actions) < len(found):
            faults.append(f"rank {rank}, cell {place}: {_wrong(words)}")
        elif pair and [action.op for action in actions] != [Op.F, Op.BW]:
            faults.append(f"rank {rank}, cell {place}: {words[:40]!r} overlaps other actions than F and B")
        else:
            together |= {(actions[0], actions[1])} if pair else set()
            yield from actions


def _wrong(words: str) -> str:
    if _OTHER.fullmatch(words):
        return f"{words[:40]} is no compute action: write the schedule in its compute-only form"
    return f"{words[:40]!r} is no action such as 2F0, 2I0, 2W0, 2B0 or (0F6;7B2)OVERLAP_F_B"


def _placement(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The rank of each stage. Sizes are taken from the number of actions, never from a number in a cell."""
    ranks: dict[int, set[int]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            ranks.setdefault(action.stage, set()).add(rank)
    forwards = sum(action.op is Op.F for row in rows for action in row)
    stages, micro_batches = _count(iter(ranks)), _count(a.micro_batch for row in rows for a in row)
    if stages * micro_batches != forwards or not forwards:
        _raise([f"{stages} stages and {micro_batches} micro-batches need {stages * micro_batches} F, not {forwards}"])
    faults = [f"no rank runs stage {stage}" for stage in range(stages) if stage not in ranks]
    faults += [f"stage {stage} runs on ranks {sorted(on)}" for stage, on in sorted(ranks.items()) if len(on) > 1]
    held = Counter(rank for on in ranks.values() for rank in on)
    if len({held[rank] for rank in range(len(rows))}) > 1:
        faults.append(f"ranks hold {[held[rank] for rank in range(len(rows))][:8]} stages: equally many are wanted")
    _raise(faults)
    return tuple(min(ranks[stage]) for stage in range(stages))


def _unlike(written: set[tuple[Action, Action]], known: set[tuple[Action, Action]]) -> list[str]:
    """A pair is known by its place in the row; a file may write others, or leave some out."""
    odd = [f"{_name(f)} and {_name(b)} cannot run as one" for f, b in sorted(written - known)]
    return odd + [f"{_name(f)} and {_name(b)} are not written as a pair" for f, b in sorted(known - written)]
