"""The compositions of what the runtime runs: all on two ranks, beyond that every meeting of three choices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise import schedule as schedules
from shardwise.model.spec import Model
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse, split_of
from shardwise.plan.rules import findings
from shardwise.plan.runs import runs_here
from tests.support.models import job, tiny

NAMES = tuple(name.replace(":V", ":2") for name in schedules.NAMES)
HELD_ONCE = tuple(name for name in NAMES if schedules.copies(name) == 1)
ODD = (1, 3, 5, 7)
"""Micro-batches that two copies of the weights do not share evenly: their ranks end a stage at different places."""

TWICE = (
    "pp=2 schedule=dualpipe mb=1",
    "pp=4 schedule=dualpipe mb=1 recompute=full",
    "tp=2 pp=2 schedule=dualpipe mb=1",
    "pp=2 dp=2 zero=1 schedule=dualpipe mb=1",
    "pp=2 dp=2 zero=3 schedule=dualpipe mb=1",
)

ALL = 2
"""Up to so many ranks every composition is taken."""

MEETING = 3
"""Beyond, each set of so many choices that some layout combines."""

BATCH = 8

SOME = "norm,act,core"
RECOMPUTE = ("none", "full", SOME)
"""Nothing, whole layers, and every op that can be computed again by itself; fewer of them are `test_families.py`'s."""


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


def odd(text: str, micro_batches: int, precision: str = "fp64") -> tuple[Layout, Job]:
    """One of TWICE, and a job with so many micro-batches."""
    layout = parse(text)
    model = tiny(layers_for(layout), tied=True)
    work = job(model, f"{layout.world_size}xcpu", batch=micro_batches * layout.dp * layout.mb, precision=precision)
    assert work.micro_batches(layout) == micro_batches
    return layout, work


def layers_for(layout: Layout) -> int:
    """At least a layer a stage but the ends, and uneven where it can be."""
    return max(3, layout.stages - 1)


def layouts(ranks: int, names: tuple[str, ...]) -> Iterator[Layout]:
    """All degrees with a product of `ranks`, times every choice of the front."""
    degrees = [2**i for i in range(ranks.bit_length()) if ranks % 2**i == 0]
    for tp, pp, replicate, shard in itertools.product(degrees, repeat=4):
        if tp * pp * replicate * shard != ranks:
            continue
        zeros = (1, 2, 3) if shard > 1 else (0,)
        for sp, zero, name, recompute in itertools.product(
            (False, True) if tp > 1 else (False,), zeros, names if pp > 1 else ("1f1b",), RECOMPUTE
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


def cases(most: int, names: tuple[str, ...] = HELD_ONCE) -> list[Case]:
    """Compositions of these schedules on 1, 2, 4 .. `most` ranks, tied and not; each is legal and runs.

    Ops that are computed again by themselves lie in layers, so they are not taken with tied ends as well.
    """
    found: list[Case] = []
    for ranks in (2**i for i in range(most.bit_length())):
        pairs = itertools.product(layouts(ranks, names), (False, True))
        every = [Case(layout, tied) for layout, tied in pairs if not (tied and layout.recompute == SOME)]
        found += every if ranks <= ALL else meeting(every)
    for case in found:
        broken = [*findings(case.layout, case.job()), *runs_here(case.layout, case.job())]
        assert not broken, f"{case}: {broken[0]}"
        assert sum(split_of(case.layout, case.model.layers)) == case.model.layers
    return found


def meeting(every: list[Case]) -> list[Case]:
    """Those in which some MEETING choices meet for the first time; in a drawn order, which needs fewer of them."""
    random.Random(0).shuffle(every)
    seen: set[tuple[tuple[int, object], ...]] = set()
    found: list[Case] = []
    for case in every:
        x = case.layout
        choices = (x.tp, x.sp, x.pp, x.dp_replicate, x.dp_shard, x.zero, x.schedule, x.recompute, case.tied)
        new = set(itertools.combinations(enumerate(choices), MEETING)) - seen
        if new:
            found.append(case)
            seen |= new
    return found
