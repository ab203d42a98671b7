"""The score: every published run that can be planned, predicted under its software stack, and the errors by source."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.score.cases import Case, case_of
from shardwise.score.errors import Errors, errors_of, kendall, one_mfu
from shardwise.score.predict import Prediction, Progress, predict
from shardwise.score.skip import SkipError
from shardwise.score.table import own_table, read_table


@dataclass(frozen=True, slots=True)
class RowScore:
    """One published run: what was predicted and measured, or why it was not predicted.

    `measured_s` is None of a run that did not fit; `measured_GiB` where no memory was measured. `read_from` says which
    column the seconds come from.
    """

    id: str
    predicted_s: float | None = None
    measured_s: float | None = None
    predicted_GiB: float | None = None
    measured_GiB: float | None = None
    skipped: str | None = None
    layout: str = ""
    read_from: str = ""
    parts_s: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SourceScore:
    """Runs of one source on one device in one precision. Errors are relative to what was measured; None: nothing to
    compare.

    `kendall` judges the order of layouts among runs that answer the same question, in sweeps. `rival_mfu` is the MFU
    that fits these very runs best, `rival_median_abs_error` and `rival_mean_abs_error` the errors of taking it for all
    of them: fitted in sample, where the predictions are fitted on nothing. `false_fits` are runs that are told to fit
    and did not, `false_ooms` those that are told not to fit and ran.
    """

    source: str
    stack: str
    device: str
    precision: str
    rows: int
    median_abs_error: float | None
    mean_abs_error: float | None
    bias: float | None
    memory_rows: int
    memory_median_abs_error: float | None
    memory_bias: float | None
    kendall: float | None
    rival_mfu: float | None
    rival_median_abs_error: float | None
    rival_mean_abs_error: float | None
    out_of_memory: int
    false_fits: int
    false_ooms: int
    calibrated: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """`total` is over all rows that were predicted; `skipped` counts the kinds of those that were not."""

    file: str
    sources: tuple[SourceScore, ...]
    rows: tuple[RowScore, ...]
    skipped: tuple[tuple[str, int], ...]
    total: Errors | None

    @property
    def predicted(self) -> int:
        return sum(row.skipped is None for row in self.rows)


def score_file(path: Path | None = None, progress: Progress | None = None) -> Score:
    """Score a table of published runs; by default the one that comes with the package.

    Raises TableError for a table that cannot be read, OSError as the system.
    """
    where = path or own_table()
    published = read_table(where)
    rows: dict[str, RowScore] = {}
    cases: list[Case] = []
    kinds: dict[str, int] = defaultdict(int)
    for row in published:
        try:
            cases.append(case_of(row))
        except SkipError as skip:
            rows[row.id] = RowScore(row.id, skipped=str(skip))
            kinds[skip.kind] += 1
    predictions = predict(cases, progress or _silent)
    rows |= {case.id: _row(case, told) for case, told in zip(cases, predictions, strict=True)}
    return Score(
        file=str(where),
        sources=_by_source(cases, predictions),
        rows=tuple(rows[row.id] for row in published),
        skipped=tuple(sorted(kinds.items(), key=lambda item: -item[1])),
        total=errors_of(_times(cases, predictions)),
    )


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


def _row(case: Case, told: Prediction) -> RowScore:
    return RowScore(
        id=case.id,
        predicted_s=told.step.total_s,
        measured_s=case.measured.seconds if case.measured else None,
        predicted_GiB=told.memory_GiB,
        measured_GiB=case.measured_GiB,
        layout=str(case.layout),
        read_from=case.measured.read_from if case.measured else "",
        parts_s=tuple(told.step.parts_s.items()),
    )


def _by_source(cases: Sequence[Case], predictions: Sequence[Prediction]) -> tuple[SourceScore, ...]:
    """In the order in which the table names them."""
    groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        groups[case.source.name, case.source.stack, case.device, case.job.precision.name].append(i)
    return tuple(
        _source(key, [cases[i] for i in members], [predictions[i] for i in members]) for key, members in groups.items()
    )


def _source(key: tuple[str, str, str, str], cases: Sequence[Case], predictions: Sequence[Prediction]) -> SourceScore:
    pairs = list(zip(cases, predictions, strict=True))
    times = errors_of(_times(cases, predictions))
    memory = errors_of([(told.memory_GiB, case.measured_GiB) for case, told in pairs if case.measured_GiB])
    rival = one_mfu([(_ideal_s(told), case.measured.seconds) for case, told in pairs if case.measured])
    return SourceScore(
        *key,
        rows=len(cases),
        median_abs_error=times.median if times else None,
        mean_abs_error=times.mean if times else None,
        bias=times.bias if times else None,
        memory_rows=sum(case.measured_GiB is not None for case in cases),
        memory_median_abs_error=memory.median if memory else None,
        memory_bias=memory.bias if memory else None,
        kendall=kendall(_sweeps(cases, predictions)),
        rival_mfu=rival[0] if rival else None,
        rival_median_abs_error=rival[1].median if rival else None,
        rival_mean_abs_error=rival[1].mean if rival else None,
        out_of_memory=sum(case.out_of_memory for case in cases),
        false_fits=sum(case.out_of_memory and told.fits for case, told in pairs),
        false_ooms=sum(not case.out_of_memory and not told.fits for case, told in pairs),
    )


def _times(cases: Sequence[Case], predictions: Sequence[Prediction]) -> list[tuple[float, float]]:
    """(predicted, measured) seconds."""
    pairs = zip(cases, predictions, strict=True)
    return [(told.step.total_s, case.measured.seconds) for case, told in pairs if case.measured]


def _ideal_s(told: Prediction) -> float:
    """Seconds of the model's FLOPs at the device's peak."""
    return told.step.model_flops / (told.step.devices * told.step.peak_flops_per_s)


def _sweeps(cases: Sequence[Case], predictions: Sequence[Prediction]) -> list[list[tuple[float, float]]]:
    """(predicted, measured) seconds of the runs that answer the same question, one list a question. None where releases
    of the software are mixed: they change the order."""
    sweeps: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for case, told in zip(cases, predictions, strict=True):
        if case.measured and case.source.sweep:
            sweeps[case.job].append((told.step.total_s, case.measured.seconds))
    return list(sweeps.values())


# -------------------------------------------------------------------------------------------------- what is told

SOURCE_KEYS = (
    *("source", "stack", "device", "precision", "rows", "median_abs_error", "mean_abs_error", "bias"),
    *("memory_median_abs_error", "kendall", "calibrated"),
)
ROW_KEYS = ("id", "predicted_s", "measured_s", "predicted_GiB", "measured_GiB", "skipped")


def to_json(score: Score) -> dict[str, list[dict[str, Any]]]:
    """Plain values: `sources` and `rows`, each a list of objects. No value is not finite."""
    return {
        "sources": [{key: _plain(getattr(source, key)) for key in SOURCE_KEYS} for source in score.sources],
        "rows": [{key: _plain(getattr(row, key)) for key in ROW_KEYS} for row in score.rows],
    }


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


TABLE_HEADER = (
    *("source", "stack", "device", "precision", "rows", "median error", "mean error", "bias"),
    *("one MFU, fitted: median", "mean", "memory: rows", "median error", "bias", "Kendall's tau", "false fits, OOMs"),
)


def table_rows(score: Score) -> list[tuple[str, ...]]:
    """Cells under TABLE_HEADER, a row a source and the total last."""
    rows: list[tuple[str, ...]] = [
        (
            *(source.source, source.stack, source.device, source.precision, f"{source.rows:,}"),
            *(_percent(source.median_abs_error), _percent(source.mean_abs_error), _percent(source.bias, signed=True)),
            *(_percent(source.rival_median_abs_error), _percent(source.rival_mean_abs_error)),
            f"{source.memory_rows:,}" if source.memory_rows else "",
            *(_percent(source.memory_median_abs_error), _percent(source.memory_bias, signed=True)),
            "" if source.kendall is None else f"{source.kendall:.2f}",
            f"{source.false_fits}/{source.out_of_memory}, {source.false_ooms}",
        )
        for source in score.sources
    ]
    blanks = ("",) * (len(TABLE_HEADER) - 8)
    if score.total:
        errors = _percent(score.total.median), _percent(score.total.mean), _percent(score.total.bias, signed=True)
        rows.append(("all", "", "", "", f"{score.predicted:,}", *errors, *blanks))
    return rows


def _percent(share: float | None, signed: bool = False) -> str:
    if share is None:
        return ""
    return f"{100 * share:+.1f} %" if signed else f"{100 * share:.1f} %"
