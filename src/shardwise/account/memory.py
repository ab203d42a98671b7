"""Exact peak memory of every layout: static state, the live set of the schedule, and what the running unit adds.

A schedule's live profile says in which states each pipeline rank runs its actions; a unit's memory says what an action
adds; both are integers, so the peak is exact. All of it is computed on columns that broadcast (`account/static.py`):
one layout is a grid of one.

A rank's peak is the largest of a few sums `activations + whole parameters + opened gradients`. The first depends on the
cut and on recomputation, the others on the cut and on ZeRO, and only ZeRO-2 and 3 have any: so the largest activations
of each kind of sum are found first, and the grid is filled last.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from shardwise import schedule as schedules
from shardwise.account.actions import Actions, Moment
from shardwise.account.columns import rows_of_each
from shardwise.account.static import Columns, Gathered, Held, Opened, columns_of
from shardwise.account.units import most
from shardwise.account.waiting import Profile, Waiting, running, waiting
from shardwise.model.spec import Count, Model
from shardwise.plan.batch import Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, split_of
from shardwise.plan.shards import make_stages, placement
from shardwise.results import ACTIVATIONS, BUFFERS, GATHERED, GRADIENTS, MemoryBreakdown
from shardwise.schedule import LiveState

_Sum = tuple[Gathered | None, Opened | None]
"""What lives beside the activations at a moment."""


class Pipeline(NamedTuple):
    """What a batch of layouts shares: the schedule, and the stages of each rank as the kinds of their units."""

    name: str
    pp: int
    held: tuple[Held, ...]


@lru_cache(maxsize=4096)
def pipeline_of(model: Model, pp: int, name: str, split: tuple[int, ...]) -> Pipeline:
    """`split` empty is the default split."""
    split = split or split_of(Layout(pp=pp, schedule=name), model.layers)
    stages = make_stages(model, pp, name, split)
    kinds = [[tuple(u.block.kind for u in s.units) for s in stages if s.rank == rank] for rank in range(pp)]
    return Pipeline(name, pp, tuple(map(tuple, kinds)))


def peak_bytes(job: Job, batch: LayoutBatch) -> Ints:
    """Total bytes, assumed parts included, of each layout's fullest pipeline rank: [n]. The layouts must be legal."""
    out = np.zeros(len(batch), dtype=np.int64)
    for rows in rows_of_each(batch.pp, batch.schedule, batch.split):
        grid = batch.take(rows).expanded(2)
        out[rows] = GridMemory(job, grid, columns_of(job, grid)).peaks(slice(None)).ravel()
    return out


class _Class(NamedTuple):
    """Ranks that hold equal stages: what always lives, what the optimizer's step takes, the largest activations."""

    static: Count
    step: Count
    activations: Ints
    sums: dict[_Sum, Ints]


class GridMemory:
    """`peak_bytes` of a grid [k, r, z] of one pipeline: k cuts with their micro-batch, r ways to recompute, z ways to
    cut the state. Where a combination is not legal the number means nothing. The grid is filled for some rows of k at
    a time: all that fills it is much smaller. Not `exact`, steps too short to fill their pipeline have upper bounds.
    """

    def __init__(self, job: Job, batch: LayoutBatch, columns: Columns, exact: bool = True) -> None:
        self.c, self.shape = columns, batch.shape
        self.cut = np.flatnonzero((batch.zero >= 2).any(axis=(0, 1)))
        pipeline = _pipeline(job, batch)
        actions = Actions(columns)
        sharing = tuple(_by_micro_batches(pipeline, columns.micro_batches, exact))
        self.classes: list[_Class] = []
        for held in dict.fromkeys(pipeline.held):
            sums = _sums(pipeline, held, actions, _Sharing(sharing, (batch.shape[0], batch.shape[1], 1)))
            static = sum(columns.static(held).values())
            self.classes.append(_Class(static, columns.step_scratch(held), most(sums.values()), sums))
        keys = {key for found in self.classes for key in found.sums} if len(self.cut) else set[_Sum]()
        self.beside = {key: self._beside(key) for key in keys}

    def _beside(self, key: _Sum) -> Ints:
        """[way, 1, cut] parameters and gradients of one kind of sum, where the state is cut by ZeRO-2 or 3."""
        c, ways = self.c, int(self.c.way.max(initial=0)) + 1
        found = (c.zero == 3) * c.gathered(key[0]) + (c.zero >= 2) * c.opened(key[1])
        return np.broadcast_to(found, (ways, 1, self.shape[2]))[:, :, self.cut]

    def peaks(self, rows: slice) -> Ints:
        """[k', r, z] of some rows."""
        k = len(range(self.shape[0])[rows])
        proved = np.zeros((k, *self.shape[1:]), dtype=np.int64)
        for of in self.classes:
            static = np.broadcast_to(of.static, (self.shape[0], 1, self.shape[2]))[rows]
            step = np.broadcast_to(of.step, (self.shape[0], 1, self.shape[2]))[rows]
            np.maximum(proved, static + np.maximum(of.activations[rows], step), out=proved)
            if len(self.cut):
                ways = self.c.way[rows]
                loaded = most(alive[rows] + self.beside[key][ways] for key, alive in of.sums.items())
                proved[:, :, self.cut] = np.maximum(proved[:, :, self.cut], static[:, :, self.cut] + loaded)
        return self._with_assumed(proved, rows)

    def _with_assumed(self, proved: Ints, rows: slice) -> Ints:
        groups = np.broadcast_to(self.c.groups, (self.shape[0], 1, self.shape[2]))[rows]
        return proved + sum(self.c.assumed(proved, groups).values())


