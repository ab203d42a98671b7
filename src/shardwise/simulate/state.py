"""Seconds that the model state costs: parameters gathered, gradients reduced, the optimizer's step.

Every number of elements is a storage's own (`plan/shards.py`), every collective one that `account/comm.py` predicts.
Columns [k, 1, z].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.account.columns import distinct, spread, where
from shardwise.account.static import unit_of
from shardwise.collective import Kind
from shardwise.model.spec import Count
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.buckets import tensor_moves, together
from shardwise.plan.job import Job
from shardwise.plan.shards import (
    COPIES,
    EXPERTS,
    State,
    Storage,
    borrowed,
    ends_share_rank,
    kv_copies,
    placement,
    storages,
)
from shardwise.simulate.network import Links, collective_s, links

_CLIPPED = 2 + 1
"""Passes over this rank's gradient beside the optimizer's own: clipping reads and writes it, its norm reads it."""

_SCALAR_BYTES = 8
"""Bytes of the step's scalar all-reduces: latency is all they cost."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """Seconds of one kind of unit's state.

    `gather` happens in every micro-batch under ZeRO-3, `reduce` under ZeRO-2 and 3, `final` once, with the unit's last
    gradient; `step` is the optimizer's kernels, `publish` the gather of the new parameters under ZeRO-1 and 2.
    """

    gather: Count
    reduce: Count
    final: Count
    step: Count
    publish: Count

    def __add__(self, other: UnitState) -> UnitState:
        return UnitState(
            self.gather + other.gather,
            self.reduce + other.reduce,
            self.final + other.final,
            self.step + other.step,
            self.publish + other.publish,
        )


@dataclass(frozen=True, slots=True)
class StateSeconds:
    """`units` by kind; once a step: the gradients of tied copies, and the all-reduces of token count, loss and clip
    norm."""

    units: dict[str, UnitState]
    tie: Count
    scalars: Count


@dataclass(frozen=True, slots=True)
class _Groups:
    """Ranks that share a storage's shards, that hold the same shard, the same kv heads, and the same stage."""

    shards: Links
    copies: Links
    tp: Links
    kv_copies: Links
    twins: Links | None


_CUTS = ("tp", "sp", "cp", "ep", "etp", "order", "zero", "dp_replicate", "dp_shard")
"""Columns that decide how state is cut; those that a grid has along z are the same in all its rows."""


def state_seconds(job: Job, batch: LayoutBatch) -> StateSeconds:
    """Legal layouts of one pipeline: asked once for each way to cut the state."""
    few, inverse = distinct(batch, _CUTS)
    found, rows = _state_seconds(job, few), few.shape[0]

    def all_rows(value: Count) -> Count:
        return spread(value, rows, inverse)

    units = {
        kind: UnitState(*map(all_rows, (u.gather, u.reduce, u.final, u.step, u.publish)))
        for kind, u in found.units.items()
    }
    return StateSeconds(units, all_rows(found.tie), all_rows(found.scalars))


