"""Exact peak memory of every layout: static state, the live set of the schedule, and what the running unit adds.

A schedule's live profile says in which states each pipeline rank runs its actions; a unit's memory says what an action
adds; both are integers, so the peak is exact. All of it is computed on columns of a `LayoutBatch`: one layout is a
batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise import schedule as schedules
from shardwise.account.columns import rows_of_each
from shardwise.account.static import SAME, Columns, columns_of
from shardwise.model.spec import EMBEDDING, HEAD, LAYER
from shardwise.plan.batch import Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, split_of
from shardwise.plan.shards import block_named
from shardwise.results import MemoryBreakdown
from shardwise.schedule import LiveState
from shardwise.schedule.table import Op


class Profile(NamedTuple):
    """A stage by what it holds; stages with equal profiles have equal memory."""

    embedding: bool
    layers: int
    head: bool

    def kind(self, position: int) -> str:
        if position < self.embedding:
            return EMBEDDING
        return LAYER if position < self.embedding + self.layers else HEAD

    @property
    def units(self) -> int:
        return self.embedding + self.layers + self.head


def profiles_of(split: tuple[int, ...]) -> tuple[Profile, ...]:
    """The profile of every stage."""
    last = len(split) - 1
    return tuple(Profile(i == 0, layers, i == last) for i, layers in enumerate(split))


def _positions(profile: Profile) -> Iterator[int]:
    """Units at which an action's memory can peak: it is linear in between, over equal layers."""
    first, layers = int(profile.embedding), profile.layers
    inner = {0, 1, layers - 2, layers - 1} if layers > 1 else set(range(layers))
    wanted = {first + i for i in inner if 0 <= i < layers}
    return iter(sorted(wanted | {0, profile.units - 1}))


_Held = tuple[Profile, ...]
_States = tuple[LiveState, ...]


@dataclass(frozen=True, slots=True)
class _Adds:
    """What an action adds at its peak, by part: [n] each."""

    activations: Ints
    gathered: Ints
    gradients: Ints

    @property
    def total(self) -> Ints:
        return self.activations + self.gathered + self.gradients


