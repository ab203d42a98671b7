"""Legality: what a layout must keep to be planned, proved and trained. A rule is a mask and an explanation.

`broken` is the mask of layouts that break it, over a whole batch; `explain` says of one layout what is wrong with the
numbers and the smallest change that mends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardwise.plan.batch import Bools, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import DEFAULT_SCHEDULE, Layout
from shardwise.results import Finding


@dataclass(frozen=True, slots=True)
class Rule:
    """`explain` returns (what is wrong, the fix) of a layout that breaks the rule."""

    id: str
    summary: str
    broken: Callable[[LayoutBatch, Job], Bools]
    explain: Callable[[Layout, Job], tuple[str, str]]


def _divisors_near(n: int, wanted: int) -> str:
    """The divisors of n on either side of `wanted`, as text."""
    divisors = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, below + above))


def _world(layout: Layout, job: Job) -> tuple[str, str]:
    have, want = job.cluster.world_size, layout.world_size
    rest = layout.tp * layout.pp
    fix = f"use dp={have // rest}" if have % rest == 0 else f"choose tp x pp that divides {have}"
    said = f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp} = {want:,} ranks, the cluster has {have:,} devices"
    return said, fix


def _batch(layout: Layout, job: Job) -> tuple[str, str]:
    unit, batch = layout.dp * layout.mb, job.global_batch
    near = [n for n in (batch // unit * unit, (batch // unit + 1) * unit) if n]
    said = f"{batch:,} sequences are not whole micro-batches of dp {layout.dp} x mb {layout.mb}"
    return said, f"use a batch of {' or '.join(f'{n:,}' for n in near)} sequences"


def _cut(what: str, size: Callable[[Job], int]) -> Callable[[Layout, Job], tuple[str, str]]:
    def explain(layout: Layout, job: Job) -> tuple[str, str]:
        n = size(job)
        return f"tp={layout.tp} does not divide {n:,} {what}", f"use tp={_divisors_near(n, layout.tp)}"

    return explain


def _kv(layout: Layout, job: Job) -> tuple[str, str]:
    k = job.model.kv_heads
    if layout.tp > k:
        return (
            f"tp={layout.tp} is more than the {k} kv heads; copies of kv heads are not built yet",
            f"use tp={k} or less",
        )
    return f"tp={layout.tp} does not divide {k} kv heads", f"use tp={_divisors_near(k, layout.tp)}"


def _tokens(layout: Layout, job: Job) -> tuple[str, str]:
    n = layout.mb * job.seq_len
    return (
        f"sp=1 cuts {n:,} tokens of a micro-batch into tp={layout.tp} parts unevenly",
        "use sp=0, or another mb or tp",
    )


def _stages(layout: Layout, job: Job) -> tuple[str, str]:
    n, most = job.model.layers, job.model.layers + 2
    return f"{layout.stages} stages for {n} layers leave a stage empty", f"use at most {most} stages"


def _split(layout: Layout, job: Job) -> tuple[str, str]:
    said = f"split= names {len(layout.split)} stages with {sum(layout.split)} layers in all"
    return said, f"name {layout.stages} stages with {job.model.layers} layers in all, only the ends may have none"


def _split_broken(batch: LayoutBatch, job: Job) -> Bools:
    """Few distinct splits: each is checked once against every stage count."""
    stages = batch.pp * batch.virtual
    broken = np.zeros(len(batch), dtype=np.bool_)
    for i, split in enumerate(batch.splits):
        if split:
            wrong = sum(split) != job.model.layers or 0 in split[1:-1]
            broken |= (batch.split == i) & (wrong | (stages != len(split)))
    return broken


def _schedule_broken(batch: LayoutBatch, job: Job) -> Bools:
    del job
    default = batch.names.index(DEFAULT_SCHEDULE) if DEFAULT_SCHEDULE in batch.names else -1
    return (batch.pp == 1) & (batch.schedule != default)


def _schedule(layout: Layout, job: Job) -> tuple[str, str]:
    del job
    return f"schedule={layout.schedule} with pp=1 has nothing to overlap", "leave schedule out, or use pp=2 or more"


RULES: tuple[Rule, ...] = (
    Rule("world", "the degrees multiply to the devices", lambda b, j: b.world_size != j.cluster.world_size, _world),
    Rule("batch", "dp x mb divides the global batch", lambda b, j: j.global_batch % (b.dp * b.mb) != 0, _batch),
    Rule(
        "heads", "tp divides the heads", lambda b, j: j.model.heads % b.tp != 0, _cut("heads", lambda j: j.model.heads)
    ),
    Rule("kv-heads", "tp divides the kv heads", lambda b, j: j.model.kv_heads % b.tp != 0, _kv),
    Rule(
        "ffn",
        "tp divides the feed-forward size",
        lambda b, j: j.model.ffn % b.tp != 0,
        _cut("ffn", lambda j: j.model.ffn),
    ),
    Rule(
        "vocab",
        "tp divides the vocabulary",
        lambda b, j: j.model.vocab % b.tp != 0,
        _cut("vocabulary rows", lambda j: j.model.vocab),
    ),
    Rule(
        "sequence",
        "sequence parallelism cuts a micro-batch's tokens evenly",
        lambda b, j: (b.sp > 0) & (b.mb * j.seq_len % b.tp != 0),
        _tokens,
    ),
    Rule(
        "stages",
        "no stage is empty",
        lambda b, j: (b.split == 0) & (b.pp * b.virtual > j.model.layers + 2),
        _stages,
    ),
    Rule("split", "split= places every layer once", _split_broken, _split),
    Rule("schedule", "a schedule needs a pipeline", _schedule_broken, _schedule),
)


def legal(batch: LayoutBatch, job: Job) -> Bools:
    """Mask of the layouts that break no rule."""
    ok = np.ones(len(batch), dtype=np.bool_)
    for rule in RULES:
        ok &= ~rule.broken(batch, job)
    return ok


def findings(layout: Layout, job: Job) -> list[Finding]:
    """Every rule that the layout breaks, explained."""
    batch = LayoutBatch.of([layout])
    return [Finding(r.id, *r.explain(layout, job)) for r in RULES if bool(r.broken(batch, job)[0])]
