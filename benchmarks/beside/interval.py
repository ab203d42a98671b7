"""Pairs of measurements, and what they say: the mean ratio and its 95 % interval (Student's t)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

T_975 = {2: 4.303, 4: 2.776, 9: 2.262, 14: 2.145, 16: 2.120, 18: 2.101, 20: 2.086, 24: 2.064, 30: 2.042}
"""Quantiles by degrees of freedom; in between the next lower one is taken, whose interval is wider."""


class Cost(NamedTuple):
    """Seconds of both sides, medians; the mean ratio of ours over theirs and its interval."""

    ours_s: float
    theirs_s: float
    ratio: float
    low: float
    high: float


def paired(ours_s: Callable[[], float], theirs_s: Callable[[], float], pairs: int) -> Cost:
    """Of so many pairs, three at least: each side takes a step and says what it took, in alternating order."""
    sides = ours_s, theirs_s
    samples: list[tuple[float, float]] = []
    for i in range(pairs):
        spent = {side: sides[side]() for side in (i % 2, 1 - i % 2)}
        samples.append((spent[0], spent[1]))
    ratios = [ours / theirs for ours, theirs in samples]
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(pairs)
    half = T_975[max(k for k in T_975 if k <= pairs - 1)] * error
    ours, theirs = (statistics.median(side) for side in zip(*samples, strict=True))
    return Cost(ours, theirs, mean, mean - half, mean + half)
