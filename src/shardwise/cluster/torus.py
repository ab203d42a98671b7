"""Groups on a torus: which axes they lie along, and how many links that gives them.

Rank order is row-major, the last axis fastest, so a group `(stride, size)` fills whole axes from the last one on, or
a part of one. Formulas: J. Austin et al., How To Scale Your Model (the scaling book), chapters TPUs and Sharded
Matrices; S is the whole tensor, W one link one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.cluster.device import Level

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
IntLike = int | npt.NDArray[np.integer]
Factor = tuple[IntLike, IntLike]
"""(stride, size) of a group's ranks, or of columns of groups."""


def members_of(factors: Sequence[Factor]) -> Ints:
    """Ranks of the groups, a column; in the shape that all factors broadcast to."""
    size = np.ones((), dtype=np.int64)
    for stride, n in factors:
        size = size * np.asarray(n, dtype=np.int64) * np.ones(np.shape(stride), dtype=np.int64)
    return size


@dataclass(frozen=True, slots=True)
class Footprint:
    """What groups have of a torus, a column each; siblings run at the same time, and share what they must.

    A gather of S takes `part * S / (ports * W)` and a hop's latency `hops` times, the longer one: both directions of
    a ring carry a shard each, for half its length (S / 2W if that is even; all axes at once, S / 2kW); a line has one
    direction to its ends ((n-1)/n S / W). An all-to-all of p bytes a rank takes `spread * p / W`, what crosses the
    middle of the longest axis: n/8 on a ring (a quarter of a gather), n/4 on a line.
    """

    ports: Floats
    """Links, one way, into the worst placed rank, or fewer where another place is narrower."""
    hops: Ints
    part: Floats
    spread: Floats


@dataclass(frozen=True, slots=True)
class _Axes:
    """[..., axis] members of a group along each axis and the hops between two of them; [...] 0, or the hops between
    neighbours in rank order of a group that is no product of axes or of parts of them.
    """

    extent: Ints
    step: Ints
    astray: Ints


def footprint(level: Level, *factors: Factor) -> Footprint:
    """The groups `[(stride, size), ...]` of a torus level, each factor inside the torus; columns broadcast.

    A group along whole axes has the rings of them all; along a part of an axis, a line; every `step`-th device of an
    axis, a `step`-th of its links, the rest being its siblings'. Any other group (8 devices on an axis of 28) is taken
    for one line in rank order.
    """
    axes = _along(level, factors)
    lengths, wraps = np.asarray(level.torus), np.asarray(level.wraps)
    many = axes.extent > 1
    ring = many & wraps & (axes.extent * axes.step == lengths)
    size = axes.extent.prod(axis=-1)
    links = np.where(many, np.where(ring, 2.0, 1.0) / axes.step, 0.0)
    rounds = np.where(ring, axes.extent // 2, axes.extent - 1) * axes.step
    # Shards are not cut in two: a ring of even length hands the farthest one on in both directions.
    whole = (ring & (axes.extent % 2 == 0)).any(axis=-1)
    crossing = (axes.extent // 2) * -(-axes.extent // 2) / axes.extent * axes.step
    spread = np.where(many, np.where(ring, crossing / 2, crossing), 0.0).max(axis=-1)
    part = np.where(whole, 1.0, (size - 1) / size)
    # Half of the tensor has to cross the middle of every axis, and a slow one may have few rows to cross in.
    rows = (part * size)[..., None] * links / -(-axes.extent // 2)
    crossable = np.where(many, rows, np.inf).min(axis=-1)
    regular = Footprint(
        ports=np.where(size > 1, np.minimum(links.sum(axis=-1), crossable), 1.0),
        hops=rounds.sum(axis=-1),
        part=part,
        spread=spread,
    )
    return _with_astray(regular, axes.astray, members_of(factors))


def _with_astray(regular: Footprint, astray: Ints, size: Ints) -> Footprint:
    """One line through all members in rank order, where they are no product of axes."""
    wrong, between = astray > 0, np.maximum(astray, 1)
    crossing = (size // 2) * -(-size // 2) / size * between
    return Footprint(
        ports=np.where(wrong, 1 / between, regular.ports),
        hops=np.where(wrong, (size - 1) * (between + 1), regular.hops),
        part=np.where(wrong, (size - 1) / size, regular.part),
        spread=np.where(wrong, crossing, regular.spread),
    )


def _along(level: Level, factors: tuple[Factor, ...]) -> _Axes:
    """Each factor, taken apart in the mixed radix of the axes."""
    shape = np.broadcast_shapes(*(np.shape(value) for factor in factors for value in factor))
    axes = len(level.torus)
    extent = np.ones((*shape, axes), dtype=np.int64)
    step = np.broadcast_to(np.asarray(level.torus, dtype=np.int64), extent.shape).copy()
    astray = np.zeros(shape, dtype=np.int64)
    for factor in factors:
        stride, left = (np.broadcast_to(np.asarray(v, dtype=np.int64), shape) for v in factor)
        unit = 1
        for axis in reversed(range(axes)):
            end = unit * level.torus[axis]
            here = (left > 1) & (stride < end)
            aligned = here & (stride % unit == 0) & (end % stride == 0)
            slots = np.where(aligned, end // stride, 1)
            taken = np.minimum(left, slots)
            fits = aligned & (slots % taken == 0) & (left % taken == 0)
            extent[..., axis] *= np.where(fits, taken, 1)
            step[..., axis] = np.where(fits, np.minimum(step[..., axis], stride // unit), step[..., axis])
            astray = np.maximum(astray, np.where(here & ~fits, -(-stride // unit), 0))
            left = np.where(here, np.where(fits, left // taken, 1), left)
            stride = np.where(here, end, stride)
            unit = end
    return _Axes(extent, np.where(extent > 1, step, 1), astray)


def message(level: Level, source: IntLike, target: IntLike, block: int) -> tuple[Floats, Ints]:
    """(links that each message has to itself, hops) from rank `source` to `target`; columns broadcast.

    The `block` ranks from `source` on send at the same time, each to the rank equally far away, axis by axis: as many
    messages share a link as the block has ranks along that axis, or as there are hops. One that is alone goes out
    over a link of each axis that it must cross.
    """
    lengths, wraps = np.asarray(level.torus), np.asarray(level.wraps)
    here, there = (np.stack(np.unravel_index(np.asarray(rank), level.torus), axis=-1) for rank in (source, target))
    apart = np.abs(here - there)
    hops = np.where(wraps, np.minimum(apart, lengths - apart), apart)
    if block == 1:
        return np.maximum((hops > 0).sum(axis=-1), 1).astype(np.float64), hops.sum(axis=-1)
    units = np.concatenate([np.cumprod(lengths[::-1])[-2::-1], [1]]) if len(lengths) > 1 else np.ones(1, dtype=np.int64)
    wide = np.clip(-(-block // units), 1, lengths)
    sharing = np.maximum(np.minimum(hops, wide).max(axis=-1), 1)
    return 1.0 / sharing, hops.sum(axis=-1)
