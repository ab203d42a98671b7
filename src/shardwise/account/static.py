"""Columns of what the memory model adds up: unit memory, storages and the assumed parts, for many layouts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from shardwise.account.columns import per_key
from shardwise.account.units import UnitMemory, unit_memory
from shardwise.mesh import AXES, communicators
from shardwise.model.spec import KINDS, Cut, Model, Unit
from shardwise.plan.batch import Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.shards import Storage, block_named, ends_share_rank, make_storage

SAME = "same"
"""In place of a neighbour's kind: the very unit that runs."""


class Held(Protocol):
    """A stage by what it holds."""

    @property
    def embedding(self) -> bool: ...
    @property
    def layers(self) -> int: ...
    @property
    def head(self) -> bool: ...


class UnitColumns(NamedTuple):
    """`UnitMemory` of one kind of unit, a column [n] a field; `incoming` is the gradient that its backward takes."""

    input: Ints
    saved: Ints
    incoming: Ints
    f_peak: Ints
    bw_peak: Ints
    b_peak: Ints
    queued: Ints
    w_peak: Ints


class StorageColumns(NamedTuple):
    """Elements of one kind's storage, [n] each: as the products see it, padded over all shards, and one shard."""

    numel: Ints
    padded: Ints
    shard: Ints
    parts: Ints
    """flat views that the optimizer steps"""


@dataclass(frozen=True, slots=True)
class Columns:
    """Everything by column [n]; methods return bytes [n]. `shared`: one rank holds both users of a tied weight."""

    job: Job
    unit: dict[str, UnitColumns]
    storage: dict[str, StorageColumns]
    zero: Ints
    border: Ints
    """one activation at a stage border"""
    data: Ints
    """token ids of a whole step; the targets are as many"""
    micro_batches: Ints
    shared: bool
    groups: Ints
    """communicators that a rank opens: of its collectives, of point-to-point, and at the ends of tied copies"""

    def uses(self, kind: str) -> tuple[str, ...]:
        """Storages that a unit of this kind reads."""
        return ("head", "embedding") if kind == "head" and self.shared else (kind,)

    @property
    def _compute(self) -> int:
        return self.job.precision.compute_bytes

    @property
    def _wide(self) -> int:
        return self.job.precision.accumulate_bytes

    def _gathered(self, elements: Ints, width: int) -> Ints:
        """Only ZeRO-3 has it."""
        return np.where(self.zero == 3, elements * width, 0)

    def _in_transit(self, storage: str) -> Ints:
        """A gather under way: the whole padded unit, and this rank's part where it had to be cast."""
        s = self.storage[storage]
        cast = s.shard if self._compute != self._wide else 0
        return self._gathered(s.padded + cast, self._compute)

    def coming(self, ahead: str | None, running: str | None) -> Ints:
        """Gathers under way for the next unit while `running` (None: it holds no parameters) computes.

        `ahead` is None where the next unit reads nothing, SAME where it is the running one again.
        """
        if ahead is None or ahead == SAME:
            return np.zeros_like(self.zero)
        held = self.uses(running) if running and running != ahead else ()
        wanted = [s for s in self.uses(ahead) if s not in held]
        return sum((self._in_transit(s) for s in wanted), np.zeros_like(self.zero))

    def whole(self, kind: str) -> Ints:
        """Parameters of a unit while it computes."""
        return sum(
            (self._gathered(self.storage[s].numel, self._compute) for s in self.uses(kind)), np.zeros_like(self.zero)
        )

    def becoming_ready(self, kind: str, behind: str | None) -> Ints:
        """Largest moment of copying a unit's parameters out of its gather; nothing if the unit behind held them."""
        if behind == SAME:
            return np.zeros_like(self.zero)
        held = self.uses(behind) if behind and behind != kind else ()
        waiting = [s for s in self.uses(kind) if s not in held]
        moments = [np.zeros_like(self.zero)]
        done = np.zeros_like(self.zero)
        for i, s in enumerate(waiting):
            columns = self.storage[s]
            copying = self._gathered(columns.padded + columns.numel, self._compute)
            moments.append(done + copying + sum((self._in_transit(o) for o in waiting[i + 1 :]), np.zeros_like(done)))
            done = done + self._gathered(columns.numel, self._compute)
        return np.maximum.reduce(moments)

    def opened(self, kind: str) -> Ints:
        """Gradient buffers of one micro-batch of a unit."""
        return sum(
            (self._gathered(self.storage[s].padded, self._wide) for s in self.uses(kind)), np.zeros_like(self.zero)
        )

    def reduced(self, kind: str) -> Ints:
        """What a reduce-scatter returns, before it is added to the shard."""
        return np.maximum.reduce([self._gathered(self.storage[s].shard, self._wide) for s in self.uses(kind)])

    def static(self, held: Sequence[Held]) -> dict[str, Ints]:
        """What lives from the first step to the last on a rank that holds these stages."""
        counts = {
            "embedding": sum(p.embedding for p in held),
            "layer": sum(p.layers for p in held),
            "head": sum(p.head for p in held),
        }
        c, w, zero = self._compute, self._wide, self.zero
        aliased = (zero == 0) & (c == w)
        parts = {name: np.zeros_like(zero) for name in ("parameters", "gradients", "optimizer")}
        for kind, count in counts.items():
            s = self.storage[kind]
            parts["parameters"] += count * np.where(zero < 3, s.numel * c, 0)
            parts["gradients"] += count * np.where(zero < 3, s.padded, s.shard) * w
            parts["optimizer"] += count * (np.where(aliased, 2, 3) * s.shard * w + s.parts * 4)
        ends = counts["embedding"] + counts["head"]
        tables = self.job.seq_len * self.job.model.head_dim * c
        # Scalars as well: the scale of the loss; where the head is, each micro-batch's loss and the gradient of one.
        scalars = w * (1 + counts["head"] * (self.micro_batches + 1))
        parts["tokens and tables"] = ends * self.data + tables + scalars
        return parts

    def step_scratch(self, held: Sequence[Held]) -> Ints:
        """Largest moment of the optimizer's step: ZeRO-1 gathers the new parameters, unit by unit."""
        kinds = {k for p in held for k, here in zip(KINDS, (p.embedding, p.layers > 0, p.head), strict=True) if here}
        cast = self._compute != self._wide
        sizes = [(self.storage[k].padded + cast * self.storage[k].shard) * self._compute for k in kinds]
        return np.where(self.zero == 1, np.maximum.reduce(sizes), 0)

    def assumed(self, proved: Ints) -> dict[str, Ints]:
        """Context, communicators and the allocator's margin: priors of the device, counted for fit only."""
        assumed = self.job.cluster.device.assumed_memory
        return {
            "context": np.full_like(proved, assumed.context_bytes),
            "communicators": self.groups * int(assumed.communicator_bytes),
            "allocator margin": (proved * assumed.allocator_margin).astype(np.int64),
        }


