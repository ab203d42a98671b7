"""Units composed into stages: seconds of every F, B and W of a pipeline, by cause, for many layouts at once.

What is exposed follows the executor. ZeRO-3 gathers one unit ahead, so a gather costs what the unit before it does not
hide; its gradients are reduced at the end of each unit's backward, in line, hence in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from shardwise import schedule as schedules
from shardwise.account.columns import per_key, rows_of_each
from shardwise.account.static import cut_of, message_bytes
from shardwise.model.spec import KINDS, Model
from shardwise.plan.batch import Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.shards import stages_of
from shardwise.schedule.table import Op
from shardwise.simulate.cost import Floats, transfer_s
from shardwise.simulate.state import StateSeconds, state_seconds
from shardwise.simulate.unit import UNIT_CAUSES, unit_seconds

GATHER, REDUCE = "gather parameters", "reduce gradients"

STAGE_CAUSES = (*UNIT_CAUSES, GATHER, REDUCE)
"""Causes of the seconds of an action, in the order of the arrays."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a schedule's stages are filled: `counts` [stage, kind] units, `held` [pp, kind] units of a rank.

    `follows` [stage, kind, kind]: how often in an F a unit of the second kind runs after one of the first; in B and W
    the other way round. The first unit of an action runs after the last unit of the action before it; `turns` is the
    share of actions for which that is the same unit, whose parameters are still there.
    """

    name: str
    pp: int
    rank: tuple[int, ...]
    counts: Floats
    follows: Floats
    held: Floats


@lru_cache(maxsize=1024)
def pipeline(model: Model, pp: int, name: str, split: tuple[int, ...]) -> Pipeline:
    """The stages of a schedule; `split` empty is the default split."""
    stages = stages_of(model, Layout(pp=pp, schedule=name, split=split))
    counts = np.zeros((len(stages), len(KINDS)))
    follows = np.zeros((len(stages), len(KINDS), len(KINDS)))
    held = np.zeros((pp, len(KINDS)))
    fresh = 1.0 - _turns(name)
    for s in stages:
        chain = [KINDS.index(u.block.kind) for u in s.units]
        for kind in chain:
            counts[s.index, kind] += 1
            held[s.rank, kind] += 1
        for before, after in pairwise(chain):
            follows[s.index, before, after] += 1
        follows[s.index, chain[-1], chain[0]] += fresh
    return Pipeline(name, pp, tuple(s.rank for s in stages), counts, follows, held)


@lru_cache(maxsize=64)
def _turns(name: str) -> float:
    """Share of a steady rank's F and B that begin with the unit with which the action before them ended."""
    schedule = schedules.build(name, 4, 16)
    row = schedule.rows[1]
    middle = list(pairwise(row[len(row) // 4 : -len(row) // 4]))
    reads = [(a, b) for a, b in middle if b.op is not Op.W]
    turned = [a.op is not Op.W and a.stage == b.stage and (a.op is Op.F) != (b.op is Op.F) for a, b in reads]
    return sum(turned) / len(turned)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """`parts` [cause, n, op, stage] seconds of one action, causes as in STAGE_CAUSES (or one, their sum)."""

    pipeline: Pipeline
    micro_batches: Ints
    parts: Floats
    state: StateSeconds
    p2p: Floats
    """[n]: one message over the slowest border"""


@dataclass(frozen=True, slots=True)
class Group:
    """Layouts of one pipeline: indices into the batch, and what they share."""

    rows: Ints
    pipeline: Pipeline


def groups(job: Job, batch: LayoutBatch) -> Iterator[Group]:
    """The rows of each distinct (pp, schedule, split)."""
    for rows in rows_of_each(batch.pp, batch.schedule, batch.split):
        i = int(rows[0])
        name, split = batch.names[int(batch.schedule[i])], batch.splits[int(batch.split[i])]
        yield Group(rows, pipeline(job.model, int(batch.pp[i]), name, split))


def stage_seconds(job: Job, batch: LayoutBatch, stages: Pipeline, by_cause: bool) -> StageSeconds:
    """Legal layouts of one pipeline. Without `by_cause` the parts are summed, which is faster."""
    units = _unit_columns(job, batch, stages)  # [n, cause, op, kind]
    state = state_seconds(job, batch)
    whole = units.sum(axis=1)  # [n, op, kind]
    gathers = np.zeros((len(batch), 3, len(stages.counts)))
    if (batch.zero == 3).any():
        split = schedules.splits_weight_gradient(stages.name)
        # A gather in the backward hides under the unit before it: its B, and its W where that is the same action.
        hides = (whole[:, 0], whole[:, 1] if split else whole[:, 1] + whole[:, 2])
        gathers[:, 0] = _exposed(state.gather, hides[0], stages.follows)
        read_again = state.gather * [b.backward_reads for b in job.model.blocks]
        gathers[:, 1] = _exposed(read_again, hides[1], stages.follows.swapaxes(1, 2))
    reduces = np.zeros_like(gathers)
    reduces[:, 2] = state.reduce @ stages.counts.T
    if by_cause:
        computed = [units[:, c] @ stages.counts.T for c in range(len(UNIT_CAUSES))]
        parts = np.stack([*computed, gathers, reduces])
    else:
        parts = (whole @ stages.counts.T + gathers + reduces)[None]
    return StageSeconds(stages, job.global_batch // (batch.dp * batch.mb), parts, state, _p2p_s(job, batch))


def _unit_columns(job: Job, batch: LayoutBatch, stages: Pipeline) -> Floats:
    """[n, cause, op, kind] seconds of every kind of unit."""
    split = schedules.splits_weight_gradient(stages.name)

    def seconds(tp: int, sp: int, mb: int, recompute: int) -> Floats:
        return unit_seconds(job, cut_of(job, tp, sp, mb), bool(recompute), split)

    return per_key([batch.tp, batch.sp, batch.mb, batch.recompute], seconds)


def _exposed(gather: Floats, hides: Floats, follows: Floats) -> Floats:
    """[n, stage] what stays of the gathers [n, kind] behind the units [n, kind] that run before."""
    left = np.maximum(0.0, gather[:, None, :] - hides[:, :, None])  # [n, before, after]
    return left.reshape(len(left), -1) @ follows.reshape(len(follows), -1).T


def _p2p_s(job: Job, batch: LayoutBatch) -> Floats:
    def size(tp: int, sp: int, mb: int) -> Ints:
        return np.asarray(message_bytes(job, cut_of(job, tp, sp, mb)), dtype=np.int64)

    sizes = per_key([batch.tp, batch.sp, batch.mb], size)
    return transfer_s(job.cluster, sizes, batch.tp * batch.dp, batch.pp)