class _Actions:
    """Prices the actions of one group of layouts; equal questions are asked once."""

    def __init__(self, columns: Columns) -> None:
        self.c = columns
        self._known: dict[object, _Adds] = {}

    def adds(self, state: LiveState, profile: Profile, before: str | None, after: str | None) -> _Adds:
        """The peak inside the action. `before`, `after`: units that run just before and after it on this rank."""
        key = (state.op, profile, before, after)
        if key not in self._known:
            moments = [m for p in _positions(profile) for m in self._moments(state.op, profile, p, before, after)]
            self._known[key] = _largest(moments)
        return self._known[key]

    def reads(self, op: Op, kind: str) -> bool:
        """Whether an action reads the parameters of a unit of this kind; W never does."""
        return op is Op.F or (op is not Op.W and block_named(self.c.job.model, kind).backward_reads)

    def neighbours(self, state: LiveState, held: _Held) -> tuple[str | None, str | None]:
        """Kinds of the units just before and after the action on this rank; None where one reads no parameters."""
        profile = held[state.chunk]
        first, last = (0, profile.units - 1) if state.op is Op.F else (profile.units - 1, 0)
        # Where the unit reads no parameters it holds none that a neighbour could go on using.
        ours = [(state.chunk, p) if self.reads(state.op, profile.kind(p)) else (-1, -1) for p in (first, last)]
        return self._end(state.preceding, held, 1, ours[0]), self._end(state.following, held, 0, ours[1])

    def _end(self, action: tuple[Op, int] | None, held: _Held, end: int, ours: tuple[int, int]) -> str | None:
        """The kind of the first (0) or last (1) unit of a neighbouring action, SAME if it is `ours`."""
        if action is None:
            return None
        op, chunk = action
        top = held[chunk].units - 1
        position = top * (end == (op is Op.F))
        if not self.reads(op, held[chunk].kind(position)):
            return None
        return SAME if (chunk, position) == ours else held[chunk].kind(position)

    def _moments(self, op: Op, profile: Profile, p: int, before: str | None, after: str | None) -> Iterator[_Adds]:
        """Moments of unit `p`: its parameters become ready, it computes, its gradient is reduced."""
        c, kind = self.c, profile.kind(p)
        step = 1 if op is Op.F else -1
        reads = self.reads(op, kind)
        behind = profile.kind(p - step) if 0 <= p - step < profile.units else before
        ahead = profile.kind(p + step) if 0 <= p + step < profile.units else after
        if ahead in (EMBEDDING, LAYER, HEAD) and 0 <= p + step < profile.units and not self.reads(op, ahead):
            ahead = None
        rest = self._saved(profile, p) + (self._queued(profile, p) if op is Op.B else self._waiting(profile, p, op))
        unit = c.unit[kind]
        peak = {Op.F: unit.f_peak, Op.BW: unit.bw_peak, Op.B: unit.b_peak, Op.W: unit.w_peak}[op]
        coming = c.coming(ahead, kind if reads else None)
        zero = np.zeros_like(rest)
        if reads:
            held = unit.input if op is Op.F else unit.saved + unit.incoming
            yield _Adds(rest + held, c.becoming_ready(kind, behind), zero)
        opened = c.opened(kind) if op in (Op.W, Op.BW) else zero
        whole = c.whole(kind) if reads else zero
        yield _Adds(rest + peak, whole + coming, opened)
        if op in (Op.W, Op.BW):
            left = unit.input if op is Op.BW else zero
            yield _Adds(rest + left, whole + coming, opened + c.reduced(kind))

    def _saved(self, profile: Profile, p: int) -> Ints:
        """Kept by the stage's units below unit p."""
        c = self.c
        layers = min(max(p - profile.embedding, 0), profile.layers)
        return layers * c.unit[LAYER].saved + (p > 0 and profile.embedding) * c.unit[EMBEDDING].saved

    def _queued(self, profile: Profile, p: int) -> Ints:
        """Left for W by the units above unit p, through which B has come."""
        c = self.c
        above = min(profile.units - profile.head - 1 - p, profile.layers)
        above_head = profile.head and p < profile.units - 1
        return max(above, 0) * c.unit[LAYER].queued + above_head * c.unit[HEAD].queued

    def _waiting(self, profile: Profile, p: int, op: Op) -> Ints:
        """W drains from the top: the units below still hold their queues, and saved nothing else."""
        c = self.c
        if op is not Op.W:
            return np.zeros_like(c.unit[LAYER].saved)
        layers = min(max(p - profile.embedding, 0), profile.layers)
        below = layers * c.unit[LAYER].queued + (p > 0 and profile.embedding) * c.unit[EMBEDDING].queued
        return below - self._saved(profile, p)

    def stage(self, profile: Profile) -> tuple[Ints, Ints]:
        """(saved from F to B, queued from B to W) of a micro-batch of the whole stage."""
        c, units = self.c, profile.units
        saved = self._saved(profile, units - profile.head) + profile.head * c.unit[HEAD].saved
        queued = profile.layers * c.unit[LAYER].queued + profile.embedding * c.unit[EMBEDDING].queued
        return saved, queued + profile.head * c.unit[HEAD].queued


