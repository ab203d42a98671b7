"""Errors of predictions, the rival that knows one number, and how well an order was told.

An error is relative to what was measured: predicted / measured - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt
from statistics import fmean, median
from typing import NamedTuple

MIN_FITTED = 3
"""Runs from which a rival is fitted: one number tells one run exactly."""

MIN_PAIRS = 10
"""Pairs of runs from which an order is judged."""


class Errors(NamedTuple):
    """Of some runs: median and mean of the sizes of the errors, and the signed mean."""

    median: float
    mean: float
    bias: float


def relative(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def errors_of(pairs: Sequence[tuple[float, float]]) -> Errors | None:
    """Of (predicted, measured); None without any."""
    if not pairs:
        return None
    signed = [relative(*pair) for pair in pairs]
    sizes = [abs(error) for error in signed]
    return Errors(median(sizes), fmean(sizes), fmean(signed))


def one_mfu(runs: Sequence[tuple[float, float]]) -> tuple[float, Errors] | None:
    """(MFU, its errors) of the rival that takes one MFU for all runs, the one with the least mean error on these very
    runs; None for too few. `runs`: (seconds at the device's peak, measured seconds).
    """
    if len(runs) < MIN_FITTED:
        return None

    def told(mfu: float) -> Errors:
        found = errors_of([(ideal / mfu, measured) for ideal, measured in runs])
        assert found is not None
        return found

    # As a function of 1 / MFU the mean error is convex and piecewise linear: its least is at one of the runs.
    return min(((mfu, told(mfu)) for mfu in {ideal / measured for ideal, measured in runs}), key=lambda x: x[1].mean)


def kendall(sweeps: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """Kendall's tau-b over the pairs within each sweep of (predicted, measured), -1 to 1; None for too few pairs.

    Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945): concordant less discordant pairs over the
    geometric mean of those untied in either.
    """
    agreement, untied_x, untied_y, pairs = 0, 0, 0, 0
    for sweep in sweeps:
        for (x0, y0), (x1, y1) in combinations(sweep, 2):
            x, y = (x0 > x1) - (x0 < x1), (y0 > y1) - (y0 < y1)
            agreement += x * y
            untied_x, untied_y, pairs = untied_x + abs(x), untied_y + abs(y), pairs + 1
    if pairs < MIN_PAIRS or not untied_x or not untied_y:
        return None
    return agreement / sqrt(untied_x * untied_y)
