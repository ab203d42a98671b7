"""The score: errors of predictions against published runs, a row a source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Group
from rich.text import Text

from shardwise.units import format_count
from shardwise.view.tables import plain


class ErrorsView(Protocol):
    """Median and mean of the sizes of relative errors, and their signed mean."""

    @property
    def median(self) -> float: ...
    @property
    def mean(self) -> float: ...
    @property
    def bias(self) -> float: ...


class SourceView(Protocol):
    """What is shown of a `score.score.SourceScore`: that module lies beside this one."""

    @property
    def source(self) -> str: ...
    @property
    def stack(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def median_abs_error(self) -> float | None: ...
    @property
    def mean_abs_error(self) -> float | None: ...
    @property
    def bias(self) -> float | None: ...
    @property
    def memory_rows(self) -> int: ...
    @property
    def memory_median_abs_error(self) -> float | None: ...
    @property
    def kendall(self) -> float | None: ...
    @property
    def rival_median_abs_error(self) -> float | None: ...
    @property
    def out_of_memory(self) -> int: ...
    @property
    def false_fits(self) -> int: ...
    @property
    def false_ooms(self) -> int: ...


class ScoreView(Protocol):
    """What is shown of a `score.score.Score`."""

    @property
    def file(self) -> str: ...
    @property
    def sources(self) -> Sequence[SourceView]: ...
    @property
    def skipped(self) -> Sequence[tuple[str, int]]: ...
    @property
    def total(self) -> ErrorsView | None: ...
    @property
    def predicted(self) -> int: ...


NOTES = (
    "Step times; errors are relative to what was published, nothing was fitted. one MFU: the error of the one MFU that "
    "fits a source's own runs best. memory: median error of the peak, where it was published. tau: Kendall's, over "
    "layouts of one question. false: runs told to fit that did not, of those that did not; runs that were told not to "
    "fit, and ran."
)


def page(of: ScoreView, width: int) -> Group:
    """The table, the total, and what could not be predicted."""
    wide = width >= 118
    table = plain(2 if wide else 1)
    table.add_column("\nsource", ratio=1, overflow="fold")
    for head in ("\nstack", "\ndevice", "\nprecision") if wide else ("\ndevice",):
        table.add_column(head, overflow="fold")
    for head in ("\nruns", "median\n%", "mean\n%", "bias\n%", "one MFU\n%", "memory\n%", "\ntau", "\nfalse"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in of.sources:
        where = (one.stack, one.device, one.precision) if wide else (f"{one.device} {one.precision}",)
        table.add_row(one.source, *where, *_numbers(one))
    total = of.total
    if total is not None:
        blanks = ("",) * (3 if wide else 1)
        errors = _percent(total.median), _percent(total.mean), _percent(total.bias, "+")
        table.add_row("all", *blanks, format_count(of.predicted), *errors, style="bold")
    left = ", ".join(f"{count:,} {kind}" for kind, count in of.skipped)
    told = f"{of.predicted:,} runs of {Path(of.file).name} predicted"
    closing = told + (f"; left out, by reason: {left}" if left else "")
    return Group(table, Text(), Text(closing), Text(NOTES, "dim"))


def _numbers(one: SourceView) -> tuple[str, ...]:
    return (
        format_count(one.rows),
        _percent(one.median_abs_error),
        _percent(one.mean_abs_error),
        _percent(one.bias, "+"),
        _percent(one.rival_median_abs_error),
        _percent(one.memory_median_abs_error),
        "" if one.kendall is None else f"{one.kendall:.2f}",
        f"{one.false_fits}/{one.out_of_memory},{one.false_ooms}",
    )


def _percent(share: float | None, sign: str = "") -> str:
    return "" if share is None else f"{100 * share:{sign}.1f}"
