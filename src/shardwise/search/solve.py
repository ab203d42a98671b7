"""The fastest layouts that fit: rules, exact peaks, closed forms over all of them, and a walk of the best.

Every legal layout has its exact peak, every one that fits its closed form. A closed form may promise too much (uneven
chunks, messages that wait in a queue): the walk corrects that. It promises at most SLACK too little (a test holds them
to it), so walking stops where the closed forms are further behind than that.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import numpy as np

from shardwise.account.memory import peak_bytes
from shardwise.plan.batch import Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rules import legal
from shardwise.results import StepTime
from shardwise.search.space import enumerate_layouts
from shardwise.simulate.cost import Floats
from shardwise.simulate.step import step_seconds, step_time

Progress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, out of how much)."""

SLACK = 0.05
"""How much longer than the walk a closed form may take a step to be."""

MAX_WALKS = 40
"""Families to walk at the most: members of one share their walk."""

MAX_LOOKED_AT = 400
"""Layouts whose closed form is followed up at the most, twins included."""

MAX_WALKED = 20_000
"""Stages times micro-batches to walk in all, once LEAST families are walked; no clock, so that every machine agrees."""

LEAST = 3


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


@contextmanager
def _no_collection() -> Generator[None]:
    """Tables of hundreds of thousands of small tuples, none of them cyclic: looking for cycles costs a third."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def solve(job: Job, progress: Progress | None = None, keep: int = 10) -> SearchResult:
    """The fastest layouts that fit, by their walked steps: `keep` families, with the twins that came between."""
    started = time.perf_counter()
    tell = progress or _silent
    enumerated, batch = legal_layouts(job)
    if not len(batch):
        return SearchResult(enumerated, 0, 0, (), None, 0, time.perf_counter() - started)
    peaks = _peaks(job, batch, tell)
    capacity = job.cluster.device.usable_bytes
    fits = np.flatnonzero(peaks <= capacity)
    closest = None
    best: list[Candidate] = []
    walked = 0
    if len(fits):
        best, walked = _walk_best(job, batch.take(fits), peaks[fits], keep, tell)
    else:
        closest = evaluate(job, batch.row(int(peaks.argmin())))
        walked = 1
    seconds = time.perf_counter() - started
    return SearchResult(enumerated, len(batch), len(fits), tuple(best), closest, walked, seconds)


def legal_layouts(job: Job) -> tuple[int, LayoutBatch]:
    """(number of layouts of the front, those of them that break no rule)."""
    enumerated, kept = 0, list[LayoutBatch]()
    for batch in enumerate_layouts(job):
        enumerated += len(batch)
        kept.append(batch.take(legal(batch, job)))
    return enumerated, _join(kept)


def _peaks(job: Job, batch: LayoutBatch, progress: Progress) -> Ints:
    """Peaks [n], pipeline by pipeline."""
    peaks = np.zeros(len(batch), dtype=np.int64)
    done = 0
    for pp in np.unique(batch.pp):
        rows = np.flatnonzero(batch.pp == pp)
        peaks[rows] = peak_bytes(job, batch.take(rows))
        done += len(rows)
        progress("memory", done, len(batch))
    return peaks


def _walk_best(job: Job, batch: LayoutBatch, peaks: Ints, keep: int, progress: Progress) -> tuple[list[Candidate], int]:
    """Walk in the order of the closed forms, until those left cannot be among the best any more."""
    estimated: Floats = step_seconds(job, batch)
    capacity = job.cluster.device.usable_bytes
    found: list[Candidate] = []
    known: set[Layout] = set()
    walked = 0
    for i in np.argsort(estimated, kind="stable")[:MAX_LOOKED_AT].tolist():
        best = _of_families(found, keep)
        if len(known) >= keep and estimated[i] * (1 - SLACK) >= best[-1].step.total_s:
            break
        layout = batch.row(i)
        if family(layout) not in known and (len(known) >= MAX_WALKS or (walked > MAX_WALKED and len(known) >= LEAST)):
            continue
        step = step_time(job, layout)
        walked += layout.stages * step.walked * (family(layout) not in known)
        known.add(family(layout))
        found.append(Candidate(layout, step, int(peaks[i]), capacity))
        found.sort(key=lambda c: c.step.total_s)
        progress("schedules", len(known), MAX_WALKS)
    return _of_families(found, keep), len(found)


def family(layout: Layout) -> Layout:
    """What layouts share that differ in how their data-parallel ranks part into dp_replicate x dp_shard alone."""
    replicate, shard = (1, layout.dp) if layout.zero else (layout.dp, 1)
    return replace(layout, dp_replicate=replicate, dp_shard=shard)


def _of_families(found: Sequence[Candidate], keep: int) -> list[Candidate]:
    """The head of a ranking that holds its first `keep` families, twins among them included."""
    known: set[Layout] = set()
    for i, candidate in enumerate(found):
        known.add(family(candidate.layout))
        if len(known) > keep:
            return list(found[:i])
    return list(found)


def _join(batches: list[LayoutBatch]) -> LayoutBatch:
    """One batch of them all; they share `names` and `splits`."""
    columns = [f.name for f in fields(LayoutBatch) if f.name not in ("names", "splits")]
    joined = {name: np.concatenate([getattr(b, name) for b in batches]) for name in columns}
    return LayoutBatch(**joined, names=batches[0].names, splits=batches[0].splits)
