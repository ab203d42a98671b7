"""The model state as boxes of whole logical tensors, by the placement records alone: what saving and loading read.

A rank keeps flat buffers, `unit/part`. A checkpoint keeps whole tensors, `name/part`, whatever layout wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from shardwise.model.spec import Model
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.shards import EXPERTS, Record, logical_name
from shardwise.train.unit import UnitState

Shape = tuple[int, ...]

MASTER = "weight"
"""The part of a parameter that is its master copy; the others are the optimizer's states, by their names."""


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
        for part, flat in {MASTER: state.master, **state.moments}.items()
    }


def whole_shapes(model: Model) -> dict[str, Shape]:
    """Logical parameter -> its whole shape, on any layout."""
    return {
        logical_name(model, unit, p): tuple(int(model.dims[d]) for d in p.dims)
        for unit in model.units()
        for p in unit.block.parameters
    }


def saved_shapes(job: Job) -> dict[str, Shape]:
    """Every tensor of a checkpoint, `name/part`, and its whole shape."""
    parts = (MASTER, *job.optimizer.states)
    return {f"{name}/{part}": shape for name, shape in whole_shapes(job.model).items() for part in parts}


def chunks(states: dict[str, UnitState], layout: Layout, rank: int) -> list[Chunk]:
    """Every box that this rank holds; a rank whose shard of a parameter is empty or padding holds none of it."""
    return [
        chunk
        for unit, state in states.items()
        for record in state.storage.records
        for chunk in _of_record(unit, record, state, _box(unit, record, layout, rank))
    ]


def _box(unit: str, record: Record, layout: Layout, rank: int) -> tuple[slice, ...]:
    """What of the whole tensor the rank's stage holds here, before ZeRO cuts it. Experts are cut along ep: etp would
    make of one storage several boxes, which no layout that runs does (a save would find elements that nobody holds)."""
    if not unit.endswith(f".{EXPERTS}"):
        return record.box(layout.mesh.coordinates(rank)["tp"])
    ep = layout.expert_mesh.coordinates(rank)["ep"]
    firsts = [ep * n if n < size else 0 for n, size in zip(record.shape, record.whole, strict=True)]
    return tuple(slice(first, first + n) for first, n in zip(firsts, record.shape, strict=True))


def _of_record(unit: str, record: Record, state: UnitState, box: tuple[slice, ...]) -> Iterator[Chunk]:
    held = (int(record.rows), *map(int, record.shape[1:]))
    first = box[0].start + state.index * held[0]
    mine = (slice(first, min(first + held[0], box[0].stop)), *box[1:])
    offsets, sizes = tuple(s.start for s in mine), tuple(s.stop - s.start for s in mine)
    if min(sizes) <= 0:
        return
    for part in (MASTER, *state.moments):
        name, buffer = f"{record.name}/{part}", f"{unit}/{part}"
        yield Chunk(name, record.whole, offsets, sizes, buffer, int(record.offset), held)
