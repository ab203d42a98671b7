"""LayoutBatch: many layouts at once, a NumPy column a field, beside the scalar `Layout`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from shardwise import schedule as schedules
from shardwise.plan.layout import RECOMPUTE, Layout

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LayoutBatch:
    """Columns of equal length [n]. `schedule` indexes `names`; `split` indexes `splits` (0: the default split)."""

    tp: Ints
    sp: Ints
    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    zero: Ints
    schedule: Ints
    split: Ints
    mb: Ints
    recompute: Ints
    names: tuple[str, ...]
    splits: tuple[tuple[int, ...], ...] = ((),)

    @staticmethod
    def of(layouts: Sequence[Layout]) -> LayoutBatch:
        """The batch of these layouts, in their order."""
        names = tuple(sorted({x.schedule for x in layouts}))
        splits = ((), *sorted({x.split for x in layouts} - {()}))

        def column(value: Callable[[Layout], int]) -> Ints:
            return np.asarray([value(x) for x in layouts], dtype=np.int64)

        return LayoutBatch(
            tp=column(lambda x: x.tp),
            sp=column(lambda x: x.sp),
            pp=column(lambda x: x.pp),
            dp_replicate=column(lambda x: x.dp_replicate),
            dp_shard=column(lambda x: x.dp_shard),
            zero=column(lambda x: x.zero),
            schedule=column(lambda x: names.index(x.schedule)),
            split=column(lambda x: splits.index(x.split)),
            mb=column(lambda x: x.mb),
            recompute=column(lambda x: RECOMPUTE.index(x.recompute)),
            names=names,
            splits=splits,
        )

    def __len__(self) -> int:
        return len(self.tp)

    def row(self, i: int) -> Layout:
        """The i-th layout."""
        return Layout(
            tp=int(self.tp[i]),
            sp=bool(self.sp[i]),
            pp=int(self.pp[i]),
            dp_replicate=int(self.dp_replicate[i]),
            dp_shard=int(self.dp_shard[i]),
            zero=int(self.zero[i]),
            schedule=self.names[int(self.schedule[i])],
            split=self.splits[int(self.split[i])],
            mb=int(self.mb[i]),
            recompute=RECOMPUTE[int(self.recompute[i])],
        )

    def take(self, which: Bools | Ints) -> LayoutBatch:
        """The rows of a mask, or of indices."""
        columns = {f.name: getattr(self, f.name)[which] for f in fields(self) if f.name not in ("names", "splits")}
        return LayoutBatch(**columns, names=self.names, splits=self.splits)

    @property
    def dp(self) -> Ints:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Ints:
        return self.tp * self.pp * self.dp

    @property
    def virtual(self) -> Ints:
        """Stages a rank."""
        return np.asarray([schedules.virtual_stages(n) for n in self.names], dtype=np.int64)[self.schedule]

    @property
    def shards(self) -> Ints:
        """Parts into which ZeRO cuts the model state."""
        return np.where(self.zero > 0, self.dp_shard, 1)
