"""Every composition of the front that a number of ranks holds, generated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.model.spec import Model
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, split_of
from shardwise.plan.rules import findings
from shardwise.plan.runs import RECOMPUTE, runs_here
from tests.support.models import job, tiny

SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb-h1")
BATCH = 8


@dataclass(frozen=True)
class Case:
    """A layout with the smallest tiny model that fills its stages."""

    layout: Layout
    tied: bool

    @property
    def model(self) -> Model:
        return tiny(layers_for(self.layout), self.tied)

    def job(self, precision: str = "fp64") -> Job:
        return job(self.model, f"{self.layout.world_size}xcpu", batch=BATCH, precision=precision)

    def __str__(self) -> str:
        return str(self.layout) + (" tied" if self.tied else "")


def layers_for(layout: Layout) -> int:
    """At least a layer a stage but the ends, and uneven where it can be."""
    return max(3, layout.stages - 1)


def layouts(ranks: int) -> Iterator[Layout]:
    """All degrees with a product of `ranks`, times every choice of the front."""
    degrees = [2**i for i in range(ranks.bit_length()) if ranks % 2**i == 0]
    for tp, pp, replicate, shard in itertools.product(degrees, repeat=4):
        if tp * pp * replicate * shard != ranks:
            continue
        zeros = (1, 3) if shard > 1 else (0,)
        names = SCHEDULES if pp > 1 else ("1f1b",)
        for sp, zero, name, recompute in itertools.product(
            (False, True) if tp > 1 else (False,), zeros, names, RECOMPUTE
        ):
            yield Layout(
                tp=tp,
                sp=sp,
                pp=pp,
                dp_replicate=replicate,
                dp_shard=shard,
                zero=zero,
                schedule=name,
                mb=micro_batch(replicate * shard, pp),
                recompute=recompute,
            )


def micro_batch(dp: int, pp: int) -> int:
    """Sequences of a micro-batch: 2 where that leaves more micro-batches than one."""
    return 2 if BATCH // dp >= 4 and pp < 4 else 1


def cases(most: int) -> list[Case]:
    """Every composition on 1, 2, 4 .. `most` ranks, tied and not; each is legal and runs."""
    found = [
        Case(layout, tied)
        for ranks in (2**i for i in range(most.bit_length()))
        for layout in layouts(ranks)
        for tied in (False, True)
    ]
    for case in found:
        broken = [*findings(case.layout, case.job()), *runs_here(case.layout, case.job())]
        assert not broken, f"{case}: {broken[0]}"
        assert sum(split_of(case.layout, case.model.layers)) == case.model.layers
    return found
