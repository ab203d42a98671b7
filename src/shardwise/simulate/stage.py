"""Units composed into stages and ranks: seconds of every F, B and W of a pipeline, for many layouts at once.

What is exposed follows the executor. ZeRO-3 gathers one unit ahead, so a gather costs what the unit before it does not
hide; gradients that are cut are reduced at the end of each unit's backward, and cost what the stack does not overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from shardwise import schedule as schedules
from shardwise.account.memory import pipeline_of
from shardwise.account.static import message_bytes
from shardwise.account.units import most
from shardwise.model.spec import Count, Model
from shardwise.plan.batch import COLUMNS, Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.shards import ends_share_rank
from shardwise.schedule.table import Op
from shardwise.simulate.network import transfer_s
from shardwise.simulate.state import StateSeconds, UnitState, state_seconds
from shardwise.simulate.unit import UNIT_CAUSES, Three, Timing, UnitSeconds, unit_seconds

GATHER, REDUCE = "gather parameters", "reduce gradients"

STAGE_CAUSES = (*UNIT_CAUSES, GATHER, REDUCE)
"""Causes of the seconds of an action."""


@dataclass(frozen=True, slots=True)
class Share:
    """A stage, or a rank's stages together: `counts` units of each kind, of which `state` hold parameters of their
    own. `follows[before, after]`: how often in an F a unit of the second kind runs after one of the first, in B and W
    the other way round. The first unit of an action runs after the last unit of the action before it.
    """

    counts: tuple[tuple[str, int], ...]
    state: tuple[tuple[str, int], ...]
    follows: tuple[tuple[tuple[str, str], float], ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """A pipeline filled: its stages (of one copy), and its ranks in runs of equal neighbours."""

    name: str
    pp: int
    stages: tuple[Share, ...]
    rank_of: tuple[int, ...]
    ranks: tuple[Share, ...]
    runs: tuple[int, ...]
    """how many neighbouring ranks each of `ranks` stands for"""


@lru_cache(maxsize=1024)
def chain_of(model: Model, pp: int, name: str, split: tuple[int, ...]) -> Chain:
    """`split` empty is the default split."""
    held = pipeline_of(model, pp, name, split).held
    fresh = 1.0 - _turns(name)
    virtual = schedules.virtual_stages(name)
    placement = schedules.placement(name, pp)[0]
    kinds = [held[rank][_chunk(placement, stage)] for stage, rank in enumerate(placement)]
    shares = [_share(model, [held[rank]], fresh) for rank in range(pp)]
    grouped = [(share, len(list(run))) for share, run in groupby(shares)]
    stages = tuple(_share(model, [(units,)], fresh) for units in kinds)
    assert len(stages) == pp * virtual
    ranks, runs = zip(*grouped, strict=True)
    return Chain(name, pp, stages, placement, ranks, runs)


def _chunk(placement: tuple[int, ...], stage: int) -> int:
    """Which of its rank's chunks a stage is, ascending."""
    return sum(placement[s] == placement[stage] for s in range(stage))


def _share(model: Model, held: list[tuple[tuple[str, ...], ...]], fresh: float) -> Share:
    counts = Counter[str]()
    follows: dict[tuple[str, str], float] = {}
    for stages in held:
        for units in stages:
            counts.update(units)
            for pair in pairwise(units):
                follows[pair] = follows.get(pair, 0.0) + 1
            turn = units[-1], units[0]
            follows[turn] = follows.get(turn, 0.0) + fresh
    state = {kind: min(n, model.count(kind) * len(held[0])) for kind, n in counts.items()}
    ordered = sorted(follows.items(), key=lambda item: item[0])
    return Share(tuple(sorted(counts.items())), tuple(sorted(state.items())), tuple(ordered))


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
class Prices:
    """What a batch of one pipeline is priced with: units, model state, a message over the slowest border."""

    job: Job
    batch: LayoutBatch
    chain: Chain
    split: bool
    units: dict[str, UnitSeconds]
    state: StateSeconds
    message_s: Count
    micro_batches: Ints


@dataclass(slots=True)
class Shared:
    """What schedules of one pipeline have in common, priced once: units by whether W is split off and pairs overlap,
    state by whether ends share a rank and stages have twins."""

    units: dict[tuple[bool, bool], dict[str, UnitSeconds]] = field(default_factory=dict[Any, Any])
    state: dict[tuple[bool, bool], StateSeconds] = field(default_factory=dict[Any, Any])
    message_s: Count | None = None


