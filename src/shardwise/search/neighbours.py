"""Layouts near a given one: some keys changed, data parallelism taking what is left, screened by their closed forms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any

import numpy as np

from shardwise import schedule as schedules
from shardwise.account.columns import rows_of_each
from shardwise.account.compute import flops_per_token
from shardwise.account.memory import GridMemory, peak_bytes
from shardwise.account.static import columns_of
from shardwise.plan.batch import Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import DEFAULT_SCHEDULE, Layout
from shardwise.plan.rules import legal
from shardwise.results import StepTime
from shardwise.search.solve import Candidate
from shardwise.search.space import MB, RECOMPUTE
from shardwise.simulate.stage import prices_of, share_parts
from shardwise.simulate.step import BUBBLE, CAUSES, step_seconds, step_time

Change = Mapping[str, int | str]
"""Keys of a layout and what they become. `dp` is never among them: it follows from the others."""

MAX_WALKED = 2_500
"""Stages times micro-batches to walk of one layout at the most; a longer one keeps its closed form."""


@dataclass(frozen=True, slots=True)
class Near:
    """A legal layout by its closed form and its peak, or a bound of it where the schedule does not fill up evenly."""

    layout: Layout
    seconds: float
    peak_bytes: int
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes

    @property
    def over_bytes(self) -> int:
        return self.peak_bytes - self.capacity_bytes


@dataclass(slots=True)
class Field:
    """The layouts of a job that were looked at, each priced once, around the one that they are compared with."""

    job: Job
    center: Candidate | None = None
    known: dict[Layout, Near] = field(default_factory=dict[Layout, Near])

    def screen(self, layouts: Iterable[Layout]) -> list[Near]:
        """The legal ones among them, the fastest first."""
        asked = list(dict.fromkeys(layouts))
        fresh = [x for x in asked if x not in self.known]
        if fresh:
            kept = np.flatnonzero(legal(LayoutBatch.of(fresh), self.job))
            self._price([fresh[i] for i in kept.tolist()])
        found = [self.known[x] for x in asked if x in self.known]
        return sorted(found, key=lambda near: (near.seconds, str(near.layout)))

    def _price(self, layouts: Sequence[Layout]) -> None:
        if not layouts:
            return
        batch, capacity = LayoutBatch.of(layouts), self.job.cluster.device.usable_bytes
        seconds, peaks = step_seconds(self.job, batch), peaks_of(self.job, batch)
        for layout, s, peak in zip(layouts, seconds.tolist(), peaks.tolist(), strict=True):
            self.known[layout] = Near(layout, s, peak, capacity)

    def nearest(self, layouts: Iterable[Layout]) -> Near | None:
        """The fastest that fits, or else the one that lacks least memory."""
        found = self.screen(layouts)
        if fitting := [near for near in found if near.fits]:
            return fitting[0]
        least = min(found, key=lambda near: near.peak_bytes, default=None)
        return None if least is None else self.exact(least)

    def exact(self, near: Near) -> Near:
        """The same with its very peak."""
        name, pp, m = near.layout.schedule, near.layout.pp, self.job.micro_batches(near.layout)
        enough = schedules.saturation(name, pp)
        if enough is not None and schedules.capped(name, pp, m) != enough:
            peak = int(peak_bytes(self.job, LayoutBatch.of([near.layout]))[0])
            self.known[near.layout] = replace(near, peak_bytes=peak)
        return self.known[near.layout]

    def candidate(self, near: Near) -> Candidate:
        """The same with its time by cause. A long walk is spared: its closed form then counts, with what the walk of
        the center added to that of the center, in proportion."""
        if self.center is not None and near.layout == self.center.layout:
            return self.center
        short = near.layout.stages * self.job.micro_batches(near.layout) <= MAX_WALKED
        step = (
            step_time(self.job, near.layout) if short else closed_step(self.job, near.layout, near.seconds * self.scale)
        )
        return Candidate(near.layout, step, self.exact(near).peak_bytes, near.capacity_bytes)

    @property
    def scale(self) -> float:
        """What a closed form is multiplied by to be like the center's walk."""
        if self.center is None:
            return 1.0
        (near,) = self.screen([self.center.layout])
        return self.center.step.total_s / near.seconds

    def slower(self, near: Near) -> float:
        """By which share of the center's step a layout is slower, below 0 faster, both by their closed forms. Raises
        ValueError without a center."""
        if self.center is None:
            raise ValueError("no layout to compare with")
        (base,) = self.screen([self.center.layout])
        return near.seconds / base.seconds - 1


def peaks_of(job: Job, batch: LayoutBatch) -> Ints:
    """Bytes of each legal layout's fullest rank, as a search reads them: [n]."""
    out = np.zeros(len(batch), dtype=np.int64)
    for rows in rows_of_each(batch.pp, batch.schedule, batch.split):
        grid = batch.take(rows).expanded(2)
        out[rows] = GridMemory(job, grid, columns_of(job, grid), exact=False).peaks(slice(None)).ravel()
    return out


def first_that_fits(job: Job, layouts: Iterable[Layout]) -> Layout | None:
    """The first legal one whose exact peak fits; times are not asked for. Neighbours of one
    pipeline are counted at once."""
    capacity = job.cluster.device.usable_bytes
    for _, alike in groupby(layouts, key=lambda layout: (layout.pp, layout.schedule)):
        ways = list(alike)
        batch = LayoutBatch.of(ways)
        kept = np.flatnonzero(legal(batch, job))
        if len(kept):
            fits = np.flatnonzero(peak_bytes(job, batch.take(kept)) <= capacity)
            if len(fits):
                return ways[kept[fits[0]]]
    return None


