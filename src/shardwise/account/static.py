"""Columns of what the memory model adds up: unit memory, storages and the assumed parts, for many layouts at once.

The columns of a batch broadcast: what depends on the cut alone is [k, 1, 1], on recomputation [k, r, 1], on ZeRO
[k, 1, z]. Nothing is expanded to the whole grid before it has to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise import schedule as schedules
from shardwise.account.columns import by_recompute, distinct, spread, where
from shardwise.account.units import UnitMemory, most, unit_memory
from shardwise.mesh import communicators
from shardwise.model.families.forms import form_of
from shardwise.model.spec import EMBEDDING, HEAD, Count, Cut, Model, Unit
from shardwise.plan.batch import Bools, Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.optimizer import ADAMW
from shardwise.plan.shards import EXPERTS, State, borrowed, ends_share_rank, kv_copies, storages
from shardwise.results import GRADIENTS, OPTIMIZER, PARAMETERS, TABLES
from shardwise.units import DTYPE_BYTES

SAME = "same"
"""In place of a neighbour's kind: the very unit that runs."""

Held = tuple[tuple[str, ...], ...]
"""The stages of a rank, each as the kinds of its units."""


class StorageColumns(NamedTuple):
    """Elements of one kind's storage: as the products see it, padded over all shards, and one shard."""

    numel: Count
    padded: Count
    shard: Count
    parts: int
    """flat views that the optimizer steps"""


class Gathered(NamedTuple):
    """Parameters of ZeRO-3 that are whole at a moment: those of `kind`, and the gathers under way for `ahead`.

    `ready`: the moment before, when they are copied out of their gather; the unit `behind` may have held some.
    """

    kind: str | None
    ahead: str | None
    ready: bool = False
    behind: str | None = None


class Opened(NamedTuple):
    """Gradients of one micro-batch of a unit where they are cut (ZeRO-2 and 3); `reduced`, with what a reduce-scatter
    returns before it is added to the shard."""

    kind: str
    reduced: bool


