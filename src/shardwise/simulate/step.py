"""Seconds of a step: the schedule timed with its stages' seconds, and what comes after the last backward.

Three readings of the same numbers: `grid_seconds`, the schedules' closed forms over many layouts; `step_time`, one
layout walked action by action, by cause; `timeline`, the walk itself, for drawing.

After its last backward a rank reduces what is left of its gradients and steps; the rank that takes longest at this
counts, for all of them meet at the clip norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise import schedule as schedules
from shardwise.account.columns import rows_of_each
from shardwise.account.compute import flops_per_token
from shardwise.account.static import message_bytes
from shardwise.account.units import most
from shardwise.model.spec import Count
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.shards import placement
from shardwise.results import StepTime
from shardwise.schedule import PeriodicSpan, Timeline
from shardwise.schedule.table import Op, Schedule
from shardwise.simulate.cost import Floats
from shardwise.simulate.network import pair_s
from shardwise.simulate.stage import (
    GATHER,
    REDUCE,
    STAGE_CAUSES,
    Chain,
    Prices,
    Share,
    computing_s,
    gathers_s,
    prices_of,
    reduces_s,
    rows_of,
    share_parts,
)

TRANSFER, BUBBLE, OPTIMIZER = "pipeline transfer", "bubble", "optimizer"

CAUSES = (*STAGE_CAUSES, TRANSFER, BUBBLE, OPTIMIZER)
"""Keys of `StepTime.parts_s`."""

_MAX_FREE = 4_000
"""Ranks times micro-batches of a walk that is worth a second one without messages, only to tell messages from the
bubble: a longer one asks the closed form."""

_Delay = tuple[tuple[int, int], float]


def step_seconds(job: Job, batch: LayoutBatch) -> Floats:
    """[n] seconds of a step of legal layouts, by the closed form of each one's schedule."""
    out = np.zeros(len(batch))
    for rows in rows_of_each(batch.pp, batch.schedule, batch.split):
        out[rows] = GridTime(prices_of(job, batch.take(rows).expanded(2))).seconds(slice(None)).ravel()
    return out


