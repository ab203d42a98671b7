"""Seconds that the model state costs: parameters gathered, gradients reduced, the optimizer's step; a column a layout.

Every number of elements is a storage's own (`plan/shards.py`), every collective one that `account/comm.py` predicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.account.columns import per_key
from shardwise.account.static import unit_of
from shardwise.collective import Kind
from shardwise.model.spec import KINDS
from shardwise.plan.batch import Bools, Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.shards import ends_share_rank, make_storage
from shardwise.simulate.cost import Floats, Links, collective_s, links

_STEPPED = 7 + 2 + 1
"""Passes over this rank's part, in the wide dtype: AdamW reads master, gradient and both moments and writes three of
them; clipping reads and writes the gradient; its norm reads it."""

_SCALAR_BYTES = 8
"""Bytes of the step's scalar all-reduces: latency is all they cost."""


@dataclass(frozen=True, slots=True)
class StateSeconds:
    """[n, kind] seconds of one unit's state, in the order of KINDS.

    `gather` and `reduce` happen in every micro-batch (ZeRO-3 alone), `final` once, with the unit's last gradient;
    `step` is the optimizer's kernels, `publish` ZeRO-1's gather of the new parameters. `tie` and `scalars` [n] are
    once a step: the gradients of tied copies, and the all-reduces of token count, loss and clip norm.
    """

    gather: Floats
    reduce: Floats
    final: Floats
    step: Floats
    publish: Floats
    tie: Floats
    scalars: Floats


@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements of one rank's storages, [n, kind] each; see `Storage`. `tied` [n] is the part with copies elsewhere."""

    numel: Ints
    padded: Ints
    shard: Ints
    partial: Ints
    tied: Ints


def _elements(job: Job, batch: LayoutBatch) -> _Elements:
    model = job.model
    units = [unit_of(model, kind) for kind in KINDS]
    shared = _shared(job, batch)

    def sizes(tp: int, sp: int, shards: int, shared: int) -> Ints:
        held = [make_storage(model, unit, tp, bool(sp), shards, bool(shared)) for unit in units]
        rows = [(s.numel, s.padded_numel, s.shard_numel, s.partial_numel) for s in held]
        copies = [s.tied.shard_numel if s.tied else 0 for s in held]
        return np.array([*np.array(rows).T, copies], dtype=np.int64)

    columns = [batch.tp, batch.sp, batch.shards, shared.astype(np.int64)]
    found = per_key(columns, sizes)  # [n, field, kind]
    return _Elements(*(found[:, i] for i in range(4)), tied=found[:, 4].max(axis=1, initial=0))


def state_seconds(job: Job, batch: LayoutBatch) -> StateSeconds:
    """The columns of legal layouts."""
    n, precision, cluster = _elements(job, batch), job.precision, job.cluster
    narrow, wide = precision.compute_bytes, precision.accumulate_bytes
    rate = cluster.device.memory_bytes_per_s * cluster.device.efficiency.memory
    tp, shard, replicate = (batch.tp[:, None], batch.dp_shard[:, None], batch.dp_replicate[:, None])
    over_shard = links(cluster, (tp, shard))
    sharded, resharded = (batch.zero > 0)[:, None], (batch.zero == 3)[:, None]
    aliased = (batch.zero == 0)[:, None] & (narrow == wide)

    gathered = collective_s(Kind.ALL_GATHER, n.padded * narrow, over_shard)
    copied = n.numel * 2 * narrow / rate  # out of the gather, into tensors of their own
    scattered = collective_s(Kind.REDUCE_SCATTER, n.padded * wide, over_shard)
    replicas = collective_s(Kind.ALL_REDUCE, n.shard * wide, links(cluster, (tp * shard, replicate)))
    partial = collective_s(Kind.ALL_REDUCE, n.partial * wide, links(cluster, (np.ones_like(tp), tp)))
    zeroed = np.where(resharded, n.shard, n.padded) * wide
    narrowed = np.where(aliased, 0, n.shard * (narrow + wide))
    opened = (n.padded * wide + 3 * n.shard * wide) / rate  # a buffer of zeros, and its sum added to the shard
    every = StateSeconds(
        gather=np.where(resharded, gathered + copied, 0.0),
        reduce=np.where(resharded, scattered + opened, 0.0),
        final=np.where(sharded & ~resharded, scattered, 0.0) + replicas + np.where(n.partial > 0, partial, 0.0),
        step=(n.shard * wide * _STEPPED + zeroed + narrowed) / rate,
        publish=np.where(sharded & ~resharded, gathered + copied, 0.0),
        tie=_tie_s(job, batch, n.tied * wide),
        scalars=_scalars_s(job, batch),
    )
    return _with_shared(every, _shared(job, batch))


def _shared(job: Job, batch: LayoutBatch) -> Bools:
    """[n] whether one rank holds both users of a tied weight."""

    def together(pp: int, schedule: int) -> Bools:
        return np.asarray(job.model.tied and ends_share_rank(batch.names[schedule], pp), dtype=np.bool_)

    return per_key([batch.pp, batch.schedule], together)


def _with_shared(s: StateSeconds, shared: Bools) -> StateSeconds:
    """Where one rank holds both users of a tied weight, the head gathers and reduces the embedding's storage too."""
    embedding, head = KINDS.index("embedding"), KINDS.index("head")
    for each in (s.gather, s.reduce):
        each[:, head] += np.where(shared, each[:, embedding], 0.0)
    return s


def _tie_s(job: Job, batch: LayoutBatch, payload: Ints) -> Floats:
    """Both ends of the pipeline sum the gradient of a weight that they hold twice."""
    ends = links(job.cluster, (batch.tp * batch.dp * np.maximum(batch.pp - 1, 1), np.minimum(batch.pp, 2)))
    return np.where(payload > 0, collective_s(Kind.ALL_REDUCE, payload, ends), 0.0)


def _scalars_s(job: Job, batch: LayoutBatch) -> Floats:
    """Token count over DATA, loss over REPORT, clip norm over SHARDED (see `mesh`)."""
    one = np.ones_like(batch.tp)
    data: Links = links(job.cluster, (batch.tp, batch.dp))
    report = links(job.cluster, (batch.tp, batch.dp * batch.pp))
    norm = links(job.cluster, (one, batch.tp * batch.dp_shard), (batch.tp * batch.dp, batch.pp))
    return sum((collective_s(Kind.ALL_REDUCE, _SCALAR_BYTES, g) for g in (data, report, norm)), np.zeros(len(batch)))
