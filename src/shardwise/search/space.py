"""Which layouts are looked at: the front of a job, as columns. What is not legal is left to the rules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.plan.batch import Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import DEFAULT_SCHEDULE, RECOMPUTE

MAX_TP = 64
MAX_MB = 16

SCHEDULES = (DEFAULT_SCHEDULE, "gpipe", "interleaved:2", "interleaved:4", "interleaved:8", "zb-h1")
"""Schedules of a pipeline; the first is also the one of a single stage."""


def divisors(n: int) -> list[int]:
    """Of a number of at least 1, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def enumerate_layouts(job: Job) -> Iterator[LayoutBatch]:
    """Every layout of the front, a batch for each (tp, pp): tp to MAX_TP, sp, pp up to a stage a unit, ZeRO 0, 1 and 3
    over every cut of the data-parallel ranks, the schedules, micro-batches to MAX_MB sequences, recomputation.
    """
    world = job.cluster.world_size
    for tp in (d for d in divisors(world) if d <= MAX_TP):
        for pp in (d for d in divisors(world // tp) if d <= job.model.layers + 2):
            yield _batch(job, tp, pp)


def _batch(job: Job, tp: int, pp: int) -> LayoutBatch:
    dp = job.cluster.world_size // (tp * pp)
    data = [(dp, 1, 0)] + [(dp // shard, shard, zero) for zero in (1, 3) for shard in divisors(dp) if shard > 1]
    columns = _product(
        np.arange(2 if tp > 1 else 1),
        np.arange(len(data)),
        np.arange(len(SCHEDULES) if pp > 1 else 1),
        np.asarray(_micro_batches(job.global_batch, dp)),
        np.arange(len(RECOMPUTE)),
    )
    sp, which, schedule, mb, recompute = columns
    replicate, shard, zero = np.asarray(data, dtype=np.int64)[which].T
    fixed = np.ones_like(sp)
    return LayoutBatch(
        tp=fixed * tp,
        sp=sp,
        pp=fixed * pp,
        dp_replicate=replicate,
        dp_shard=shard,
        zero=zero,
        schedule=schedule,
        split=np.zeros_like(sp),
        mb=mb,
        recompute=recompute,
        names=SCHEDULES,
    )


def _micro_batches(global_batch: int, dp: int) -> list[int]:
    """Sequences of a micro-batch; a batch that dp does not divide is left for the rule that says so."""
    return [d for d in divisors(global_batch // dp) if d <= MAX_MB] if global_batch % dp == 0 else [1]


def _product(*values: Ints) -> list[Ints]:
    """Columns of all combinations."""
    return [np.ravel(x) for x in np.meshgrid(*values, indexing="ij")]