def _largest(moments: list[_Adds]) -> _Adds:
    """The largest moment of every layout."""
    which = np.argmax(np.stack([m.total for m in moments]), axis=0)
    pick = np.arange(len(which))
    return _Adds(
        np.stack([m.activations for m in moments])[which, pick],
        np.stack([m.gathered for m in moments])[which, pick],
        np.stack([m.gradients for m in moments])[which, pick],
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Layouts of one pipeline: `rows` of the batch, what they share, and what its ranks hold.

    `members` are indices into `rows` by capped micro-batch count: what one live profile serves.
    """

    rows: Ints
    pp: int
    name: str
    held: tuple[_Held, ...]
    members: dict[int, Ints]


def _groups(job: Job, batch: LayoutBatch) -> Iterator[_Group]:
    micro_batches = job.global_batch // (batch.dp * batch.mb)
    for rows in rows_of_each(batch.pp, batch.schedule, batch.split):
        first = batch.row(int(rows[0]))
        pp, name, profiles = first.pp, first.schedule, profiles_of(split_of(first, job.model.layers))
        counts = micro_batches[rows].tolist()
        capped = np.asarray([schedules.capped(name, pp, count) for count in counts], dtype=np.int64)
        members = {int(capped[which[0]]): which for which in rows_of_each(capped)}
        yield _Group(rows, pp, name, tuple(profiles[rank::pp] for rank in range(pp)), members)


class _RankPeaks(NamedTuple):
    """One pipeline rank at every state: totals [states, n], and what decomposes them."""

    totals: Ints
    adds: list[_Adds]
    waiting: Ints
    p2p: Ints


@lru_cache(maxsize=4096)
def _classes(name: str, pp: int, micro_batches: int, held: tuple[_Held, ...]) -> dict[_Held, _States]:
    """Ranks that hold equal stages, as one: the largest states of any of them."""
    ranks: dict[_Held, list[int]] = {}
    for rank, mine in enumerate(held):
        ranks.setdefault(mine, []).append(rank)
    states = schedules.profile(name, pp, micro_batches, tuple(map(tuple, ranks.values())))
    return dict(zip(ranks, states, strict=True))


def _priced(held: _Held, states: _States, actions: _Actions, members: Ints) -> _RankPeaks:
    """All live states of a rank that holds these stages, priced for some of the layouts."""
    stages = [actions.stage(p) for p in held]
    saved, queued = (np.stack([s[i][members] for s in stages]) for i in (0, 1))  # [chunks, n]
    in_flight = np.asarray([s.in_flight for s in states], dtype=np.int64)  # [states, chunks]
    waiting = in_flight @ saved + np.asarray([s.queued for s in states], dtype=np.int64) @ queued
    buffers = np.asarray([s.send_buffers + s.recv_buffers for s in states], dtype=np.int64)
    p2p = buffers[:, None] * actions.c.border[members]
    adds = [actions.adds(s, held[s.chunk], *actions.neighbours(s, held)) for s in states]
    totals = waiting + p2p + np.stack([a.total[members] for a in adds])
    return _RankPeaks(totals, adds, waiting, p2p)


def peak_bytes(job: Job, batch: LayoutBatch) -> Ints:
    """Total bytes, assumed parts included, of each layout's fullest pipeline rank: [n]. The layouts must be legal."""
    out = np.zeros(len(batch), dtype=np.int64)
    for group in _groups(job, batch):
        actions = _Actions(columns_of(job, batch.take(group.rows)))
        out[group.rows] = np.maximum.reduce([_peak(group, held, actions) for held in dict.fromkeys(group.held)])
    return out


def _peak(group: _Group, held: _Held, actions: _Actions) -> Ints:
    """Total bytes of the ranks that hold these stages."""
    columns = actions.c
    dynamic = columns.step_scratch(held)
    for micro_batches, members in group.members.items():
        states = _classes(group.name, group.pp, micro_batches, group.held)[held]
        running = _priced(held, states, actions, members).totals.max(axis=0)
        dynamic[members] = np.maximum(dynamic[members], running)
    proved = sum(columns.static(held).values()) + dynamic
    return proved + sum(columns.assumed(proved).values())


def memory_of(job: Job, layout: Layout) -> list[MemoryBreakdown]:
    """The peak of every pipeline rank of a legal layout, by part, with the action at which it occurs."""
    batch = LayoutBatch.of([layout])
    (group,) = _groups(job, batch)
    columns = columns_of(job, batch)
    actions = _Actions(columns)
    return [_breakdown(group, rank, columns, actions) for rank in range(group.pp)]


def _breakdown(group: _Group, rank: int, columns: Columns, actions: _Actions) -> MemoryBreakdown:
    held, (micro_batches,) = group.held[rank], group.members
    states = schedules.profile(group.name, group.pp, micro_batches)[rank]
    peaks = _priced(held, states, actions, np.zeros(1, dtype=np.int64))
    i = int(np.argmax(peaks.totals[:, 0]))
    step = int(columns.step_scratch(held)[0])
    parts = {name: int(value[0]) for name, value in columns.static(held).items()}
    if step > int(peaks.totals[i, 0]):
        action = "optimizer step"
        parts["gathered parameters"] = step
    else:
        action = f"{states[i].op} of stage {rank + states[i].chunk * group.pp}"
        add = peaks.adds[i]
        parts["activations"] = int(peaks.waiting[i, 0] + add.activations[0])
        parts["gathered parameters"] = int(add.gathered[0])
        parts["gradients"] += int(add.gradients[0])
        parts["pipeline buffers"] = int(peaks.p2p[i, 0])
    proved = np.asarray([sum(parts.values())])
    assumed = {name: int(value[0]) for name, value in columns.assumed(proved).items()}
    return MemoryBreakdown(rank, action, {k: v for k, v in parts.items() if v}, assumed)