def prices_of(job: Job, batch: LayoutBatch, shared: Shared | None = None) -> Prices:
    """Layouts that share pp, schedule and split, on axes that broadcast. `shared` is of the same batch but for its
    schedule."""
    name, pp = batch.names[int(batch.schedule.flat[0])], int(batch.pp.flat[0])
    chain = chain_of(job.model, pp, name, batch.splits[int(batch.split.flat[0])])
    known = shared or Shared()
    split, pairs = schedules.splits_weight_gradient(name), schedules.overlaps(name)
    ends = ends_share_rank(name, pp), schedules.copies(name) > 1
    if (split, pairs) not in known.units:
        known.units[split, pairs] = unit_seconds(Timing(job, batch, split, pairs))
    if ends not in known.state:
        known.state[ends] = state_seconds(job, batch)
    if known.message_s is None:
        known.message_s = transfer_s(job.cluster, message_bytes(job, job.cuts(batch)), batch.pp_stride, batch.pp)
    dp = job.cluster.world_size // (batch.tp * batch.cp * batch.pp)
    micro_batches = job.global_batch // np.maximum(1, dp * batch.mb)
    units, state = known.units[split, pairs], known.state[ends]
    return Prices(job, batch, chain, split, units, state, known.message_s, micro_batches)


def rows_of(prices: Prices, rows: slice, ways: Ints) -> Prices:
    """Some rows of k, and some of the z ways to cut the state."""
    k, z = prices.batch.shape[0], prices.batch.shape[2]

    def some(value: Count) -> Count:
        if np.ndim(value) != 3:
            return value
        value = value[rows] if len(value) == k > 1 else value
        return value[:, :, ways] if np.shape(value)[2] == z > 1 else value

    def each(of: object) -> dict[str, Any]:
        return {f.name: getattr(of, f.name) for f in fields(of)}  # type: ignore[arg-type]

    state = prices.state
    return replace(
        prices,
        batch=replace(prices.batch, **{name: some(getattr(prices.batch, name)) for name in COLUMNS}),
        units={
            kind: UnitSeconds({c: _mapped(t, some) for c, t in u.parts.items()}) for kind, u in prices.units.items()
        },
        state=StateSeconds(
            {kind: UnitState(**{n: some(v) for n, v in each(u).items()}) for kind, u in state.units.items()},
            some(state.tie),
            some(state.scalars),
        ),
        message_s=some(prices.message_s),
        micro_batches=some(prices.micro_batches),
    )


def _mapped(three: Three, some: Callable[[Count], Count]) -> Three:
    return some(three[0]), some(three[1]), some(three[2])


def share_parts(prices: Prices, share: Share) -> dict[str, Three]:
    """Seconds of F, B and W of one micro-batch on a stage, or on all stages of a rank, by cause."""
    parts: dict[str, Three] = {}
    for cause in UNIT_CAUSES:
        each = [(n, prices.units[kind].parts[cause]) for kind, n in share.counts]
        parts[cause] = tuple(sum(n * three[i] for n, three in each) for i in range(3))  # type: ignore[assignment]
    parts[GATHER], parts[REDUCE] = gathers_s(prices, share), (0.0, 0.0, reduces_s(prices, share))
    return parts


def computing_s(prices: Prices, share: Share) -> Three:
    """The same without what ZeRO-2 and 3 add, summed over causes: it depends on no way of cutting the state."""
    totals = [(n, prices.units[kind].total) for kind, n in share.counts]
    f, b, w = (sum(n * three[i] for n, three in totals) for i in range(3))
    return f, b, w


def gathers_s(prices: Prices, share: Share) -> Three:
    """What stays of the gathers behind the units that run before: a gather in the backward hides under the unit before
    it, its B, and its W where that is the same action."""
    forward: Count = 0.0
    backward: Count = 0.0
    for (before, after), times in share.follows:
        held = before == after and prices.job.model.count(before) == 1  # two runs of one looped layer
        if times and not held:
            f = prices.units[before].total[0]
            forward = forward + times * most([0.0, prices.state.units[after].gather - f])
            if prices.job.model.block(before).backward_reads:
                hides = prices.units[after].total
                behind = hides[1] if prices.split else hides[1] + hides[2]
                backward = backward + times * most([0.0, prices.state.units[before].gather - behind])
    return forward, backward, 0.0


def reduces_s(prices: Prices, share: Share) -> Count:
    """What the backward of the same units does not hide of the reductions of each micro-batch."""
    overlap = prices.job.stack.overlap.reduce
    total: Count = 0.0
    for kind, n in share.counts:
        seconds = prices.state.units[kind].reduce
        if overlap:
            _, b, w = prices.units[kind].total
            seconds = seconds - overlap * (seconds - most([0.0, seconds - b - w]))
        total = total + n * seconds
    return total
