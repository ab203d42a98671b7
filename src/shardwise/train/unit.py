"""The model state of one unit on one rank: DDP, ZeRO-1 to 3 and HSDP, by the storage's records alone.

zero   weights              gradient                      master, the optimizer's states
0      whole                whole                         whole (the weights themselves where no cast is needed)
1      whole                whole, padded to the shards   this rank's shard
2      whole                whole only in one backward    this rank's shard; the gradient's shard as well
3      only while in use    as under 2                    as under 2
"""

from __future__ import annotations

from itertools import groupby

import torch

from shardwise.collective import Phase
from shardwise.plan.job import Job
from shardwise.plan.shards import Record, Storage
from shardwise.train.comm import Work
from shardwise.train.weights import Slot, shard_blocks
from shardwise.train.world import TIED_AXES, World


def torch_dtype(name: str) -> torch.dtype:
    """`bfloat16` -> torch.bfloat16"""
    return getattr(torch, name)


def _padded(value: torch.Tensor, record: Record) -> torch.Tensor:
    """The value [shape of the record] of a part that may be shorter."""
    if value.shape == record.shape:
        return value
    whole = value.new_zeros(record.shape)
    whole[tuple(slice(n) for n in value.shape)] = value
    return whole


class UnitState:
    """Buffers of one storage. `compute` is the dtype of the products, `wide` of sums and of the optimizer. `gradient`:
    the storage's place in the gradients of a bucket, where it shares one."""

    def __init__(
        self,
        storage: Storage,
        zero: int,
        job: Job,
        world: World,
        device: torch.device,
        gradient: torch.Tensor | None = None,
    ) -> None:
        self.storage, self.zero, self.world = storage, zero, world
        self.compute, self.wide = torch_dtype(job.precision.compute), torch_dtype(job.precision.accumulate)
        self.index = world.index("dp_shard") if storage.shards > 1 else 0
        n, shard = storage.shards, storage.shard_numel

        def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        self.weights: torch.Tensor | None = zeros(storage.numel, self.compute) if zero < 3 else None
        aliased = self.weights if zero == 0 and self.compute == self.wide else None
        self.master: torch.Tensor = zeros(shard, self.wide) if aliased is None else aliased
        self.moments = {name: zeros(shard, self.wide) for name in job.optimizer.states}
        self.gradient = zeros(n * shard, self.wide) if gradient is None and zero < 2 else gradient
        self.gradient_shard: torch.Tensor = (
            zeros(shard, self.wide) if self.gradient is None else self._part(self.gradient)
        )
        self.empty = torch.empty(0, dtype=self.compute, device=device)
        self.slots = {r.name: Slot(r, torch.nn.Parameter(self.empty)) for r in storage.records}
        self._gathering: tuple[torch.Tensor, torch.Tensor, Work] | None = None
        if self.weights is not None:
            self._point_into(self.weights)
        if self.gradient is not None:
            self._open(self.gradient)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a padded flat buffer, a view."""
        return whole.view(self.storage.shards, -1)[self.index]

    def _point_into(self, flat: torch.Tensor) -> None:
        offset = 0
        for slot in self.slots.values():
            numel = slot.record.numel
            slot.parameter.data = flat[offset : offset + numel].view(slot.record.shape)
            offset += numel

    def _open(self, gradient: torch.Tensor | None) -> None:
        for slot in self.slots.values():
            slot.open(None if gradient is None else self._slice(gradient, slot.record))

    def _slice(self, flat: torch.Tensor, record: Record) -> torch.Tensor:
        """A record's part of every shard: [shards, rows * columns]."""
        return flat.view(self.storage.shards, -1)[:, record.offset : record.offset + record.shard_numel]

    def load(self, values: dict[str, torch.Tensor]) -> None:
        """Set the parameters from their local values [the rank's box of the record], in the wide dtype; padding is 0
        and stays so, since its gradient is."""
        for name, slot in self.slots.items():
            record = slot.record
            value = _padded(values[name], record)
            if self.weights is not None:
                slot.parameter.data.copy_(value)
            padded = value.new_zeros(self.storage.shards, record.shard_numel)
            for mine, parts in shard_blocks(record, value, padded):
                parts.copy_(mine)
            self.master[record.offset : record.offset + record.shard_numel].copy_(padded[self.index])

    # ZeRO-3: parameters come and go.

    def unshard(self) -> None:
        """Start the gather of the whole unit, in one collective."""
        group = self.world.group("dp_shard")
        if group is None:
            raise RuntimeError(f"{self.storage.unit} has one shard, there is nothing to gather")
        mine = self.master.to(self.compute)
        whole = torch.empty(self.storage.padded_numel, dtype=self.compute, device=mine.device)
        with self.world.at(self.storage.unit, Phase.UNSHARD):
            self._gathering = whole, mine, self.world.comm.all_gather(whole, mine, group)

    def ready(self) -> None:
        """Finish the gather: every parameter becomes a tensor of its own."""
        if self._gathering is None:
            raise RuntimeError(f"{self.storage.unit} is used before its gather began")
        whole, mine, work = self._gathering
        self._gathering = None
        work.wait()
        del mine, work
        self._copy_out(whole)

    def _copy_out(self, whole: torch.Tensor) -> None:
        for slot in self.slots.values():
            if self.weights is None:
                slot.parameter.data = whole.new_empty(slot.record.shape)
            for mine, parts in shard_blocks(slot.record, slot.parameter.data, self._slice(whole, slot.record)):
                mine.copy_(parts)

    def reshard(self) -> None:
        """Drop the parameters; views into them would lie, so nothing may have kept one."""
        for slot in self.slots.values():
            slot.parameter.data = self.empty

    def open_gradient(self) -> None:
        """A buffer for the gradient of one micro-batch."""
        self.gradient = torch.zeros(self.storage.padded_numel, dtype=self.wide, device=self.master.device)
        self._open(self.gradient)

    # Every kind: gradients are summed.

    def scatter(self) -> Work | None:
        """The whole gradient into this rank's shard: in place, or added to what earlier micro-batches left there; that
        is over at once, so that no whole gradient lives beside the next unit's."""
        group = self.world.group("dp_shard")
        if group is None or self.gradient is None:
            raise RuntimeError(f"{self.storage.unit} has no whole gradient to scatter")
        out = torch.empty_like(self.gradient_shard) if self.zero >= 2 else self.gradient_shard
        with self.world.at(self.storage.unit, Phase.REDUCE):
            work = self.world.comm.reduce_scatter(out, self.gradient, group)
        if self.zero < 2:
            return work
        work.wait()
        self.gradient_shard.add_(out)
        self.gradient = None
        self._open(None)
        return None

    def tie(self) -> None:
        """Sum the two copies of the tied weight, on matching shards."""
        record = self.storage.tied
        if record is not None:
            part = self.gradient_shard[record.offset : record.offset + record.shard_numel]
            self.world.all_reduce(part, TIED_AXES, self.storage.unit, Phase.TIE)

    def zero_gradient(self) -> None:
        (self.gradient_shard if self.gradient is None else self.gradient).zero_()

    def counted(self) -> list[torch.Tensor]:
        """Flat views of the gradient elements that this rank counts in a norm, records that lie together as one: each
        logical element once in SHARDED (of two copies of a stage, the caller asks one)."""

        def counts(record: Record) -> bool:
            twin = record.copies > 1 and self.storage.unit != "embedding"
            return not twin and record.counted(self.world.index("tp"))

        found: list[torch.Tensor] = []
        for counted, those in groupby(self.storage.records, key=counts):
            if counted:
                run = list(those)
                found.append(self.gradient_shard[run[0].offset : run[-1].offset + run[-1].shard_numel])
        return found

    def publish(self) -> None:
        """After the optimizer's step: the weights follow the master copy."""
        group = self.world.group("dp_shard")
        with self.world.at(self.storage.unit, Phase.GATHER):
            if self.zero in (1, 2) and group is not None:
                mine = self.master.to(self.compute)
                whole = torch.empty(self.storage.padded_numel, dtype=self.compute, device=mine.device)
                self.world.comm.all_gather(whole, mine, group).wait()
                self._copy_out(whole)
            elif self.weights is not None and self.weights is not self.master:
                self.weights.copy_(self.master)
