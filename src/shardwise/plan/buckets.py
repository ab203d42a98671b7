"""How gradients are summed: which of them together, what moves along which axes, in which order.

Where no ZeRO cuts the state, gradients lie in buckets, as DDP has them (Li et al. 2006.15704, section 3.2.3): a
collective costs the host and the network the same start for a small unit as for a large one. A bucket takes units of
one stage in the order in which the backward ends them, and is full once it has `BUCKET_NUMEL` elements; so a unit as
large as that is summed alone. Cut gradients are summed by the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final, NamedTuple

import numpy as np

from shardwise.collective import Kind
from shardwise.mesh import Axes
from shardwise.model.spec import Count
from shardwise.plan.layout import Layout
from shardwise.plan.shards import COPIES, TWINS, RankUnits, Record, Storage

BUCKET_NUMEL: Final = 25 * 2**20 // 4
"""25 MiB in float32, torch's default."""


class GradientMove(NamedTuple):
    """One collective on the gradients of a bucket: what moves along which axes, how many elements it takes, from where
    on in the rank's part. `module`: the bucket, or the storage, whose gradient it is."""

    module: str
    kind: Kind
    axes: Axes
    elements: Count
    start: Count = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Storages of one stage whose gradients lie behind each other, in the order of the model. Where these are cut, or
    there is one copy of them, one storage alone."""

    storages: tuple[Storage, ...]

    @property
    def name(self) -> str:
        """`layers.3`, `embedding..layers.2`"""
        first, last = self.storages[0].unit, self.storages[-1].unit
        return first if first == last else f"{first}..{last}"

    @property
    def shard_numel(self) -> Count:
        """Elements of one rank's part."""
        return sum(s.shard_numel for s in self.storages)

    @property
    def starts(self) -> tuple[Count, ...]:
        """Where each storage begins in the rank's part."""
        return tuple(accumulate((s.shard_numel for s in self.storages[:-1]), initial=0))

    def moves(self, zero: int, final: bool) -> list[GradientMove]:
        """How the gradient is summed, in order: table 2's P -> S(0) over the shards' axes (with ZeRO), and once a step
        (`final`) P -> I of the shard over its copies, then of what is partial over tp, and of the kv heads that
        neighbouring ranks hold.
        """
        one = self.storages[0]
        moves = [GradientMove(self.name, Kind.REDUCE_SCATTER, one.shard_axes, one.padded_numel)] if zero else []
        if final:
            moves.append(GradientMove(self.name, Kind.ALL_REDUCE, one.copy_axes, self.shard_numel))
            for storage, start in zip(self.storages, self.starts, strict=True):
                moves += [m._replace(start=start + m.start) for m in tensor_moves(storage)]
        return moves

    def twin_move(self) -> GradientMove:
        """Once a step, after all of these: P -> I over the two copies of the stage."""
        return GradientMove(self.name, Kind.ALL_REDUCE, TWINS, self.shard_numel)


def tensor_moves(storage: Storage) -> list[GradientMove]:
    """Those of a storage between tensor-parallel ranks; columns of sizes have columns of elements, 0 where nothing
    moves."""
    name, summed = storage.unit, Kind.ALL_REDUCE
    over_tp = [GradientMove(name, summed, ("tp",), *run) for run in _runs(storage, lambda r: r.partial)]
    return over_tp + [GradientMove(name, summed, COPIES, *run) for run in _runs(storage, lambda r: r.neighbours > 1)]


def _runs(storage: Storage, taken: Callable[[Record], Count]) -> Iterator[tuple[Count, Count]]:
    """(elements, start) of the records that are taken; those that lie together are one run."""
    for is_taken, those in groupby(storage.records, key=lambda r: bool(np.any(taken(r)))):
        if is_taken:
            run = list(those)
            yield sum(r.shard_numel * taken(r) for r in run), run[0].offset


def buckets_of(held: RankUnits, layout: Layout) -> dict[str, Bucket]:
    """The buckets of a pipeline rank by their names, those of a stage in the order in which the backward ends them."""
    copied = layout.dp * layout.cp > 1 or any(s.twins for s in held.storages.values())
    if layout.zero or not copied:  # whole gradients that nobody else has are summed over tp at most
        return {name: Bucket((storage,)) for name, storage in held.storages.items()}
    found: list[Bucket] = []
    taken: set[str] = set()
    for stage in sorted(held.stages, key=lambda s: s.index):  # a weight of both ends is ended in the first stage
        names = dict.fromkeys(name for unit in stage.units for name in held.uses[unit.name])
        fresh = [held.storages[name] for name in reversed(names) if name not in taken]
        taken |= names.keys()
        for axes in dict.fromkeys(s.copy_axes for s in fresh):
            found += _filled([s for s in fresh if s.copy_axes == axes])
    return {bucket.name: bucket for bucket in found}


def _filled(storages: list[Storage]) -> Iterator[Bucket]:
    """Buckets filled one after the other."""
    open_: list[Storage] = []
    for storage in storages:
        open_.insert(0, storage)
        if Bucket(tuple(open_)).shard_numel >= BUCKET_NUMEL:
            yield Bucket(tuple(open_))
            open_ = []
    if open_:
        yield Bucket(tuple(open_))


def together(numel: Count, units: int) -> Count:
    """How many equal units of so many elements one bucket takes, of as many as there are; columns."""
    return np.clip(-(-BUCKET_NUMEL // np.maximum(1, numel)), 1, max(1, units))


def bucket_names(buckets: Mapping[str, Bucket]) -> dict[str, str]:
    """Storage -> its bucket."""
    return {s.unit: name for name, bucket in buckets.items() for s in bucket.storages}
