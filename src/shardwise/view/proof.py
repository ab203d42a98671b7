"""The verdict of a dry run: equal or not, and where not, by module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.units import format_bytes, format_count, format_seconds
from shardwise.view import words
from shardwise.view.review import Request

SCOPE = (
    "Compared: every collective of a step, and the peak of all tensors, which may be 1 % off. "
    "Not compared: times, and the assumed parts of memory (context, communicators, allocator margin)."
)

SHOWN = 40
"""Differences printed; the JSON form has them all."""


class DifferenceView(Protocol):
    """One key at which the ledgers disagree."""

    @property
    def module(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def axis(self) -> str: ...
    @property
    def predicted(self) -> str: ...
    @property
    def recorded(self) -> str: ...


class ProofView(Protocol):
    """What is shown of a `prove.compare.Proof`: that module lies above this one and needs torch."""

    @property
    def rank(self) -> int: ...
    @property
    def collectives(self) -> int: ...
    @property
    def predicted_peak_bytes(self) -> int: ...
    @property
    def measured_peak_bytes(self) -> int: ...
    @property
    def executed(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def max_rss_bytes(self) -> int: ...
    @property
    def ok(self) -> bool: ...
    def differences(self) -> Sequence[DifferenceView]: ...


def page(asked: Request, found: Sequence[ProofView]) -> Group:
    """The verdicts of all ranks that were run."""
    opening = (Text(words.what(asked.job)), Text(words.batch(asked.job)), Text(f"layout: {asked.layout}", "bold"))
    return Group(*opening, *(proof(one) for one in found), Text(), Text(SCOPE, "dim"))


def proof(of: ProofView) -> Group:
    """A few lines; a table of differences where there are any."""
    found = of.differences()
    equal = f"all {format_count(of.collectives)} collectives of a step as predicted"
    parts: list[RenderableType] = [
        Text(f"rank {of.rank}: {'proved' if of.ok else 'NOT as planned'}", "green" if of.ok else "bold red"),
        _line("ledger", equal if not found else f"differs at {format_count(len(found))} places"),
        _line("memory", memory_line(of)),
        _line("run", run_line(of), "dim"),
    ]
    if found:
        parts.append(differences(found))
    return Group(*parts)


def _line(name: str, said: str, style: str = "") -> Table:
    """A name and a text, which wraps beside it."""
    line = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    line.add_column(width=8)
    line.add_column(ratio=1)
    line.add_row(f"  {name}", said, style=style)
    return line


def memory_line(of: ProofView) -> str:
    """The measured peak of tensor bytes, and how far the predicted one is from it."""
    measured, off = of.measured_peak_bytes, of.predicted_peak_bytes - of.measured_peak_bytes
    if not off:
        apart = "as predicted to the byte"
    else:
        apart = f"{abs(off):,} bytes {'less' if off > 0 else 'more'} than predicted ({100 * abs(off) / measured:.4f} %)"
    return f"peak of all tensors {format_bytes(measured)}, {apart}"


def run_line(of: ProofView) -> str:
    """What the dry run cost."""
    rest = ", the others continue by the period" if of.executed < of.micro_batches else ""
    ran = f"{format_count(of.executed)} of {format_count(of.micro_batches)} micro-batches executed{rest}"
    return f"{ran}, in {format_seconds(of.seconds)}, at most {format_bytes(of.max_rss_bytes)} of memory here so far"


def differences(found: Sequence[DifferenceView]) -> Group:
    """By module, phase and axis."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for head in ("module", "phase", "axis", "predicted", "recorded"):
        table.add_column(head, overflow="fold")
    for row in found[:SHOWN]:
        table.add_row(row.module, row.phase, row.axis, row.predicted, row.recorded)
    rest = len(found) - SHOWN
    return Group(table, Text(f"and {format_count(rest)} more (--json has all)")) if rest > 0 else Group(table)


def data(plan: str, found: Sequence[ProofView]) -> dict[str, Any]:
    """The same for programs."""
    return {"plan": plan, "ok": all(one.ok for one in found), "proofs": [_one(one) for one in found]}


def _one(of: ProofView) -> dict[str, Any]:
    rows = [(d.module, str(d.phase), d.axis, d.predicted, d.recorded) for d in of.differences()]
    names = ("module", "phase", "axis", "predicted", "recorded")
    return {
        "rank": of.rank,
        "ok": of.ok,
        "collectives": of.collectives,
        "predicted_peak_bytes": of.predicted_peak_bytes,
        "measured_peak_bytes": of.measured_peak_bytes,
        "micro_batches": of.micro_batches,
        "executed_micro_batches": of.executed,
        "seconds": of.seconds,
        "max_rss_bytes": of.max_rss_bytes,
        "differences": [dict(zip(names, row, strict=True)) for row in rows],
    }