def closed_step(job: Job, layout: Layout, seconds: float) -> StepTime:
    """A step of so many seconds by cause, without a walk. What is not spent in actions is one part, the bubble:
    messages between stages and what comes after the last backward are not told apart."""
    prices = prices_of(job, LayoutBatch.of([layout]).expanded(2))
    times = job.micro_batches(layout) / schedules.copies(layout.schedule)
    ranks = [share_parts(prices, share) for share in prices.chain.ranks]
    busy = [{c: times * sum(float(np.asarray(x).flat[0]) for x in three) for c, three in r.items()} for r in ranks]
    busiest = max(busy, key=lambda causes: sum(causes.values()))
    parts = {cause: busiest.get(cause, 0.0) for cause in CAUSES}
    parts[BUBBLE] = max(0.0, seconds - sum(parts.values()))
    return StepTime(
        parts_s=parts,
        tokens=job.tokens,
        devices=job.cluster.world_size,
        model_flops=flops_per_token(job.model, job.seq_len) * job.tokens,
        peak_flops_per_s=job.cluster.device.peak_flops[job.precision.product_dtype],
        micro_batches=job.micro_batches(layout),
        walked=0,
    )


@dataclass(frozen=True, slots=True)
class Options:
    """Values that may be tried of the keys that a change leaves open; empty: the layout's own alone."""

    recompute: tuple[str, ...] = ()
    zero: tuple[int, ...] = ()
    schedule: tuple[str, ...] = ()
    mb: int = 1
    """the layout's micro-batch times and over so many, by powers of two"""


ALONE = Options()
STATE = Options(RECOMPUTE, (0, 1, 2, 3), (), 4)
"""All but the schedule: enough to let a change of one pipeline show what it is worth."""

PIPELINES = Options(RECOMPUTE, (0, 1, 2, 3), ("interleaved:2", DEFAULT_SCHEDULE), 4)
"""And schedules that most pipelines have."""


def changed(job: Job, layout: Layout, change: Change, options: Options = ALONE) -> list[Layout]:
    """A layout with some keys changed and data parallelism resized to the devices, in every way that `options` leave.

    Not all of them are legal; none where the degrees do not divide the devices, or the batch has no sequence for each
    data-parallel rank.
    """
    named = resized(job, layout, {k: v for k, v in change.items() if k not in _OPEN})
    if named is None or job.global_batch % named.dp:
        return []
    levels = _values("zero", layout, change, [z for z in options.zero if z in (0, *job.stack.zero)])
    ways = product(
        _values("recompute", layout, change, options.recompute),
        _values("schedule", layout, change, options.schedule) if named.pp > 1 else [DEFAULT_SCHEDULE],
        _micro_batches(layout, change, options.mb, job.global_batch // named.dp),
    )
    bare = [replace(named, recompute=str(r), schedule=str(s), mb=mb) for r, s, mb in ways]
    return list(dict.fromkeys(one for x in bare for one in _states(x, layout, levels)))


_OPEN = ("zero", "schedule", "mb", "recompute")
"""Keys of which `Options` may try several values."""


def resized(job: Job, layout: Layout, change: Change) -> Layout | None:
    """A layout with some keys but those of _OPEN changed, on all devices: data parallelism has what the others leave.

    None where the degrees do not divide the devices.
    """
    tp, cp, pp = (int(change[key] if key in change else getattr(layout, key)) for key in ("tp", "cp", "pp"))
    dp, left = divmod(job.cluster.world_size, tp * cp * pp)
    if left or not dp:
        return None
    copies = dp if not layout.zero else layout.dp_replicate if dp % layout.dp_replicate == 0 else 1
    values: dict[str, Any] = {"sp": layout.sp or layout.tp == 1, **change}
    values |= {"dp_replicate": copies, "dp_shard": dp // copies, "split": layout.split if pp == layout.pp else ()}
    return replace(layout, **values, schedule=layout.schedule if pp > 1 else DEFAULT_SCHEDULE)


def _values(key: str, layout: Layout, change: Change, options: Sequence[int | str]) -> list[int | str]:
    return [change[key]] if key in change else list(dict.fromkeys((getattr(layout, key), *options)))


def _micro_batches(layout: Layout, change: Change, spread: int, each: int) -> list[int]:
    """Sizes of a micro-batch that divide the sequences of a data-parallel rank."""
    wanted = [int(change.get("mb", layout.mb))]
    if "mb" not in change:
        wanted += [m for n in (2, 4, 8, 16) if n <= spread for m in (layout.mb * n, layout.mb // n)]
    found = [m for m in wanted if 0 < m <= max(*MB, layout.mb) and each % m == 0]
    return found or [1]


def _states(named: Layout, like: Layout, levels: Sequence[int | str]) -> Iterator[Layout]:
    """Every ZeRO level, over the same part of the replicas where they still divide, and over all of them."""
    dp = named.dp
    for level in map(int, levels):
        if not level:
            yield replace(named, dp_replicate=dp, dp_shard=1, zero=0)
            continue
        for copies in dict.fromkeys((like.dp_replicate if like.zero and dp % like.dp_replicate == 0 else 1, 1)):
            yield replace(named, dp_replicate=copies, dp_shard=dp // copies, zero=level)
