"""The model state as boxes of whole logical tensors, by the placement records alone: what saving and loading read.

A rank keeps flat buffers, `unit/part`. A checkpoint keeps whole tensors, `name/part`, whatever layout wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from shardwise.model.spec import Model
from shardwise.plan.layout import Layout
from shardwise.plan.shards import EXPERTS, Record, logical_name
from shardwise.train.unit import UnitState

Shape = tuple[int, ...]

PARTS = ("weight", "exp_avg", "exp_avg_sq")
"""The master copy and AdamW's two moments."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a whole tensor, and where a flat buffer of this rank holds it.

    `name`: of the whole tensor, of `shape`; the box has `sizes` at `offsets`. `buffer` is the flat buffer's name; from
    `start` on lies a block of `held` rows and columns, of which the box is the first corner: the rest is padding.
    """

    name: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    buffer: str
    start: int
    held: Shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def view(self, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        """The box [sizes], inside the flat buffer."""
        block = buffers[self.buffer][self.start : self.start + prod(self.held)].view(self.held)
        return block[tuple(slice(0, size) for size in self.sizes)]


def buffers(states: dict[str, UnitState]) -> dict[str, torch.Tensor]:
    """The flat buffers that make up the state, by name; they are the state, no copies of it."""
    return {
        f"{unit}/{part}": flat
        for unit, state in states.items()
        for part, flat in zip(PARTS, (state.master, *state.moments), strict=True)
    }


def whole_shapes(model: Model) -> dict[str, Shape]:
    """Logical parameter -> its whole shape, on any layout."""
    return {
        logical_name(model, unit, p): tuple(int(model.dims[d]) for d in p.dims)
        for unit in model.units()
        for p in unit.block.parameters
    }


def chunks(states: dict[str, UnitState], model: Model, layout: Layout, rank: int) -> list[Chunk]:
    """Every box that this rank holds; a rank whose shard of a parameter is empty or padding holds none of it."""
    whole = whole_shapes(model)
    return [
        chunk
        for unit, state in states.items()
        for record in state.storage.records
        for chunk in _of_record(unit, record, whole[record.name], _place(unit, state, layout, rank))
    ]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank stands: its ZeRO shard, its place along tensor and expert parallelism."""

    shard: int
    tp: int
    tp_degree: int
    ep: int


def _place(unit: str, state: UnitState, layout: Layout, rank: int) -> _Place:
    if unit.endswith(f".{EXPERTS}"):
        at = layout.expert_mesh.coordinates(rank)
        return _Place(state.index, at["etp"], layout.expert_mesh.degree("etp"), at["ep"])
    return _Place(state.index, layout.mesh.coordinates(rank)["tp"], layout.tp, 0)


def _of_record(unit: str, record: Record, whole: Shape, place: _Place) -> Iterator[Chunk]:
    held = (int(record.rows), *map(int, record.shape[1:]))
    first = place.shard * held[0]
    offsets, sizes = [], []
    for dim, (size, local) in enumerate(zip(whole, map(int, record.shape), strict=True)):
        inside = first if dim == 0 else 0
        offset = _slot(record, dim, size, place) * local + inside
        offsets.append(offset)
        sizes.append(min(held[dim], local - inside, size - offset))
    if min(sizes) <= 0:
        return
    for part in PARTS:
        name, buffer = f"{record.name}/{part}", f"{unit}/{part}"
        yield Chunk(name, whole, tuple(offsets), tuple(sizes), buffer, int(record.offset), held)


def _slot(record: Record, dim: int, size: int, place: _Place) -> int:
    """Which of the equal parts of a dim this rank holds. Neighbours share one where tp is larger than the parts are
    many (kv heads); a padded last part is cut off by the caller. Experts are cut along ep: etp would make of one
    storage several boxes, which no layout that runs does (a save would find elements that nobody holds)."""
    parts = -(-size // int(record.shape[dim]))
    if dim == record.tp_dim:
        return place.tp // max(1, place.tp_degree // parts)
    return place.ep if parts > 1 else 0
