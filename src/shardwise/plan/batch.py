"""LayoutBatch: many layouts at once, a NumPy column a field, beside the scalar `Layout`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from shardwise import schedule as schedules
from shardwise.plan.layout import CP_KINDS, ORDERS, Layout

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_NAMES = ("names", "splits", "recomputes")


@dataclass(frozen=True, slots=True)
class LayoutBatch:
    """Columns of shapes that broadcast: [n] each, or the axes of a grid of all combinations.

    `schedule`, `split` (0: the default split) and `recompute` index `names`, `splits` and `recomputes`; `cp_kind` and
    `order` index the constants of `plan/layout.py`.
    """

    tp: Ints
    sp: Ints
    cp: Ints
    cp_kind: Ints
    pp: Ints
    ep: Ints
    etp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    zero: Ints
    schedule: Ints
    split: Ints
    mb: Ints
    recompute: Ints
    order: Ints
    names: tuple[str, ...]
    splits: tuple[tuple[int, ...], ...] = ((),)
    recomputes: tuple[str, ...] = ("none", "full")

    @staticmethod
    def of(layouts: Sequence[Layout]) -> LayoutBatch:
        """The batch [n] of these layouts, in their order."""
        names = tuple(sorted({x.schedule for x in layouts}))
        splits = ((), *sorted({x.split for x in layouts} - {()}))
        recomputes = tuple(sorted({x.recompute for x in layouts}))

        def column(value: Callable[[Layout], int]) -> Ints:
            return np.asarray([value(x) for x in layouts], dtype=np.int64)

        indexed: dict[str, Callable[[Layout], int]] = {
            "cp_kind": lambda x: CP_KINDS.index(x.cp_kind),
            "schedule": lambda x: names.index(x.schedule),
            "split": lambda x: splits.index(x.split),
            "recompute": lambda x: recomputes.index(x.recompute),
            "order": lambda x: ORDERS.index(x.order),
        }
        columns = {f: column(indexed.get(f, lambda x, f=f: int(getattr(x, f)))) for f in COLUMNS}
        return LayoutBatch(**columns, names=names, splits=splits, recomputes=recomputes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole batch: what the columns broadcast to."""
        return np.broadcast_shapes(*(np.shape(getattr(self, f)) for f in COLUMNS))

    def __len__(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def row(self, i: int) -> Layout:
        """The i-th layout, in the order of the flattened shape."""
        where = np.unravel_index(i, self.shape)
        at = {f: _at(getattr(self, f), where) for f in COLUMNS}
        return Layout(
            **{f: at[f] for f in COLUMNS if f not in _INDEXED},
            sp=bool(at["sp"]),
            cp_kind=CP_KINDS[at["cp_kind"]],
            schedule=self.names[at["schedule"]],
            split=self.splits[at["split"]],
            recompute=self.recomputes[at["recompute"]],
            order=ORDERS[at["order"]],
        )

    def take(self, which: Bools | Ints) -> LayoutBatch:
        """The rows of a mask, or of indices into the flattened shape: [n]."""
        flat = {f: np.broadcast_to(getattr(self, f), self.shape).ravel()[which] for f in COLUMNS}
        return LayoutBatch(**flat, names=self.names, splits=self.splits, recomputes=self.recomputes)

    def rows(self, which: slice | Ints) -> LayoutBatch:
        """Some rows of the first axis of a grid."""
        all_rows = {f: getattr(self, f) for f in COLUMNS}
        some = {f: column if len(column) == 1 else column[which] for f, column in all_rows.items()}
        return LayoutBatch(**some, names=self.names, splits=self.splits, recomputes=self.recomputes)

    def expanded(self, dims: int) -> LayoutBatch:
        """The same with `dims` trailing axes of one: [n] -> [n, 1, ..]."""
        added = {f: np.reshape(getattr(self, f), np.shape(getattr(self, f)) + (1,) * dims) for f in COLUMNS}
        return LayoutBatch(**added, names=self.names, splits=self.splits, recomputes=self.recomputes)

    @property
    def dp(self) -> Ints:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Ints:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def virtual(self) -> Ints:
        """Stages a rank."""
        return np.asarray([schedules.virtual_stages(n) for n in self.names], dtype=np.int64)[self.schedule]

    @property
    def pp_stride(self) -> Ints:
        """Ranks between neighbouring stages."""
        return self.tp * self.cp * self.dp_shard * np.where(self.order > 0, 1, self.dp_replicate)

    @property
    def replicate_stride(self) -> Ints:
        """Ranks between neighbouring replicas."""
        return self.tp * self.cp * self.dp_shard * np.where(self.order > 0, self.pp, 1)

    @property
    def shards(self) -> Ints:
        """Parts into which ZeRO cuts the dense model state."""
        return np.where(self.zero > 0, self.dp_shard * self.cp, 1)

    @property
    def edp(self) -> Ints:
        """Parts into which ZeRO cuts the experts' state."""
        return np.where(self.zero > 0, np.maximum(1, self.dp_shard * self.cp * self.tp // (self.ep * self.etp)), 1)

    @property
    def expert_replicas(self) -> Ints:
        """Ranks with the same part of the experts' state."""
        return np.maximum(1, self.dp * self.cp * self.tp // (self.ep * self.etp) // self.edp)


def _at(column: Ints, where: tuple[np.intp, ...]) -> int:
    """The value at a place of the whole shape."""
    return int(column[tuple(i if n > 1 else 0 for i, n in zip(where, column.shape, strict=True))])


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(LayoutBatch) if f.name not in _NAMES)
"""Names of the columns."""

_INDEXED = ("sp", "cp_kind", "schedule", "split", "recompute", "order")
