"""Schedules: all of them with a sentence each, and one as a grid, with its bubble and what it keeps in flight."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from shardwise import schedule as schedules
from shardwise.schedule import drawing
from shardwise.schedule.table import Op, Schedule
from shardwise.view.asking import InputError
from shardwise.view.tables import plain, section

MAX_ACTIONS: Final = 20_000
"""Stages times micro-batches of a grid."""

SHOWN_RANKS: Final = 16


class Drawn(NamedTuple):
    """A schedule with F = B = W = 1: its idle share a rank, and the most micro-batches each rank has in flight."""

    schedule: Schedule
    span: float
    idle: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the step in which the busiest rank is idle."""
        return min(self.idle) / self.span


def read(name: str, pp: int, micro_batches: int) -> Drawn:
    """Raises InputError with all faults."""
    try:
        stages = pp * schedules.virtual_stages(name) * schedules.copies(name)
    except ValueError as error:
        raise InputError([f"{name[:40]}: {error}"]) from None
    faults: list[str] = []
    if stages * micro_batches > MAX_ACTIONS:
        most = max(1, MAX_ACTIONS // stages)
        faults.append(f"--micro-batches: {stages:,} stages x {micro_batches:,}; wanted at most {most:,} of them")
    elif wrong := schedules.fault(name, pp, micro_batches):
        faults.append("; ".join(wrong))
    if faults:
        raise InputError(faults)
    return _drawn(schedules.build(name, pp, micro_batches))


def csv(of: Drawn) -> str:
    """The form that torch.distributed.pipelining reads. Raises InputError for a schedule that it has no form for."""
    try:
        return schedules.dump(of.schedule)
    except ValueError as error:
        raise InputError([f"--csv: {error}"]) from None


def _drawn(schedule: Schedule) -> Drawn:
    units = {Op.F: 1.0, Op.B: 1.0, Op.W: 1.0, Op.BW: 2.0}
    timeline = schedules.walk(schedule.rows, schedule, lambda op, _: units[op])
    return Drawn(
        schedule, timeline.span_s, timeline.idle_s, tuple(_in_flight(schedule, rank) for rank in range(schedule.pp))
    )


def _in_flight(schedule: Schedule, rank: int) -> int:
    """The most forwards of a rank's stages whose backward is not done."""
    most = now = 0
    for action in schedule.rows[rank]:
        now += (action.op is Op.F) - (action.op in (Op.B, Op.BW))
        most = max(most, now)
    return most


def list_page() -> Group:
    """A sentence each."""
    table = plain()
    table.add_column("schedule", no_wrap=True)
    table.add_column("", ratio=1)
    table.add_column("from", no_wrap=True)
    for name in schedules.NAMES:
        about = schedules.about(name)
        table.add_row(name, about.summary, about.source)
    note = "p ranks, V stages on each; r counts ranks from 0. Drawn: shardwise schedules zb-v --pp 4 --micro-batches 8"
    return Group(table, Text(), Text(note, "dim"))


def list_data() -> dict[str, Any]:
    return {"schedules": [{"name": name, **schedules.about(name)._asdict()} for name in schedules.NAMES]}


def page(of: Drawn, width: int) -> Group:
    """The grid, and what it costs."""
    about = schedules.about(of.schedule.name)
    return Group(
        Text(f"{about.summary} ({about.source})"),
        Text(),
        Text(drawing.render(of.schedule, columns=width), no_wrap=True, overflow="crop"),
        section("With F = B = W", _ranks(of)),
        Text(_closing(of), "dim"),
    )


def data(of: Drawn) -> dict[str, Any]:
    schedule = of.schedule
    return {
        "name": schedule.name,
        **schedules.about(schedule.name)._asdict(),
        "pp": schedule.pp,
        "micro_batches": schedule.micro_batches,
        "stages_of_rank": [list(schedule.stages_of(rank)) for rank in range(schedule.pp)],
        "span": of.span,
        "bubble_share": of.bubble,
        "idle": list(of.idle),
        "in_flight": list(of.in_flight),
        "rows": [[f"{a.op}{a.micro_batch} of {a.stage}" for a in row] for row in schedule.rows],
    }


def _ranks(of: Drawn) -> Table:
    table = plain()
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("stages", no_wrap=True)
    for head in ("idle", "%", "in flight"):
        table.add_column(head, justify="right", no_wrap=True)
    for rank in range(min(of.schedule.pp, SHOWN_RANKS)):
        stages = ",".join(map(str, of.schedule.stages_of(rank)[:8]))
        idle = of.idle[rank]
        table.add_row(str(rank), stages, f"{idle:g}", f"{100 * idle / of.span:.1f}", str(of.in_flight[rank]))
    return table


def _closing(of: Drawn) -> str:
    whole = f"the step takes {of.span:g}, the bubble of the busiest rank is {100 * of.bubble:.1f} %"
    rest = of.schedule.pp - SHOWN_RANKS
    more = f"; {rest} more ranks (--json has all)" if rest > 0 else ""
    return f"{whole}; in flight: forwards of a rank's stages that wait for their backward{more}"
