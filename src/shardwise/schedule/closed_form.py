"""What the closed forms of the spans share.

A pipeline has few distinct ranks, so a search gives the seconds of runs of equal neighbours: f, b and w are [run, n]
for n pipelines, one micro-batch on all stages of one rank of the run; `ranks` [run] counts its ranks, `micro_batches`
is [n]. Arrays are float64: seconds, or counts of micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Busy(NamedTuple):
    """Seconds of one micro-batch by op, each [run, n], and the number of ranks of each run."""

    f: Array
    b: Array
    w: Array
    ranks: tuple[int, ...]

    @property
    def pp(self) -> int:
        return sum(self.ranks)

    @property
    def whole(self) -> Array:
        return np.ascontiguousarray(self.f + self.b + self.w)


def weighted(weights: Sequence[Sequence[float]] | Array, values: Array) -> Array:
    """[place, n]: the sum over the runs of `values` [run, n], by `weights` [place, run]."""
    return np.asarray(weights, dtype=np.float64) @ values


def over_ranks(values: Array, ranks: tuple[int, ...]) -> Array:
    """The sum over all ranks of `values` [run, n]: [n]."""
    return weighted([ranks], values)[0]


class Pace(NamedTuple):
    """The pace of the slowest rank, as it spreads from the last rank upwards: `rises` [run, n] `after` so many ranks.

    The rank with the slowest stage sets the pace, but not from the start: rank r runs its p-1-r warm-up forwards
    without backwards, so a micro-batch near the ends of the step (our derivation, for the longest path through the
    table) can only be slowed by the ranks that alternate already: step i by the slowest of the last i ranks.
    """

    rises: Array
    after: tuple[int, ...]

    def time(self, steps: Array, repeat: int = 1) -> Array:
        """Of `steps` [n] successive micro-batches, `repeat` of which pass as the pace spreads by one rank."""
        left = np.maximum(steps - repeat * np.asarray(self.after, dtype=np.float64)[:, None], 0.0)
        left *= self.rises
        return left.sum(axis=0)


def pace(seconds: Array, ranks: tuple[int, ...], steady: Array | None = None) -> Pace:
    """Of `seconds` [run, n] a step; once it has spread to all ranks, of `steady` [n], if that is given."""
    after = [*accumulate(ranks[:0:-1], initial=0)]
    slowest = [seconds[-1]]
    for run in seconds[-2::-1]:
        slowest.append(np.maximum(slowest[-1], run))
    if steady is not None:
        slowest.append(steady)
        after.append(sum(ranks) - 1)
    rises = (more - less for less, more in pairwise(slowest))
    return Pace(np.stack([slowest[0], *rises]), tuple(after))


class Places(NamedTuple):
    """Ranks to evaluate a path at. The first and the last of each run are enough for what is convex in the rank."""

    rank: npt.NDArray[np.int64]
    run: npt.NDArray[np.int64]
    above: Array
    """[place, run] how many ranks of each run come before the place"""
    below: Array


@lru_cache(maxsize=4096)
def places(ranks: tuple[int, ...], also: Collection[int]) -> Places:
    """The ends of the runs, and `also` these ranks, at which a path is not convex."""
    count = np.asarray(ranks)
    first = np.cumsum(count) - count
    run = np.repeat(np.arange(len(ranks)), count)
    rank = np.arange(len(run))
    rank = rank[(rank == first[run]) | (rank == first[run] + count[run] - 1) | np.isin(rank, [*also])]
    run = run[rank]
    above = np.clip(rank[:, None] - first, 0, count).astype(np.float64)
    below = count - above
    below[np.arange(len(rank)), run] -= 1
    return Places(rank, run, above, below)


class At(NamedTuple):
    """The runs at their `places`: [place, n], `rank` [place, 1]."""

    where: Places
    rank: Array
    f: Array
    b: Array
    w: Array
    f_above: Array
    """of all ranks above together"""
    b_above: Array
    b_below: Array


def at_places(busy: Busy, also: Collection[int] = ()) -> At:
    where = places(busy.ranks, also)
    rank = where.rank.astype(np.float64)[:, None]
    f, b, w = (np.take(x, where.run, axis=0) for x in (busy.f, busy.b, busy.w))
    b_above, b_below = weighted(where.above, busy.b), weighted(where.below, busy.b)
    return At(where, rank, f, b, w, weighted(where.above, busy.f), b_above, b_below)


class Ways(NamedTuple):
    """How the longest path comes to a rank and leaves it, [place, n]; `head` and `drain` are seconds, others counts.

    `head`: until its first B, `before_b` forwards of its own being done by then. `late`: weight gradients after its
    last B. `drain`: how much longer than what it runs meanwhile the last B takes from its last chunk to its first.
    """

    head: Array
    before_b: Array
    late: Array
    drain: Array | float = 0.0


def staggered(busy: Busy, at: At, ways: Ways, actions: Array) -> Array:
    """[place, n]: the longest path that stays on one rank but at the ends of the step; it runs `actions` of each op.

    Our derivation, from the gradients of the walk. It reaches the rank by its first F or by its first B. It leaves
    with the rank's last action, or with its last B, which goes up to rank 0.
    """
    begin = np.maximum(at.f_above, ways.head - at_most(ways.before_b, actions) * at.f)
    end = np.maximum(at.b_above + at.w[0] - at_most(ways.late, actions) * at.w, 0.0)
    body = np.take(actions * busy.whole, at.where.run, axis=0)
    return body + begin + end + ways.drain


def at_most(count: Array, actions: Array) -> Array:
    """No more than there are; of long steps at no cost."""
    return count if actions.min(initial=np.inf) >= count.max() else np.minimum(count, actions)
