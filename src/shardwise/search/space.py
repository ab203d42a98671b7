"""Which layouts are looked at: for every number of stages a grid of cuts, ways to recompute and ways to cut the state.

What is not legal is left to the rules, but for what would only say the same twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwise import schedule as schedules
from shardwise.model.spec import Model
from shardwise.plan.batch import COLUMNS, Bools, Ints, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import CP_KINDS, DEFAULT_SCHEDULE, ORDERS
from shardwise.plan.rules import RULES, Rule, legal
from shardwise.plan.runs import RUNS
from shardwise.search.limits import Limits

MAX_TP = 64
MAX_CP = 64
MAX_ETP = 8
MAX_PP = 64
MB = (*range(1, 9), 16, 32, 64, 128)
"""Sequences of a micro-batch that are tried, where they divide the batch."""

MAX_MICRO_TOKENS = 1 << 17
"""Tokens of a micro-batch: far more than any product needs to run at its best. A sequence a context parallel rank is
always allowed."""

LEAST_CP_TOKENS = 512
"""Tokens of a sequence that each rank keeps at least: fewer make no product worth starting."""

VIRTUAL = (2, 4, 8)
"""Stages a rank of interleaving that are always tried,"""

EVEN = (3, 5, 6, 10, 12)
"""and those that are where they leave all stages alike, the embedding and the head counted as a layer or not at all."""

SCHEDULES = (
    *(DEFAULT_SCHEDULE, *(f"interleaved:{v}" for v in (*VIRTUAL, *EVEN))),
    *("zb-h1", "zb-h2", "zb-v", "dualpipe-v", "dualpipe"),
)
"""Schedules of a pipeline; the first is also the one of a single stage. GPipe takes as long as 1F1B and keeps more:
it is tried where it is asked for."""

RECOMPUTE = ("none", "act", "norm,act", "full")


def divisors(n: int) -> list[int]:
    """Of a number of at least 1, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@dataclass(frozen=True)
