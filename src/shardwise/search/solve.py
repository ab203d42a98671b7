"""The fastest layouts that fit: rules, exact peaks, closed forms over all of them, and a walk of the best.

Every legal layout has its peak (an upper bound where its step is too short to fill the pipeline) and its closed form;
they are evaluated pipeline by pipeline and schedule by schedule, on grids whose axes stay apart as long as they can. A
closed form may promise too much (uneven chunks, messages that wait in a queue): the walk corrects that. It promises at
most SLACK too little (a test holds them to it), so walking stops where the closed forms are further behind than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from shardwise.account.memory import GridMemory, peak_bytes
from shardwise.account.static import Columns, columns_of
from shardwise.plan.batch import Bools, Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rules import legal
from shardwise.plan.shards import ends_share_rank
from shardwise.results import StepTime
from shardwise.search.heap import no_collection
from shardwise.search.limits import Limits
from shardwise.search.space import Space
from shardwise.simulate.cost import Floats
from shardwise.simulate.stage import Prices, Shared, prices_of, rows_of
from shardwise.simulate.step import GridTime, step_time

Progress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, out of how much)."""

SLACK = 0.08
"""How much longer than the walk a closed form may take a step to be."""

MAX_WALKS = 40
"""Families to walk at the most: members of one share their walk."""

MAX_LOOKED_AT = 400
"""Layouts whose closed form is followed up at the most, twins included."""

MAX_WALKED = ((8, 40_000), (3, 60_000))
"""(families, stages times micro-batches): walking ends once so many of both are walked; no clock, so that every machine
agrees."""