@dataclass(frozen=True, slots=True)
class Columns:
    """Methods return bytes. `shared`: one rank holds both users of a tied weight.

    What depends on the way the state is cut has a row for each of the few ways: `way` [k] is that of every layout.
    """

    job: Job
    unit: dict[str, UnitMemory]
    storage: dict[str, StorageColumns]
    """of every way"""
    way: Ints
    zero: Ints
    """of every way"""
    border: Count
    """one activation at a stage border"""
    data: Count
    """token ids of a whole step; the targets are as many"""
    micro_batches: Ints
    shared: bool
    groups: Ints
    """communicators that a rank opens: of its collectives, of point-to-point, and between copies of weights"""

    def spread(self, value: Count) -> Count:
        """What is known of every way, of every layout."""
        return spread(value, int(self.way.max(initial=0)) + 1, self.way)

    def uses(self, kind: str) -> tuple[str, ...]:
        """Storages that a unit of this kind reads."""
        own = tuple(s for s in (kind, f"{kind}.{EXPERTS}") if s in self.storage)
        model = self.job.model
        return (*own, *(s for s in borrowed(model, model.block(kind), self.shared) if s in self.storage))

    @property
    def _compute(self) -> int:
        return self.job.precision.compute_bytes

    @property
    def _wide(self) -> int:
        return self.job.gradient_bytes

    def _in_transit(self, storage: str) -> Count:
        """A gather under way: the whole padded unit, and this rank's part where it had to be cast."""
        s = self.storage[storage]
        cast = s.shard if self._compute != self.job.precision.accumulate_bytes else 0
        return (s.padded + cast) * self._compute

    def gathered(self, g: Gathered | None) -> Count:
        """Under ZeRO-3, of every way; nothing lives so otherwise."""
        if g is None:
            return 0
        if g.ready:
            return self._becoming_ready(g)
        whole = sum(self.storage[s].numel * self._compute for s in self.uses(g.kind)) if g.kind else 0
        if g.ahead is None or g.ahead == SAME:
            return whole
        held = self.uses(g.kind) if g.kind and g.kind != g.ahead else ()
        return whole + sum(self._in_transit(s) for s in self.uses(g.ahead) if s not in held)

    def _becoming_ready(self, g: Gathered) -> Count:
        """Largest moment of copying a unit's parameters out of its gather; nothing if the unit behind held them."""
        if g.behind == SAME or g.kind is None:
            return 0
        held = self.uses(g.behind) if g.behind and g.behind != g.kind else ()
        waiting = [s for s in self.uses(g.kind) if s not in held]
        moments: list[Count] = [0]
        done: Count = 0
        for i, s in enumerate(waiting):
            columns = self.storage[s]
            copying = (columns.padded + columns.numel) * self._compute
            moments.append(done + copying + sum(self._in_transit(o) for o in waiting[i + 1 :]))
            done = done + columns.numel * self._compute
        return most(moments)

    def opened(self, o: Opened | None) -> Count:
        """Under ZeRO-2 and 3, of every way."""
        if o is None:
            return 0
        sizes = [self.storage[s] for s in self.uses(o.kind)]
        buffers = sum(s.padded * self._wide for s in sizes)
        return buffers + o.reduced * most([s.shard * self._wide for s in sizes])

    def static(self, held: Held) -> dict[str, Count]:
        """What lives from the first step to the last on a rank that holds these stages."""
        kinds = [kind for stage in held for kind in stage]
        c, w, wide, zero = self._compute, self._wide, self.job.precision.accumulate_bytes, self.zero
        aliased = (zero == 0) & (c == wide)
        parts: dict[str, Count] = {PARAMETERS: 0, GRADIENTS: 0, OPTIMIZER: 0}
        for kind in dict.fromkeys(kinds):
            count = min(kinds.count(kind), self.job.model.count(kind) * len(held))
            for s in (self.storage[n] for n in self.uses(kind) if n.partition(".")[0] == kind):
                weights = (zero < 3) * s.numel * (c + self.job.precision.cached_bytes)
                gradients = where(zero < 2, s.padded, s.shard) * w
                for name, size in zip(tuple(parts), (weights, gradients, self._optimizer(s, aliased)), strict=True):
                    parts[name] = parts[name] + count * size
        parts = {name: self.spread(value) for name, value in parts.items()}
        heads = kinds.count(HEAD)
        ends = kinds.count(EMBEDDING) + heads
        rotations = 1 + (form_of(self.job.model).local_theta is not None)
        tables = self.job.seq_len * self.job.model.head_dim * rotations * c
        # Scalars as well: the scale of the loss; where the head is, each micro-batch's loss and the gradient of one.
        scalars = wide * (1 + heads * (self.micro_batches + 1))
        parts[TABLES] = ends * self.data + tables + scalars
        return parts

    def _optimizer(self, s: StorageColumns, aliased: Count) -> Count:
        """Master copy, where it is not `aliased` to the weights, and states of one storage; or what the stack states
        for AdamW, less the float32 states that this optimizer has not."""
        kind, stated = self.job.optimizer, self.job.stack.state.optimizer_bytes_per_parameter
        if stated:
            lacking = DTYPE_BYTES["float32"] * (len(ADAMW.states) - len(kind.states))
            return np.ceil(s.shard * max(0.0, stated - lacking)).astype(np.int64)
        tensors = where(aliased, 0, 1) + len(kind.states)
        return tensors * s.shard * self.job.precision.accumulate_bytes + s.parts * kind.counter_bytes

    def step_scratch(self, held: Held) -> Count:
        """Largest moment of the optimizer's step: ZeRO-1 and 2 gather the new parameters, unit by unit."""
        names = {s for stage in held for kind in stage for s in self.uses(kind)}
        cast = self._compute != self.job.precision.accumulate_bytes
        sizes = [(s.padded + cast * s.shard) * self._compute for s in (self.storage[n] for n in sorted(names))]
        gathers = ((self.zero == 1) | (self.zero == 2)) * most(sizes)
        transient = self.job.stack.state.step_bytes_per_parameter
        if not transient:
            return self.spread(gathers)
        kinds = [kind for stage in held for kind in stage]
        stepped = sum(self.storage[s].shard for kind in kinds for s in self.uses(kind))
        return self.spread(most([gathers, np.ceil(stepped * transient).astype(np.int64)]))

    def assumed(self, proved: Ints, groups: Ints) -> dict[str, Ints]:
        """Context, communicators of so many groups and the allocator's margin: priors of the device, counted for fit
        only."""
        assumed = self.job.cluster.device.assumed_memory
        margin = self.job.stack.allocator_margin
        return {
            "context": np.full_like(proved, assumed.context_bytes),
            "communicators": groups * int(assumed.communicator_bytes),
            "allocator margin": (proved * (assumed.allocator_margin if margin is None else margin)).astype(np.int64),
        }


