"""Results as rich renderables, aligned at 80 columns and wider. Pure: values in, renderables out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.plan.job import Job
from shardwise.results import MemoryBreakdown, StepTime
from shardwise.units import format_bytes, format_count, format_seconds, gib
from shardwise.view import chart, words
from shardwise.view.review import Review, bubble_s, communication_s, ledger_rows

if TYPE_CHECKING:
    from shardwise.search.solve import Candidate

BAR = 30
"""Columns of the step's bars."""


def candidates(found: Sequence[Candidate], job: Job, width: int) -> Table:
    """Layouts, the fastest first."""
    capacity = gib(job.cluster.device.usable_bytes)
    table = _table(gap=2 if width >= 100 else 1)
    table.add_column("\n#", justify="right")
    table.add_column("\nlayout", ratio=1)
    for head in ("step\ntime", "tokens/s\n/device", "MFU\n%", f"peak GiB\nof {capacity:.1f}", "bubble\n%", "comm.\n%"):
        table.add_column(head, justify="right", no_wrap=True)
    for place, one in enumerate(found, 1):
        step = one.step
        table.add_row(
            str(place),
            str(one.layout),
            format_seconds(step.total_s),
            f"{step.tokens_per_s_per_device:,.0f}",
            f"{100 * step.mfu:.1f}",
            f"{gib(one.peak_bytes):.1f}",
            f"{100 * bubble_s(step) / step.total_s:.1f}",
            f"{100 * communication_s(step) / step.total_s:.1f}",
        )
    return table


def memory(of: Review, width: int) -> Group:
    """Parts by pipeline rank. Ranks are chosen to fit the width, the fullest always among them."""
    shown = _ranks(of.memory, 4 if width < 100 else 8)
    table = _table()
    table.add_column("part", no_wrap=True)
    for m in shown:
        table.add_column(f"rank {m.rank}", justify="right", no_wrap=True)
    for assumed in (False, True):
        for part in dict.fromkeys(name for m in of.memory for name in (m.assumed if assumed else m.proved)):
            sizes = [(m.assumed if assumed else m.proved).get(part, 0) for m in shown]
            table.add_row(f"{part} (assumed)" if assumed else part, *map(_gib, sizes))
        if not assumed:
            table.add_row("= tensors, provable", *(_gib(m.proved_bytes) for m in shown), style="bold")
    table.add_row("= total", *(_gib(m.total_bytes) for m in shown), style="bold")
    table.add_row(f"free of {gib(of.capacity_bytes):,.1f}", *(_gib(of.capacity_bytes - m.total_bytes) for m in shown))
    table.add_row("peaks in the", *(m.action.replace(" of stage ", " of ") for m in shown))
    letters = {m.action.partition(" of ")[0] for m in shown}
    notes = [f"{', '.join(f'{x} {said}' for x, said in words.ACTIONS.items() if x in letters)}, of a stage"]
    if len(shown) < len(of.memory):
        notes.append(f"{len(shown)} of {len(of.memory)} pipeline ranks shown, the fullest among them")
    return Group(table, Text("\n".join(notes), "dim"))


def _ranks(of: Sequence[MemoryBreakdown], most: int) -> list[MemoryBreakdown]:
    fullest = max(of, key=lambda m: m.total_bytes).rank
    chosen = set(chart.pick(len(of), most)) if len(of) <= most else {*chart.pick(len(of), most - 1), fullest}
    return [of[i] for i in sorted(chosen)]


def _gib(n_bytes: int) -> str:
    """Two digits; a dash for nothing, so that the eye finds what is there."""
    return f"{gib(n_bytes):,.2f}" if n_bytes else "-"


def step_parts(step: StepTime) -> Table:
    """The step's seconds by cause; the bars add up to the whole step."""
    parts = [(name, seconds) for name, seconds in step.parts_s.items() if seconds > 0]
    table = _table()
    table.add_column("part")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("%", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=BAR)
    for (name, seconds), bar in zip(parts, chart.waterfall([s for _, s in parts], BAR), strict=True):
        table.add_row(name, format_seconds(seconds), f"{100 * seconds / step.total_s:.1f}", Text(bar, "cyan"))
    table.add_row("= step", format_seconds(step.total_s), "100.0", "", style="bold")
    return table


def ledger(of: Review) -> RenderableType:
    """The predicted collectives by axis and phase."""
    rows = ledger_rows(of.ledger, of.job.cluster)
    if not rows:
        return Text("none: every group has one rank")
    table = _table(gap=1)
    for head in ("axis", "phase", "what travels", "over"):
        table.add_column(head, overflow="fold")
    for head in ("ranks", "count", "payload"):
        table.add_column(head, justify="right", no_wrap=True)
    degrees = dict(of.layout.mesh.degrees)
    for row in rows:
        # An axis of one rank moves nothing: pp+dp_replicate+dp_shard is long enough where all three are there.
        axis = "+".join(a for a in row.axis.split("+") if degrees.get(a, 2) > 1)
        what = f"{row.kind}: {row.travels}"
        size = format_bytes(row.payload_bytes)
        table.add_row(axis, row.phase, what, row.link, format_count(row.ranks), format_count(row.issued), size)
    return Group(table, Text(PAYLOAD, "dim"))


PAYLOAD = "payload: the whole tensors, summed over the step; what a rank sends of one is the algorithm's matter"


def _table(gap: int = 2) -> Table:
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
