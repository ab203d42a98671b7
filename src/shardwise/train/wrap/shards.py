"""The parameters of one unit, cut by rows: gathered together, freed together, their gradients reduced together.

A parameter of R rows over n ranks is cut into chunks of ceil(R / n); rank r holds rows r * chunk and up, the last ranks
fewer or none. Padding exists only in what travels. Letters: n ranks, c chunk rows, k numbers in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from shardwise.train.wrap.collectives import Grid, Ranks, ReduceScatter, start_all_gather, start_all_reduce


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter: `shard` is what the optimizer and `state_dict` see, `whole` what the module computes with."""

    name: str
    shard: nn.Parameter
    whole: nn.Parameter
    """a leaf of its own, so that the shards' dtype and shape are free; one NaN, expanded, while the unit is sharded:
    autograd asks a leaf for its shape when its gradient arrives, and who computes with it notices"""
    shape: torch.Size
    chunk: int
    arrived: bool = False
    """its whole gradient is in `whole.grad`"""

    @property
    def row_numel(self) -> int:
        return prod(self.shape[1:])

    @property
    def chunk_numel(self) -> int:
        """c * k, padding included."""
        return self.chunk * self.row_numel


def cut(name: str, p: nn.Parameter, ranks: Ranks, compute: torch.dtype) -> Slot:
    """Keep this rank's rows of `p`, in float32 at least; `p` stays the same object. It has one dim or more."""
    shape, chunk = p.shape, -(-p.shape[0] // ranks.size)
    wide = torch.promote_types(p.dtype, torch.float32)
    rows = p.data[ranks.index * chunk : (ranks.index + 1) * chunk]
    # A copy, or the whole parameter's storage would live on.
    p.data = rows.to(wide, copy=True).contiguous()
    p.grad = None
    absent = torch.full((1,) * len(shape), torch.nan, dtype=compute, device=p.device).expand(shape)
    whole = nn.Parameter(absent, requires_grad=p.requires_grad)
    return Slot(name, p, whole, shape, chunk)


def gather_whole(slot: Slot, ranks: Ranks) -> torch.Tensor:
    """The parameter in the shard's dtype, a plain tensor of its own. Collective."""
    mine = _padded(slot, slot.shard.detach())
    out = mine.new_empty(ranks.size * slot.chunk_numel)
    start_all_gather(out, mine, ranks).wait()
    return out[: slot.shape.numel()].view(slot.shape).clone()


def set_shard(slot: Slot, value: torch.Tensor, ranks: Ranks) -> None:
    """Take this rank's rows of the whole `value`."""
    with torch.no_grad():
        slot.shard.copy_(value[ranks.index * slot.chunk : (ranks.index + 1) * slot.chunk])


def _padded(slot: Slot, rows: torch.Tensor) -> torch.Tensor:
    """[c * k], flat; `rows` itself where it is full."""
    flat = rows.reshape(-1)
    missing = slot.chunk_numel - flat.numel()
    return flat if missing == 0 else torch.cat([flat, flat.new_zeros(missing)])


class Unit:
    """What is gathered in one collective. Its gathered buffer, one storage, exists only from `land` to `reshard`."""

    def __init__(self, name: str, slots: Sequence[Slot], grid: Grid, compute: torch.dtype) -> None:
        self.name, self.slots, self.grid, self.compute = name, list(slots), grid, compute
        self.chunk_numel = sum(slot.chunk_numel for slot in slots)
        self.buffer: torch.Tensor | None = None
        self.pins = 0
        """forwards that are computing with it"""
        self.kept = False
        """read outside its own forward: someone may hold the weight until the forward of the whole model ends"""
        self._flight: tuple[torch.Tensor, torch.Tensor, dist.Work | None] | None = None
        self._absent = [slot.whole.data for slot in slots]

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    @property
    def version(self) -> int:
        """Grows whenever a shard is written in place."""
        return sum(slot.shard._version for slot in self.slots)

    @property
    def complete(self) -> bool:
        """Every gradient that may come has come."""
        return all(slot.arrived for slot in self.slots if slot.whole.requires_grad)

    @torch.inference_mode(False)  # an inference tensor could not become a parameter's data
    @torch.no_grad()
    def start(self) -> None:
        """Start the gather: out [n, sum of c * k] in the compute dtype."""
        parts = [_padded(slot, slot.shard.detach()).to(self.compute) for slot in self.slots]
        mine = parts[0] if len(parts) == 1 else torch.cat(parts)
        ranks = self.grid.shard
        if ranks.size == 1:
            self._flight = mine, mine, None
            return
        out = mine.new_empty(ranks.size * self.chunk_numel)
        self._flight = out, mine, start_all_gather(out, mine, ranks)

    @torch.inference_mode(False)
    @torch.no_grad()
    def land(self) -> None:
        """Finish the gather: every `whole` becomes a view of the buffer."""
        out = self._arrive()
        n = self.grid.shard.size
        if len(self.slots) == 1 or n == 1:
            self.buffer, sources = out, None
        else:
            self.buffer, sources = out.new_empty(sum(s.shape.numel() for s in self.slots)), out.view(n, -1)
        offset = column = 0
        for slot in self.slots:
            numel = slot.shape.numel()
            view = self.buffer[offset : offset + numel]
            if sources is not None:
                self._unpad(view, sources[:, column : column + slot.chunk_numel])
            slot.whole.data = view.view(slot.shape)
            slot.whole.requires_grad_(slot.shard.requires_grad)
            offset, column = offset + numel, column + slot.chunk_numel

    def _arrive(self) -> torch.Tensor:
        if self._flight is None:
            raise RuntimeError(f"{self.name} is used before its gather began")
        out, _, work = self._flight
        self._flight = None
        if work is not None:
            work.wait()
        return out

    @staticmethod
    def _unpad(view: torch.Tensor, chunks: torch.Tensor) -> None:
        """view [R * k] <- chunks [n, c * k], of which the last rows are padding."""
        full, left = divmod(view.numel(), chunks.shape[1]) if chunks.shape[1] else (0, 0)
        view[: full * chunks.shape[1]].view(full, -1).copy_(chunks[:full])
        if left:
            view[full * chunks.shape[1] :].copy_(chunks[full, :left])

    def cancel(self) -> None:
        """Drop a gather that nobody wants any more."""
        if self._flight is not None:
            self._arrive()

    def reshard(self) -> None:
        """Drop the gathered weights."""
        self.buffer, self.kept = None, False
        for slot, absent in zip(self.slots, self._absent, strict=True):
            slot.whole.data = absent

    def forget_gradients(self) -> None:
        for slot in self.slots:
            slot.whole.grad, slot.arrived = None, False

    @torch.no_grad()
    def start_reduce(self) -> Reduction:
        """Take the whole gradients, zeros for each that is missing, and start their sum over the shard ranks."""
        wide = self.slots[0].shard.dtype
        n = self.grid.shard.size
        arrived = [slot for slot in self.slots if slot.arrived]
        if len(self.slots) == 1 and self.slots[0].shape[0] == n * self.slots[0].chunk:
            flat = _gradient(self.slots[0]).to(wide).reshape(-1)
        else:
            flat = torch.zeros(n * self.chunk_numel, dtype=wide, device=self.slots[0].shard.device)
            self._pad_gradients(flat.view(n, -1))
        self.forget_gradients()
        return Reduction(self, arrived, flat, ReduceScatter.start(flat, self.grid.shard) if n > 1 else None)

    def _pad_gradients(self, rows: torch.Tensor) -> None:
        """rows [n, sum of c * k] <- each gradient's chunks side by side."""
        column = 0
        for slot in self.slots:
            width = slot.chunk_numel
            if slot.arrived and width:
                flat = _gradient(slot).reshape(-1)
                full, left = divmod(flat.numel(), width)
                rows[:full, column : column + width].copy_(flat[: full * width].view(full, width))
                if left:
                    rows[full, column : column + left].copy_(flat[full * width :])
            column += width


def _gradient(slot: Slot) -> torch.Tensor:
    grad = slot.whole.grad
    if grad is None:
        raise RuntimeError(f"{slot.name} has no gradient to reduce")
    return grad


@dataclass(slots=True, eq=False)
class Reduction:
    """A unit's gradient on its way; `land` adds this rank's part of the average to the shards' `.grad`."""

    unit: Unit
    arrived: list[Slot]
    flat: torch.Tensor
    scatter: ReduceScatter | None

    def drop(self) -> None:
        """Forget it, once nobody writes into its buffers any more."""
        if self.scatter is not None:
            self.scatter.work.wait()

    @torch.no_grad()
    def land(self) -> None:
        grid = self.unit.grid
        mine = self.flat if self.scatter is None else self.scatter.wait()
        if grid.replicate is not None:
            start_all_reduce(mine, grid.replicate).wait()
        if grid.everyone.size > 1:
            mine = mine.div_(grid.everyone.size)
        offset = 0
        for slot in self.unit.slots:
            if any(slot is other for other in self.arrived):
                shard = slot.shard
                part = mine[offset : offset + shard.numel()].view(shard.shape)
                if shard.grad is None:
                    shard.grad = part
                else:
                    shard.grad.add_(part)
            offset += slot.chunk_numel