class GridTime:
    """`step_seconds` of a grid [k, r, z] of one pipeline, filled for some rows of k at a time
    (`account.memory.GridMemory`)."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.shape = prices, prices.batch.shape
        self.cut = np.flatnonzero((prices.batch.zero >= 2).any(axis=(0, 1)))
        ranks = prices.chain.ranks
        tail = most([sum(_tail(prices, share, place).values()) for place, share in enumerate(ranks)])
        m, name, pp = prices.micro_batches, prices.chain.name, prices.chain.pp
        self.tail = self._full(tail + schedules.transfers(name, pp, m) * prices.message_s)
        self.whole = _span([computing_s(prices, share) for share in ranks], prices, m)

    def _full(self, value: Count) -> Floats:
        """[k, 1, z]; what the stack hides of it may depend on recomputation: [k, r, z]."""
        return np.broadcast_to(value, np.broadcast_shapes(np.shape(value), (self.shape[0], 1, self.shape[2])))

    def seconds(self, rows: slice, below: float = np.inf) -> Floats:
        """[k', r, z] of some rows. Where a lower bound, what the busiest rank computes, is not `below`, it stands for
        the seconds: a search has no use for them."""
        tail = self.tail[rows]
        seconds = np.broadcast_to(self.whole, (*self.shape[:2], 1))[rows] + tail
        if len(self.cut):
            tail, zero = tail[:, :, self.cut], self.prices.batch.zero[:, :, self.cut]
            cut = self._cut_seconds(rows, below - tail.min(axis=2, keepdims=True)) + tail
            zero = zero if len(zero) == 1 else zero[rows]
            seconds[:, :, self.cut] = np.where(zero >= 2, cut, seconds[:, :, self.cut])
        return seconds

    def _cut_seconds(self, rows: slice, below: Floats) -> Floats:
        """[k', r, cut] without the tail, where the state is cut by ZeRO-2 or 3."""
        prices = rows_of(self.prices, rows, self.cut)
        ranks = [_with_state(prices, share) for share in prices.chain.ranks]
        m, passes = prices.micro_batches, prices.micro_batches / schedules.copies(prices.chain.name)
        shape = (len(below), self.shape[1], len(self.cut))
        seconds = np.array(np.broadcast_to(passes * most([f + b + w for f, b, w in ranks]), shape), dtype=np.float64)
        wanted = np.flatnonzero((seconds < below).any(axis=(1, 2)))
        if len(wanted):
            some = [tuple(_at(x, wanted, shape) for x in three) for three in ranks]
            seconds[wanted] = _span(some, prices, _at(m, wanted, (len(below), 1, 1)))
        return seconds


def _at(value: Count, rows: npt.NDArray[np.int64], shape: tuple[int, ...]) -> Count:
    """Some rows of a column that may be the same in all."""
    return value[rows] if np.ndim(value) == 3 and len(value) == shape[0] else value


def _with_state(prices: Prices, share: Share) -> tuple[Count, Count, Count]:
    """F, B and W of a rank, with what ZeRO-2 and 3 do in every micro-batch."""
    f, b, w = computing_s(prices, share)
    gather = gathers_s(prices, share)
    return f + gather[0], b + gather[1], w + reduces_s(prices, share)


def _span(ranks: Sequence[tuple[Count, ...]], prices: Prices, micro_batches: Count) -> Floats:
    """The closed form, over runs of equal ranks; transfers apart."""
    chain = prices.chain
    times: list[Floats] = []
    for i in range(3):
        each = np.broadcast_arrays(*(np.asarray(three[i], dtype=np.float64) for three in ranks))
        stacked = np.stack(each, axis=-1)
        times.append(stacked if stacked.ndim > 1 else stacked.reshape(1, 1, 1, -1))
    return schedules.rank_span(chain.name, chain.pp, micro_batches, *times, ranks=chain.runs)


def _tail(prices: Prices, share: Share, place: int) -> dict[str, Count]:
    """Seconds after the last backward of a rank, by cause. Of the last reductions the stack hides a part behind the
    last micro-batch's backward."""
    overlap = prices.job.stack.overlap
    units = prices.state.units
    reduce: Count = 0.0
    for kind, n in share.state:
        seconds = units[kind].final
        if overlap.final:
            _, b, w = prices.units[kind].total
            seconds = seconds - overlap.final * (seconds - most([0.0, seconds - b - w]))
        reduce = reduce + n * seconds
    reduce = reduce + prices.state.scalars
    if place in (0, len(prices.chain.ranks) - 1):
        reduce = reduce + prices.state.tie
    publish = sum(n * units[kind].publish for kind, n in share.state) * (1 - overlap.publish)
    return {REDUCE: reduce, OPTIMIZER: sum(n * units[kind].step for kind, n in share.state), GATHER: publish}


def _one(job: Job, layout: Layout) -> Prices:
    return prices_of(job, LayoutBatch.of([layout]).expanded(2))


def _number(value: Count) -> float:
    return float(np.asarray(value).flat[0])


def _stage_parts(prices: Prices) -> list[dict[str, list[float]]]:
    """Of every stage: cause -> seconds of F, B, W."""
    known: dict[Share, dict[str, list[float]]] = {}
    for share in prices.chain.stages:
        if share not in known:
            known[share] = {c: [_number(x) for x in three] for c, three in share_parts(prices, share).items()}
    return [known[share] for share in prices.chain.stages]


def step_time(job: Job, layout: Layout, prices: Prices | None = None) -> StepTime:
    """One legal layout, walked. The parts are those of the rank that is busy longest, and sum to the step. `prices`, of
    this layout alone, if they are known."""
    prices = prices or _one(job, layout)
    chain, m = prices.chain, int(prices.micro_batches.flat[0])
    stages = _stage_parts(prices)
    parts = _busiest(chain, stages, m)
    durations, delays = _durations(stages), _delays(job, layout)
    spans = _spans(chain.name, chain.pp, m, tuple(durations.items()), tuple(delays.items()))
    busy_s = sum(parts.values())
    # In this order by nature; a span that was continued by its period may be off by its tolerance.
    free_s = _at_least(busy_s, spans.free_s)
    parts[BUBBLE] = free_s - busy_s
    parts[TRANSFER] = _at_least(free_s, spans.walked.span_s) - free_s
    tails = [{c: _number(x) for c, x in _tail(prices, share, place).items()} for place, share in enumerate(chain.ranks)]
    for cause, seconds in max(tails, key=lambda tail: sum(tail.values())).items():
        parts[cause] = parts.get(cause, 0.0) + seconds
    return _result(job, {cause: parts[cause] for cause in CAUSES}, m, spans.walked.walked)


def _at_least(least_s: float, seconds: float) -> float:
    """The larger; what only rounding makes larger is none."""
    return seconds if seconds > least_s * (1 + 1e-9) else least_s


def _busiest(chain: Chain, stages: list[dict[str, list[float]]], m: int) -> dict[str, float]:
    """What the rank computes that is busy longest, by cause; each copy of the stages takes its share of the step."""
    copies = placement(chain.name, chain.pp)
    busy: list[dict[str, float]] = [dict(zip(STAGE_CAUSES, repeat(0.0), strict=False)) for _ in range(chain.pp)]
    for copy in copies:
        for stage, rank in enumerate(copy):
            for cause, three in stages[stage].items():
                busy[rank][cause] += m / len(copies) * sum(three)
    return max(busy, key=lambda parts: sum(parts.values()))


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
    if pp == 1:
        return _Spans(walked, walked.span_s)
    if walked.walked * pp <= _MAX_FREE:
        return _Spans(walked, schedules.walk_periodic(name, pp, m, dict(durations)).span_s)
    stages = range(pp * schedules.virtual_stages(name))
    f, b, w = (np.asarray([dict(durations)[op, s] for s in stages]) for op in (Op.F, Op.B, Op.W))
    return _Spans(walked, float(schedules.span(name, pp, m, f, b, w)))


def _result(job: Job, parts_s: dict[str, float], micro_batches: int, walked: int) -> StepTime:
    return StepTime(
        parts_s=parts_s,
        tokens=job.tokens,
        devices=job.cluster.world_size,
        model_flops=flops_per_token(job.model, job.seq_len) * job.tokens,
        peak_flops_per_s=job.cluster.device.peak_flops[job.precision.product_dtype],
        micro_batches=micro_batches,
        walked=walked,
    )


def timeline(job: Job, layout: Layout, micro_batches: int | None = None) -> tuple[Schedule, Timeline]:
    """Every action of a legal layout with its start and end; `micro_batches` shortens the step."""
    prices = _one(job, layout)
    m = micro_batches or int(prices.micro_batches.flat[0])
    schedule = schedules.build(layout.schedule, layout.pp, m)
    rows = schedules.rows(layout.schedule, layout.pp, schedule.micro_batches)
    return schedule, schedules.walk(rows, schedule, _durations(_stage_parts(prices)), _delays(job, layout))


def _durations(stages: list[dict[str, list[float]]]) -> dict[tuple[Op, int], float]:
    """(op, stage) -> seconds, for the walk."""
    found: dict[tuple[Op, int], float] = {}
    for s, parts in enumerate(stages):
        f, b, w = (sum(three[i] for three in parts.values()) for i in range(3))
        found |= {(Op.F, s): f, (Op.B, s): b, (Op.W, s): w, (Op.BW, s): b + w}
    return found


def _delays(job: Job, layout: Layout) -> dict[tuple[int, int], float]:
    """(from, to) pipeline rank -> seconds of a message, for all neighbours in the ring of stages."""
    size, pp = int(message_bytes(job, job.cut(layout))), layout.pp
    stride = int(LayoutBatch.of([layout]).pp_stride[0])
    ring = [(r, (r + 1) % pp) for r in range(pp)] if pp > 1 else []
    return {pair: pair_s(job.cluster, size, *pair, stride) for a, b in ring for pair in ((a, b), (b, a))}