class Space:
    """The layouts of a job within limits."""

    job: Job
    limits: Limits

    @property
    def rules(self) -> tuple[Rule, ...]:
        """What a layout has to keep to be looked at further."""
        return (*RULES, *RUNS) if self.limits.runnable else RULES

    def _allowed(self, key: str, values: list[int]) -> list[int]:
        return [v for v in values if self.limits.allows(key, v)]

    @cached_property
    def pipelines(self) -> list[int]:
        """Numbers of stages, each a rank."""
        most = min(MAX_PP, self.job.model.layers + 2)
        return self._allowed("pp", [d for d in divisors(self.job.cluster.world_size) if d <= most])

    @cached_property
    def recomputes(self) -> tuple[str, ...]:
        pinned = self.limits.pins.get("recompute")
        ways = RECOMPUTE if pinned is None or pinned in RECOMPUTE else (*RECOMPUTE, pinned)
        return tuple(way for way in ways if self.limits.allows("recompute", way))

    def schedules(self, pp: int) -> list[int]:
        """Indices of SCHEDULES to try."""
        if pp == 1:
            return [0]
        return [i for i, n in enumerate(self.names) if self._worth_trying(n, pp) and self.limits.allows("schedule", n)]

    def _worth_trying(self, name: str, pp: int) -> bool:
        virtual = schedules.virtual_stages(name)
        if name.partition(":")[0] != "interleaved" or virtual in VIRTUAL or self.limits.pins.get("schedule") == name:
            return True
        return any(layers % (pp * virtual) == 0 for layers in (self.job.model.layers, self.job.model.layers + 2))

    @cached_property
    def names(self) -> tuple[str, ...]:
        pinned = self.limits.pins.get("schedule", DEFAULT_SCHEDULE)
        extra = () if any(n == pinned or n.partition(":")[0] == pinned for n in SCHEDULES) else (pinned,)
        return (*SCHEDULES, *extra)

    def cuts(self, pp: int) -> Iterator[LayoutBatch]:
        """Every (tp, sp, cp, kind, ep, etp, order, mb) of so many stages, a batch [n] for each (tp, cp); the state is
        not cut."""
        world, model = self.job.cluster.world_size, self.job.model
        for tp in self._allowed("tp", [d for d in divisors(world // pp) if d <= MAX_TP]):
            for cp in self._allowed("cp", self._context(world // (pp * tp))):
                dp = world // (pp * tp * cp)
                if self.limits.allows("dp", dp):
                    yield self._batch(model, pp, tp, cp, dp)

    def _context(self, ranks: int) -> list[int]:
        most = max(1, min(MAX_CP, self.job.seq_len // LEAST_CP_TOKENS))
        return [d for d in divisors(ranks) if d <= most]

    def _batch(self, model: Model, pp: int, tp: int, cp: int, dp: int) -> LayoutBatch:
        experts = divisors(model.experts) if model.experts else [1]
        orders = range(2) if pp > 1 and dp > 1 and len(self.job.cluster.levels) > 2 else range(1)
        kinds = [i for i in range(3 if cp > 1 else 1) if cp == 1 or self.limits.allows("cp_kind", CP_KINDS[i])]
        sp, kind, ep, etp, order, mb = _product(
            self._allowed("sp", [0, 1]) if tp > 1 else [0],
            kinds,
            self._allowed("ep", [d for d in experts if (dp * cp * tp) % d == 0]),
            self._allowed("etp", [d for d in (1, tp) if d <= MAX_ETP] if model.experts and tp > 1 else [1]),
            [i for i in orders if len(orders) == 1 or self.limits.allows("order", ORDERS[i])],
            self._allowed("mb", self._micro_batches(dp, cp)),
        )
        one = np.ones_like(sp)
        return LayoutBatch(
            tp=one * tp,
            sp=sp,
            cp=one * cp,
            cp_kind=kind,
            pp=one * pp,
            ep=ep,
            etp=etp,
            dp_replicate=one * dp,
            dp_shard=one,
            zero=one * 0,
            schedule=one * 0,
            split=one * 0,
            mb=mb,
            recompute=one * 0,
            order=order,
            names=self.names,
            recomputes=self.recomputes,
        )

    def _micro_batches(self, dp: int, cp: int) -> list[int]:
        """Sequences of a micro-batch; a batch that dp does not divide is left for the rule that says so."""
        batch, most = self.job.global_batch, max(cp, MAX_MICRO_TOKENS // self.job.seq_len)
        pinned = [int(x) for x in (self.limits.pins.get("mb"),) if x]
        return [n for n in pinned or MB if batch // dp % n == 0 and n <= most] if batch % dp == 0 else [1]

    def grid(self, cuts: LayoutBatch) -> tuple[LayoutBatch, Bools]:
        """([k, r, z], [k, 1, z] which ways to cut the state there are): the cuts with every way to recompute and, in
        the order of the ZeRO level, every way to cut the state."""
        dp, cp, order = (column[:, None, None] for column in (cuts.dp, cuts.cp, cuts.order))
        zero, asked = self._ways(dp)
        replicate = np.where(zero > 0, np.minimum(asked, dp), dp)
        shard = np.where(zero > 0, dp // replicate, 1)
        whole = (zero == 0) | ((asked <= dp) & (replicate * shard == dp) & (shard * cp > 1))
        real = whole & ((order == 0) | (replicate > 1))
        for key, column in (("dp_replicate", replicate), ("dp_shard", shard), ("zero", zero)):
            real = real & np.isin(column, [v for v in np.unique(column).tolist() if self.limits.allows(key, v)])
        ways = np.arange(len(self.recomputes)).reshape(1, -1, 1)
        return replace(cuts.expanded(2), dp_replicate=replicate, dp_shard=shard, zero=zero, recompute=ways), real

    def _ways(self, dp: Ints) -> tuple[Ints, Ints]:
        """([1, 1, z] ZeRO levels, [1, 1, z] replicas under each): what the largest of these dp can be parted into."""
        replicas = [r for r in divisors(int(np.lcm.reduce(dp.ravel()))) if r <= dp.max()] if dp.size else [1]
        levels = [z for z in self.job.stack.zero if z and self.limits.allows("zero", z)]
        zero, asked = zip((0, 1), *((z, r) for z in levels for r in replicas), strict=True)
        return np.asarray(zero).reshape(1, 1, -1), np.asarray(asked).reshape(1, 1, -1)

    def legal_cuts(self, pp: int) -> tuple[int, LayoutBatch | None]:
        """(cuts looked at, those that keep every rule that says nothing of schedules and state)."""
        looked, kept = 0, list[LayoutBatch]()
        for batch in self.cuts(pp):
            looked += len(batch)
            kept.append(batch.take(legal(batch, self.job, self.rules)))
        return looked, join(kept) if kept else None


def enumerate_layouts(job: Job, limits: Limits | None = None) -> Iterator[LayoutBatch]:
    """Every layout of the front, legal or not, a batch [n] for each number of stages, (tp, cp) and schedule."""
    space = Space(job, limits or Limits())
    for pp in space.pipelines:
        for cuts in space.cuts(pp):
            for schedule in space.schedules(pp) if len(cuts) else ():
                grid, real = space.grid(cuts)
                filled = replace(grid, schedule=np.full_like(grid.schedule, schedule))
                yield filled.take(np.broadcast_to(real, filled.shape).ravel())


def _product(*values: list[int]) -> list[Ints]:
    """Columns of all combinations."""
    columns = [np.asarray(each, dtype=np.int64) for each in values]
    return [np.ravel(x) for x in np.meshgrid(*columns, indexing="ij")]


def join(batches: list[LayoutBatch]) -> LayoutBatch:
    """One batch [n] of them all; they share `names`, `splits` and `recomputes`."""
    joined = {name: np.concatenate([getattr(b, name) for b in batches]) for name in COLUMNS}
    first = batches[0]
    return LayoutBatch(**joined, names=first.names, splits=first.splits, recomputes=first.recomputes)