def _state_seconds(job: Job, batch: LayoutBatch) -> StateSeconds:
    name, pp = batch.names[int(batch.schedule.flat[0])], int(batch.pp.flat[0])
    shared = ends_share_rank(name, pp)
    dense, expert = _groups(job, batch, len(placement(name, pp)) > 1)
    units: dict[str, UnitState] = {}
    tied: Count = 0
    for kind in job.model.kinds:
        found = storages(job.model, unit_of(job.model, kind), job.cuts(batch), State(batch.shards, batch.edp), shared)
        of_experts = [s.unit.endswith(f".{EXPERTS}") for s in found]
        alike = max(1, job.model.count(kind) // pp)
        each = [
            _storage_s(job, batch, s, expert if e else dense, alike) for s, e in zip(found, of_experts, strict=True)
        ]
        units[kind] = sum(each[1:], each[0]) if each else UnitState(0.0, 0.0, 0.0, 0.0, 0.0)
        if job.model.block(kind).tied and found and found[0].tied:
            tied = found[0].tied.shard_numel
    units = {kind: _with_borrowed(job, kind, unit, units, shared) for kind, unit in units.items()}
    return StateSeconds(units, _tie_s(job, batch, tied), _scalars_s(job, batch))


def _groups(job: Job, batch: LayoutBatch, twins: bool) -> tuple[_Groups, _Groups]:
    """Those of dense storages and of routed experts."""
    cluster, zero, tp = job.cluster, batch.zero > 0, batch.tp
    half = links(cluster, (batch.pp_stride * np.maximum(1, batch.pp // 2), 2)) if twins else None
    across = links(cluster, (1, tp))
    alike = links(cluster, (1, kv_copies(job.model, job.cuts(batch))))
    inner = batch.ep * batch.etp
    dense = _Groups(
        links(cluster, (tp, batch.shards)),
        links(cluster, (tp, np.where(zero, 1, batch.cp)), (batch.replicate_stride, batch.dp_replicate)),
        across,
        alike,
        half,
    )
    experts = _Groups(
        links(cluster, (inner, batch.edp)),
        links(cluster, (inner * batch.edp, batch.expert_replicas)),
        across,
        alike,
        half,
    )
    return dense, experts


def _storage_s(job: Job, batch: LayoutBatch, s: Storage, groups: _Groups, alike: int) -> UnitState:
    """`alike`: units of its kind on a rank; buckets are taken to be filled with these."""
    precision, cluster, zero = job.precision, job.cluster, batch.zero
    narrow, wide, summed = precision.compute_bytes, precision.accumulate_bytes, job.gradient_bytes
    rate = cluster.device.memory_bytes_per_s * cluster.device.efficiency.memory
    gathered = collective_s(Kind.ALL_GATHER, s.padded_numel * narrow, groups.shards)
    gathered = gathered + s.numel * 2 * narrow / rate  # copied out of the gather, into tensors of their own
    scattered = collective_s(Kind.REDUCE_SCATTER, s.padded_numel * summed, groups.shards)
    many = np.where(zero == 0, together(s.shard_numel, alike), 1)
    final = collective_s(Kind.ALL_REDUCE, many * s.shard_numel * summed, groups.copies) / many
    if groups.twins is not None:
        final = final + collective_s(Kind.ALL_REDUCE, many * s.shard_numel * summed, groups.twins) / many
    for move in tensor_moves(s):
        over = collective_s(move.kind, move.elements * summed, groups.kv_copies if move.axes == COPIES else groups.tp)
        final = final + np.where(np.asarray(move.elements) > 0, over, 0.0)
    zeroed = where(zero >= 2, s.shard_numel, s.padded_numel) * summed
    aliased = (zero == 0) & (narrow == wide)
    narrowed = np.where(aliased, 0, s.shard_numel * (narrow + wide))
    opened = (s.padded_numel + 3 * s.shard_numel) * summed / rate  # a buffer of zeros, and its sum added to the shard
    return UnitState(
        gather=np.where(zero == 3, gathered, 0.0),
        reduce=np.where(zero >= 2, scattered + opened, 0.0),
        final=np.where(zero == 1, scattered, 0.0) + final,
        step=(s.shard_numel * wide * (job.optimizer.passes + _CLIPPED) + zeroed + narrowed) / rate,
        publish=np.where((zero == 1) | (zero == 2), gathered, 0.0),
    )


def _with_borrowed(job: Job, kind: str, unit: UnitState, units: dict[str, UnitState], shared: bool) -> UnitState:
    """A unit gathers and reduces the storages that its tied weights lie in, too."""
    gather, reduce = unit.gather, unit.reduce
    for name in borrowed(job.model, job.model.block(kind), shared):
        gather, reduce = gather + units[name].gather, reduce + units[name].reduce
    return UnitState(gather, reduce, unit.final, unit.step, unit.publish)


def _tie_s(job: Job, batch: LayoutBatch, elements: Count) -> Count:
    """Both ends of the pipeline sum the gradient of a weight that they hold twice."""
    ends = links(job.cluster, (batch.pp_stride * np.maximum(batch.pp - 1, 1), np.minimum(batch.pp, 2)))
    seconds = collective_s(Kind.ALL_REDUCE, elements * job.gradient_bytes, ends)
    return np.where(np.asarray(elements) > 0, seconds, 0.0)


def _scalars_s(job: Job, batch: LayoutBatch) -> Count:
    """Token count over the data axes, loss over these and the stages, clip norm over what cuts the state (experts' own
    where no ZeRO does)."""
    cluster, one = job.cluster, np.ones_like(batch.tp)
    data = batch.dp * batch.cp
    groups = (
        links(cluster, (batch.tp, data)),
        links(cluster, (batch.tp, data * batch.pp)),
        links(cluster, (one, batch.tp * batch.cp * batch.dp_shard), (batch.tp * data, batch.pp)),
        links(cluster, (one, np.where(batch.zero == 0, batch.ep * batch.etp, 1))),
    )
    return sum(collective_s(Kind.ALL_REDUCE, _SCALAR_BYTES, g) for g in groups)