def _pipeline(job: Job, batch: LayoutBatch) -> Pipeline:
    name, split = batch.names[int(batch.schedule.flat[0])], batch.splits[int(batch.split.flat[0])]
    return pipeline_of(job.model, int(batch.pp.flat[0]), name, split)


class _Served(NamedTuple):
    """Rows [k'] that one live profile serves, that of `profiled` micro-batches; `most` of them are there at most, a
    column [k', 1, 1] or one number."""

    profiled: int
    most: Count
    rows: slice | Ints


def _by_micro_batches(pipeline: Pipeline, micro_batches: Ints, exact: bool) -> Iterator[_Served]:
    """`exact`: every number of micro-batches has its own profile, up to where more of them add nothing. Otherwise the
    short steps take the long ones' profile, cut to as many micro-batches as they have: at least as much memory."""
    name, pp = pipeline.name, pipeline.pp
    counts = micro_batches[:, 0, 0]
    enough = schedules.saturation(name, pp)
    if not exact and enough is not None:
        yield _Served(enough, np.minimum(micro_batches, enough), slice(None))
        return
    distinct, inverse = np.unique(counts, return_inverse=True)
    capped = np.asarray([schedules.capped(name, pp, int(n)) for n in distinct], dtype=np.int64)
    for count in np.unique(capped).tolist():
        rows = np.flatnonzero((capped == count)[inverse])
        yield _Served(count, count, slice(None) if len(rows) == len(counts) else rows)


class _Sharing(NamedTuple):
    """Which profile serves which rows, and the shape [k, r, 1] of what is summed."""

    profiles: tuple[_Served, ...]
    shape: tuple[int, int, int]


def _sums(pipeline: Pipeline, held: Held, actions: Actions, sharing: _Sharing) -> dict[_Sum, Ints]:
    """The largest activations [k, r, 1] beside each kind of sum, of a rank that holds these stages."""
    c = actions.c
    stages = {profile: actions.stage(profile) for profile in dict.fromkeys(held)}
    sums: dict[_Sum, Ints] = {}
    for served in sharing.profiles:
        held_back = _HeldBack(held, stages, served, _rows(c.border, served.rows))
        states = waiting(c.job.model, pipeline.name, pipeline.pp, served.profiled, pipeline.held)[held]
        for act, alike in groupby(states, key=lambda state: state.running):
            largest = most(held_back.of(state) for state in alike)
            for moment in actions.moments(act):
                key = moment.gathered, moment.opened
                if key not in sums:
                    sums[key] = np.zeros(sharing.shape, dtype=np.int64)
                total = largest + _rows(moment.activations, served.rows)
                sums[key][served.rows] = np.maximum(sums[key][served.rows], total)
    return sums