def columns_of(job: Job, batch: LayoutBatch) -> Columns:
    """The columns of layouts that share pp and schedule."""
    model, cut = job.model, job.cuts(batch)
    name = batch.names[int(batch.schedule.flat[0])]
    shared = ends_share_rank(name, int(batch.pp.flat[0]))
    apart = model.tied and not shared, schedules.copies(name) > 1

    def memory(kind: str) -> UnitMemory:
        return UnitMemory(*by_recompute(batch, lambda way: _fields(unit_memory(model, kind, cut, way))))

    few, way = distinct(batch, _CUTS)
    dp = job.cluster.world_size // (batch.tp * batch.cp * batch.pp)
    micro_batches = job.global_batch // np.maximum(1, dp * batch.mb)
    return Columns(
        job,
        {k: memory(k) for k in model.kinds},
        _storage_columns(job, few, shared),
        way,
        few.zero,
        message_bytes(job, cut),
        job.global_batch // np.maximum(1, dp) * (job.seq_len // batch.cp) * 8,
        micro_batches,
        shared,
        _communicators(batch, sum(apart), kv_copies(model, cut)),
    )


_CUTS = ("tp", "sp", "cp", "ep", "etp", "zero", "dp_replicate", "dp_shard")
"""Columns that decide how state is cut; those that a grid has along z are the same in all its rows."""


def _storage_columns(job: Job, batch: LayoutBatch, shared: bool) -> dict[str, StorageColumns]:
    """By kind, and by kind and EXPERTS."""
    cut = job.cuts(batch)
    found: dict[str, StorageColumns] = {}
    for kind in job.model.kinds:
        for s in storages(job.model, unit_of(job.model, kind), cut, State(batch.shards, batch.edp), shared):
            name = f"{kind}.{EXPERTS}" if s.unit.endswith(f".{EXPERTS}") else kind
            found[name] = StorageColumns(s.numel, s.padded_numel, s.shard_numel, s.parts)
    return found


def _communicators(batch: LayoutBatch, apart: int, copies: Count) -> Ints:
    """[..] how many a rank opens: asked once for each set of axes with more than one rank. `apart`: those between
    pipeline ranks that hold copies, of a tied weight and of whole stages. Copies of kv heads have one of their own,
    unless all tensor-parallel ranks hold the same."""
    axes: dict[str, Bools] = {
        "pp": batch.pp > 1,
        "dp_replicate": batch.dp_replicate > 1,
        "dp_shard": batch.dp_shard > 1,
        "cp": batch.cp > 1,
        "tp": batch.tp > 1,
        "ep": batch.ep > 1,
        "etp": batch.etp > 1,
    }
    axes["edp"] = (axes["ep"] | axes["etp"]) & (batch.edp > 1)
    code = sum(mask.astype(np.int64) << i for i, mask in enumerate(axes.values()))
    counts = np.zeros(1 << len(axes), dtype=np.int64)
    for value in np.unique(code).tolist():
        wide = [axis for i, axis in enumerate(axes) if value >> i & 1]
        counts[value] = communicators(wide) + ("pp" in wide) * (1 + apart)
    return counts[code] + ((copies > 1) & (copies < batch.tp))


def unit_of(model: Model, kind: str) -> Unit:
    """A unit of this kind: all of one kind are alike."""
    return Unit("layers.0" if kind in model.chain else kind, model.block(kind))


def message_bytes(job: Job, cut: Cut) -> Count:
    """One activation (or its gradient) at a stage border."""
    return cut.elements(job.model, "th") * job.precision.compute_bytes


def _fields(m: UnitMemory) -> Sequence[Count]:
    return (m.input, m.saved, m.incoming, m.f_peak, m.bw_peak, m.b_peak, m.queued, m.w_peak)