CHUNK = 1 << 18
"""Layouts of a grid that are filled in at a time: what bounds the memory of a search."""


ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout with its walked step and its fullest rank's peak, assumed parts included."""

    layout: Layout
    step: StepTime
    peak_bytes: int
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Layouts looked at, `best` first. `closest` is the one least over the capacity where nothing fits."""

    enumerated: int
    legal: int
    fitting: int
    best: tuple[Candidate, ...]
    closest: Candidate | None
    walked: int
    seconds: float


def evaluate(job: Job, layout: Layout) -> Candidate:
    """One legal layout."""
    peak = int(peak_bytes(job, LayoutBatch.of([layout]))[0])
    return Candidate(layout, step_time(job, layout), peak, job.cluster.device.usable_bytes)


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


@dataclass(slots=True)
class Front:
    """The fastest layouts so far by their closed forms, the one that is closest to fitting, and the counts."""

    capacity_bytes: int
    enumerated: int = 0
    legal: int = 0
    fitting: int = 0
    seconds: Floats = field(default_factory=lambda: np.zeros(0))
    peaks: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    places: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """of each: the place of its pipeline in the survey, by which equally fast ones are ordered"""
    found: list[tuple[LayoutBatch, int]] = field(default_factory=list[tuple[LayoutBatch, int]])
    closest: tuple[int, LayoutBatch, int] | None = None

    def layouts(self) -> Iterator[Layout]:
        """The fastest first."""
        return (batch.row(i) for batch, i in self.found)

    @property
    def worst(self) -> float:
        """Slower layouts are of no interest."""
        return float(self.seconds[-1]) if len(self.seconds) >= MAX_LOOKED_AT else np.inf

    def take(self, batch: LayoutBatch, real: Bools, peaks: Ints, seconds: Floats, place: int) -> None:
        """A filled grid; `real` says which of it are layouts at all."""
        fits = real & (peaks <= self.capacity_bytes)
        self.legal += int(np.count_nonzero(real))
        self.fitting += int(np.count_nonzero(fits))
        if not self.fitting and real.any():
            self._come_closer(batch, real, peaks)
        better = np.flatnonzero(fits & (seconds < self.worst))
        if not len(better):
            return
        of = seconds.ravel()[better]
        if len(better) > MAX_LOOKED_AT:
            better = better[np.argpartition(of, MAX_LOOKED_AT)[:MAX_LOOKED_AT]]
        entries = [(batch, i) for i in better.tolist()]
        self._keep(seconds.ravel()[better], peaks.ravel()[better], np.full(len(better), place), entries)

    def _keep(self, seconds: Floats, peaks: Ints, places: Ints, found: list[tuple[LayoutBatch, int]]) -> None:
        """Beside what is there, as far as they are among the fastest."""
        merged, ranks = np.concatenate([self.seconds, seconds]), np.concatenate([self.places, places])
        order = np.lexsort((ranks, merged))[:MAX_LOOKED_AT]
        every = self.found + found
        self.found = [every[i] for i in order.tolist()]
        self.seconds, self.places = merged[order], ranks[order]
        self.peaks = np.concatenate([self.peaks, peaks])[order]

    def join(self, other: Front) -> None:
        """What a survey of other pipelines has found."""
        self.enumerated += other.enumerated
        self.legal += other.legal
        self.fitting += other.fitting
        self._keep(other.seconds, other.peaks, other.places, other.found)
        if other.closest is not None and (self.closest is None or other.closest[0] < self.closest[0]):
            self.closest = other.closest

    def small(self) -> Front:
        """The same without the grids in which it was found."""

        def alone(batch: LayoutBatch, i: int) -> LayoutBatch:
            return LayoutBatch.of([batch.row(i)])

        closest = None if self.closest is None else (self.closest[0], alone(*self.closest[1:]), 0)
        batch = LayoutBatch.of(list(self.layouts())) if self.found else None
        found = [] if batch is None else [(batch, i) for i in range(len(self.found))]
        return replace(self, found=found, closest=closest)

    def _come_closer(self, batch: LayoutBatch, real: Bools, peaks: Ints) -> None:
        i = int(np.where(real, peaks, np.iinfo(np.int64).max).argmin())
        peak = int(peaks.ravel()[i])
        if self.closest is None or peak < self.closest[0]:
            self.closest = peak, batch, i


@no_collection()
def solve(
    job: Job,
    progress: Progress | None = None,
    keep: int = 10,
    limits: Limits | None = None,
    surveyed: Survey | None = None,
) -> SearchResult:
    """The fastest layouts that fit, by their walked steps: `keep` families, with the twins that came between.

    `surveyed` surveys in place of this module's function, with the same result.
    """
    started = time.perf_counter()
    tell = progress or _silent
    front = (surveyed or survey)(job, limits or Limits(), tell)
    best: list[Candidate] = []
    closest, walked = None, 0
    if front.found:
        best, walked = _walk_best(job, front, keep, tell)
    elif front.closest is not None:
        closest, walked = evaluate(job, front.closest[1].row(front.closest[2])), 1
    seconds = time.perf_counter() - started
    return SearchResult(front.enumerated, front.legal, front.fitting, tuple(best), closest, walked, seconds)


Survey = Callable[[Job, Limits, Progress], Front]


def survey(job: Job, limits: Limits, tell: Progress = _silent, share: slice = ALL) -> Front:
    """Every layout within the limits, by its exact peak and its closed form; the longest pipelines first. `share`: of
    these pipelines alone."""
    space = Space(job, limits)
    front = Front(job.cluster.device.usable_bytes)
    pipelines = list(enumerate(reversed(space.pipelines)))[share]
    for place, pp in pipelines:
        looked, cuts = space.legal_cuts(pp)
        schedules = space.schedules(pp)
        if cuts is None or not len(cuts):
            front.enumerated += looked * len(schedules) * len(space.recomputes)
            continue
        grid, real = space.grid(cuts)
        real = real & legal(replace(grid, recompute=grid.recompute[:, :1]), job, space.rules)
        ways = int(np.count_nonzero(real)) / len(cuts)
        front.enumerated += int(looked * ways * len(space.recomputes)) * len(schedules)
        known = _Known({}, Shared())
        for i in schedules:
            filled = replace(grid, schedule=np.full_like(grid.schedule, i))
            alive = real & legal(replace(filled, recompute=filled.recompute[:, :1]), job, space.rules)
            rows = np.flatnonzero(alive.any(axis=(1, 2)))
            if len(rows):
                _fill(job, filled, np.broadcast_to(alive, filled.shape), front, known, place)
            tell("layouts", place, len(space.pipelines))
    return front


class _Known(NamedTuple):
    """What the schedules of one pipeline have in common."""

    columns: dict[bool, Columns]
    prices: Shared


def _fill(job: Job, grid: LayoutBatch, real: Bools, front: Front, known: _Known, place: int) -> None:
    """One pipeline and schedule."""
    shared = ends_share_rank(grid.names[int(grid.schedule.flat[0])], int(grid.pp.flat[0]))
    if shared not in known.columns:
        known.columns[shared] = columns_of(job, grid)
    memory = GridMemory(job, grid, known.columns[shared], exact=False)
    times = GridTime(prices_of(job, grid, known.prices))
    for rows in _chunks(grid.shape):
        front.take(grid.rows(rows), real[rows], memory.peaks(rows), times.seconds(rows, front.worst), place)


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, CHUNK // (shape[1] * shape[2]))
    return (slice(start, start + step) for start in range(0, shape[0], step))


def _walk_best(job: Job, front: Front, keep: int, progress: Progress) -> tuple[list[Candidate], int]:
    """Walk in the order of the closed forms, until those left cannot be among the best any more."""
    ranking = _Ranking(keep)
    walked = 0
    layouts = list(front.layouts())
    prices = _prices(job, layouts)
    for i, (layout, estimated) in enumerate(zip(layouts, front.seconds.tolist(), strict=True)):
        known = len(ranking.families)
        if known >= keep and estimated * (1 - SLACK) >= ranking.worst:
            break
        # A single stage has nothing to walk: there the closed form is the walk.
        hopeless = layout.pp == 1 and known >= keep and estimated > ranking.worst * (1 + 1e-9)
        enough = known >= MAX_WALKS or any(known >= least and walked > most for least, most in MAX_WALKED)
        if hopeless or (enough and family(layout) not in ranking.families):
            continue
        step = step_time(job, layout, prices(i))
        walked += layout.stages * step.walked * (family(layout) not in ranking.families)
        ranking.take(Candidate(layout, step, int(front.peaks[i]), front.capacity_bytes))
        progress("schedules", len(ranking.families), MAX_WALKS)
    return ranking.best(), len(ranking.found)


def _prices(job: Job, layouts: Sequence[Layout]) -> Callable[[int], Prices]:
    """The prices of each of these layouts; those of one pipeline are priced together, when the first is asked for."""
    together: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
    for i, layout in enumerate(layouts):
        together.setdefault((layout.pp, layout.schedule, layout.split), []).append(i)
    known: dict[tuple[int, str, tuple[int, ...]], Prices] = {}

    def of(i: int) -> Prices:
        key = layouts[i].pp, layouts[i].schedule, layouts[i].split
        members = together[key]
        if key not in known:
            known[key] = prices_of(job, LayoutBatch.of([layouts[j] for j in members]).expanded(2))
        place = members.index(i)
        return rows_of(known[key], slice(place, place + 1), np.zeros(1, dtype=np.int64))

    return of


@dataclass(slots=True)
class _Ranking:
    """Walked candidates, the fastest first; `worst` is the step of the last that `best` returns."""

    keep: int
    found: list[tuple[float, Layout, Candidate]] = field(default_factory=list[tuple[float, Layout, Candidate]])
    families: set[Layout] = field(default_factory=set[Layout])
    worst: float = np.inf

    def take(self, candidate: Candidate) -> None:
        kin = family(candidate.layout)
        self.families.add(kin)
        self.found.append((candidate.step.total_s, kin, candidate))
        self.found.sort(key=lambda entry: entry[0])
        self.worst = self.found[len(self.best()) - 1][0]

    def best(self) -> list[Candidate]:
        """The head of the ranking that holds its first `keep` families, twins among them included."""
        seen: set[Layout] = set()
        for i, (_, kin, _) in enumerate(self.found):
            seen.add(kin)
            if len(seen) > self.keep:
                return [candidate for *_, candidate in self.found[:i]]
        return [candidate for *_, candidate in self.found]


def family(layout: Layout) -> Layout:
    """What layouts share that differ in how their data-parallel ranks part into dp_replicate x dp_shard alone."""
    replicate, shard = (1, layout.dp) if layout.zero else (layout.dp, 1)
    return replace(layout, dp_replicate=replicate, dp_shard=shard)