def columns_of(job: Job, batch: LayoutBatch) -> Columns:
    """The columns of layouts that share pp and schedule."""
    model = job.model
    shared = model.tied and ends_share_rank(batch.names[int(batch.schedule[0])], int(batch.pp[0]))

    def memory(kind: str) -> UnitColumns:
        def value(tp: int, sp: int, mb: int, recompute: int) -> Ints:
            return _fields(unit_memory(model, kind, cut_of(job, tp, sp, mb), bool(recompute)))

        return UnitColumns(*per_key([batch.tp, batch.sp, batch.mb, batch.recompute], value).T)

    def storage(kind: str) -> StorageColumns:
        def value(tp: int, sp: int, shards: int) -> Ints:
            return _sizes(make_storage(model, unit_of(model, kind), tp, bool(sp), shards, shared))

        return StorageColumns(*per_key([batch.tp, batch.sp, batch.shards], value).T)

    def border(tp: int, sp: int, mb: int) -> Ints:
        return np.asarray(message_bytes(job, cut_of(job, tp, sp, mb)), dtype=np.int64)

    def opened(*degrees: int) -> Ints:
        wide = [axis for axis, degree in zip(AXES, degrees, strict=True) if degree]
        return np.asarray(communicators(wide) + ("pp" in wide) * (1 + (model.tied and not shared)), dtype=np.int64)

    degrees = (batch.pp, batch.dp_replicate, batch.dp_shard, batch.tp)
    groups = per_key([(d > 1).astype(np.int64) for d in degrees], opened)
    return Columns(
        job,
        {k: memory(k) for k in KINDS},
        {k: storage(k) for k in KINDS},
        batch.zero,
        per_key([batch.tp, batch.sp, batch.mb], border),
        job.global_batch // batch.dp * job.seq_len * 8,
        job.global_batch // (batch.dp * batch.mb),
        shared,
        groups,
    )


def unit_of(model: Model, kind: str) -> Unit:
    """A unit of this kind: all layers are alike."""
    return Unit("layers.0" if kind == "layer" else kind, block_named(model, kind))


def cut_of(job: Job, tp: int, sp: int, mb: int) -> Cut:
    """The cut of a layout given by three of its columns."""
    return job.cut(Layout(tp=tp, sp=bool(sp), mb=mb))


def message_bytes(job: Job, cut: Cut) -> int:
    """One activation (or its gradient) at a stage border."""
    return cut.bytes(job.model, block_named(job.model, "layer").output)


def _fields(m: UnitMemory) -> Ints:
    found = (m.input, m.saved, m.incoming, m.f_peak, m.bw_peak, m.b_peak, m.queued, m.w_peak)
    return np.asarray(found, dtype=np.int64)


def _sizes(s: Storage) -> Ints:
    parts = (s.vector_numel > 0) + (s.vector_numel < s.shard_numel)
    return np.asarray((s.numel, s.padded_numel, s.shard_numel, parts), dtype=np.int64)
