"""Seconds of a step: the schedule timed with its stages' seconds, and what comes after the last backward.

Three readings of the same numbers: `step_seconds`, the schedules' closed forms over many layouts; `step_time`, one
layout walked action by action, by cause; `timeline`, the walk itself, for drawing.

After its last backward a rank reduces what is left of its gradients, in full view, and steps; the rank that takes
longest at this counts, for all of them meet at the clip norm.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise import schedule as schedules
from shardwise.account.compute import flops_per_token
from shardwise.account.static import message_bytes
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.results import StepTime
from shardwise.schedule import PeriodicSpan, Timeline
from shardwise.schedule.table import Op, Schedule
from shardwise.simulate.cost import Floats, pair_s
from shardwise.simulate.stage import GATHER, REDUCE, STAGE_CAUSES, StageSeconds, groups, stage_seconds
from shardwise.simulate.state import StateSeconds

TRANSFER, BUBBLE, OPTIMIZER = "pipeline transfer", "bubble", "optimizer"

CAUSES = (*STAGE_CAUSES, TRANSFER, BUBBLE, OPTIMIZER)
"""Keys of `StepTime.parts_s`."""

_Delay = tuple[tuple[int, int], float]

_CHUNK = 4096
"""Rows evaluated at once: bounds the memory of the arrays by stage."""


def step_seconds(job: Job, batch: LayoutBatch) -> Floats:
    """[n] seconds of a step of legal layouts, by the closed form of each one's schedule."""
    out = np.zeros(len(batch))
    for group in groups(job, batch):
        for rows in np.array_split(group.rows, -(-len(group.rows) // _CHUNK)):
            found = stage_seconds(job, batch.take(rows), group.pipeline, by_cause=False)
            out[rows] = _closed_form(found) + _tail(found.state, group.pipeline.held).sum(axis=0).max(axis=1)
    return out


def _closed_form(found: StageSeconds) -> Floats:
    name, pp, m = found.pipeline.name, found.pipeline.pp, found.micro_batches
    f, b, w = (found.parts[0, :, op] for op in range(3))
    # Transfers enter every closed form as a number of them, which stages that take no time bring out.
    nothing = np.zeros_like(f)
    transfers = schedules.span(name, pp, m, nothing, nothing, nothing, 1.0)
    return schedules.span(name, pp, m, f, b, w) + transfers * found.p2p


def _tail(state: StateSeconds, held: Floats) -> Floats:
    """[cause, n, rank] seconds after the last backward; causes REDUCE, OPTIMIZER and GATHER."""
    reduce = state.final @ held.T + state.scalars[:, None]
    reduce[:, 0] += state.tie
    if held.shape[0] > 1:
        reduce[:, -1] += state.tie
    return np.stack([reduce, state.step @ held.T, state.publish @ held.T])


def _one(job: Job, layout: Layout) -> StageSeconds:
    batch = LayoutBatch.of([layout])
    (group,) = groups(job, batch)
    return stage_seconds(job, batch, group.pipeline, by_cause=True)


def step_time(job: Job, layout: Layout) -> StepTime:
    """One legal layout, walked. The parts are those of the rank that is busy longest, and sum to the step."""
    found = _one(job, layout)
    m, stages = int(found.micro_batches[0]), found.pipeline
    holds = np.asarray(stages.rank)[:, None] == np.arange(stages.pp)  # [stage, rank]
    by_rank = m * found.parts[:, 0].sum(axis=1) @ holds  # [cause, rank]
    busiest = int(by_rank.sum(axis=0).argmax())
    parts: dict[str, float] = dict(zip(STAGE_CAUSES, by_rank[:, busiest].tolist(), strict=True))
    durations, delays = _durations(found), _delays(job, layout)
    spans = _spans(stages.name, stages.pp, m, tuple(durations.items()), tuple(delays.items()))
    busy_s = sum(parts.values())
    # In this order by nature; a span that was continued by its period may be off by its tolerance.
    free_s = max(busy_s, spans.free_s)
    parts[BUBBLE] = free_s - busy_s
    parts[TRANSFER] = max(free_s, spans.walked.span_s) - free_s
    tail = _tail(found.state, stages.held)[:, 0]  # [cause, rank]
    slowest = int(tail.sum(axis=0).argmax())
    for cause, seconds in zip((REDUCE, OPTIMIZER, GATHER), tail[:, slowest].tolist(), strict=True):
        parts[cause] = parts.get(cause, 0.0) + seconds
    return _result(job, {cause: parts[cause] for cause in CAUSES}, m, spans.walked.walked)


class _Spans(NamedTuple):
    """A walk with its messages, and the seconds it takes if they take none."""

    walked: PeriodicSpan
    free_s: float


@lru_cache(maxsize=256)
def _spans(
    name: str, pp: int, m: int, durations: tuple[tuple[tuple[Op, int], float], ...], delays: tuple[_Delay, ...]
) -> _Spans:
    """Walks; layouts that differ only in what comes after the last backward share them."""
    walked = schedules.walk_periodic(name, pp, m, dict(durations), dict(delays))
    free_s = schedules.walk_periodic(name, pp, m, dict(durations)).span_s if pp > 1 else walked.span_s
    return _Spans(walked, free_s)


def _result(job: Job, parts_s: dict[str, float], micro_batches: int, walked: int) -> StepTime:
    return StepTime(
        parts_s=parts_s,
        tokens=job.tokens,
        devices=job.cluster.world_size,
        model_flops=flops_per_token(job.model, job.seq_len) * job.tokens,
        peak_flops_per_s=job.cluster.device.peak_flops[job.precision.compute],
        micro_batches=micro_batches,
        walked=walked,
    )


def timeline(job: Job, layout: Layout, micro_batches: int | None = None) -> tuple[Schedule, Timeline]:
    """Every action of a legal layout with its start and end; `micro_batches` shortens the step."""
    found = _one(job, layout)
    m = micro_batches or int(found.micro_batches[0])
    schedule = schedules.build(layout.schedule, layout.pp, m)
    rows = schedules.rows(layout.schedule, layout.pp, schedule.micro_batches)
    return schedule, schedules.walk(rows, schedule, _durations(found), _delays(job, layout))


def _durations(found: StageSeconds) -> dict[tuple[Op, int], float]:
    """(op, stage) -> seconds, for the walk."""
    f, b, w = found.parts[:, 0].sum(axis=0)
    columns = {Op.F: f, Op.B: b, Op.W: w, Op.BW: b + w}
    return {(op, s): float(x) for op, column in columns.items() for s, x in enumerate(column)}


def _delays(job: Job, layout: Layout) -> dict[tuple[int, int], float]:
    """(from, to) pipeline rank -> seconds of a message, for all neighbours in the ring of stages."""
    size, stride, pp = message_bytes(job, job.cut(layout)), layout.tp * layout.dp, layout.pp
    ring = [(r, (r + 1) % pp) for r in range(pp)] if pp > 1 else []
    return {pair: pair_s(job.cluster, size, *pair, stride) for a, b in ring for pair in ((a, b), (b, a))}