class _HeldBack:
    """Bytes of the micro-batches that wait: saved from F to B, queued from B to W; equal products are made once."""

    def __init__(self, held: Held, stages: dict[Profile, tuple[Count, Count]], served: _Served, border: Ints) -> None:
        self.held, self.stages, self.served, self.border = held, stages, served, border
        self._known: dict[tuple[Profile, int, int], Count] = {}

    def of(self, state: Waiting) -> Count:
        total = state.buffers * self.border
        for i, counts in enumerate((state.in_flight, state.queued)):
            for profile, n in counts:
                total = total + self._product(profile, i, n)
        return total

    def _product(self, profile: Profile, i: int, n: int) -> Count:
        key = profile, i, n
        if key not in self._known:
            there = np.minimum(n, self.served.most * self.held.count(profile))
            self._known[key] = there * _rows(self.stages[profile][i], self.served.rows)
        return self._known[key]


def _rows(column: Count, rows: slice | Ints) -> Ints:
    """Some rows of a column [k, ..]; a plain number or [1, ..] is the same in all."""
    array = np.asarray(column, dtype=np.int64)
    return array.reshape((1, 1, 1)) if array.ndim < 3 else array if len(array) == 1 else array[rows]


def memory_of(job: Job, layout: Layout) -> list[MemoryBreakdown]:
    """The peak of every pipeline rank of a legal layout, by part, with the action at which it occurs."""
    batch = LayoutBatch.of([layout]).expanded(2)
    pipeline, columns = _pipeline(job, batch), columns_of(job, batch)
    actions = Actions(columns)
    return [_breakdown(pipeline, rank, columns, actions) for rank in range(pipeline.pp)]


class _Peak(NamedTuple):
    total: int
    waiting: int
    buffers: int
    moment: Moment
    state: LiveState


def _breakdown(pipeline: Pipeline, rank: int, columns: Columns, actions: Actions) -> MemoryBreakdown:
    held, micro_batches = pipeline.held[rank], int(columns.micro_batches.flat[0])
    states = schedules.profile(pipeline.name, pipeline.pp, micro_batches)[rank]
    peak = max(_peaks(held, states, actions), key=lambda p: p.total)
    step = _one(columns.step_scratch(held))
    parts = {name: _one(value) for name, value in columns.static(held).items()}
    if step > peak.total:
        action = "optimizer step"
        parts[GATHERED] = step
    else:
        action = f"{peak.state.op} of stage {_stage(pipeline, rank, peak.state.chunk)}"
        zero = int(columns.zero.flat[0])
        parts[ACTIVATIONS] = peak.waiting + _one(peak.moment.activations)
        parts[GATHERED] = _one(columns.gathered(peak.moment.gathered)) if zero == 3 else 0
        parts[GRADIENTS] += _one(columns.opened(peak.moment.opened)) if zero >= 2 else 0
        parts[BUFFERS] = peak.buffers
    proved = np.asarray([sum(parts.values())])
    assumed = {name: _one(value) for name, value in columns.assumed(proved, columns.groups).items()}
    return MemoryBreakdown(rank, action, {k: v for k, v in parts.items() if v}, assumed)


def _peaks(held: Held, states: tuple[LiveState, ...], actions: Actions) -> Iterator[_Peak]:
    c = actions.c
    zero = int(c.zero.flat[0])
    stages = [tuple(map(_one, actions.stage(profile))) for profile in held]
    for state in states:
        held_back = sum(n * saved for n, (saved, _) in zip(state.in_flight, stages, strict=True))
        held_back += sum(n * queued for n, (_, queued) in zip(state.queued, stages, strict=True))
        buffers = (state.send_buffers + state.recv_buffers) * _one(c.border)
        act = running(c.job.model, held, (state.op, state.chunk), state.preceding, state.following)
        for moment in actions.moments(act):
            beside = _one(c.gathered(moment.gathered)) * (zero == 3) + _one(c.opened(moment.opened)) * (zero >= 2)
            yield _Peak(held_back + buffers + _one(moment.activations) + beside, held_back, buffers, moment, state)


def _one(column: Count) -> int:
    """The number in a column of one layout."""
    return int(np.asarray(column).flat[0])


def _stage(pipeline: Pipeline, rank: int, chunk: int) -> int:
    """The stage that a rank holds as one of its chunks."""
    held = [s for copy in placement(pipeline.name, pipeline.pp) for s, r in enumerate(copy) if r == rank]
    return held[chunk]
