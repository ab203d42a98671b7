"""The field's recipe, as a baseline: what someone who knows the rules of thumb and no numbers would run.

In order (Narayanan et al. 2104.04473, section 5.4; Llama 3, 2407.21783, section 3.3.2; the scaling book for a torus):

1. Cut each layer until the model fits: tensor parallelism, no further than the fast domain. Routed experts are spread
   instead, as far; only without a pipeline are layers cut as well. Sequences longer than LONG_TOKENS are cut to
   LONG_TOKENS a rank.
2. If it does not fit yet: the pipeline, over nodes. On a torus, where every neighbour is as near as the next one, there
   is none: the state is cut over data parallelism (FSDP) from the start, and tensor parallelism is for when the batch
   has too few tokens for that.
3. Data parallelism takes the devices that are left, with the optimizer's state cut over it (ZeRO-1, or the least that
   the software stack offers). If the batch has fewer sequences than that, step 1 or 2 goes on.
4. Accumulate: the micro-batch is the largest that fits with MICRO_BATCHES_A_STAGE of them for each pipeline stage.

What does not fit so is tried with all of the state cut instead of a pipeline (FSDP, where FSDP_MICRO_BATCHES are enough
for the batch), then with whole layers recomputed, and in the end with FSDP all the same. No step compares times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from shardwise.plan.job import Job
from shardwise.plan.layout import DEFAULT_SCHEDULE, Layout
from shardwise.search.neighbours import Change, Field, Near, changed, first_that_fits
from shardwise.search.solve import Candidate
from shardwise.search.space import MAX_TP, MB, divisors

LONG_TOKENS = 8192
"""Longer sequences are cut (Megatron Core's parallelism guide: context parallelism from 8K tokens on)."""

MICRO_BATCHES_A_STAGE = 4
"""Keeps the bubble small (GPipe, 1811.06965, section 2.3)."""

FSDP_MICRO_BATCHES = 8
"""FSDP gathers every parameter twice for each of them: with more, the pipeline is the one to take."""

_INTERLEAVED = ("interleaved:4", "interleaved:2", DEFAULT_SCHEDULE)
"""Schedules of a pipeline, the one with the smallest bubble first (Narayanan et al., section 2.2.2)."""


def field_recipe(job: Job, near: Field | None = None) -> Candidate | None:
    """The recipe's layout; None where no step of it fits. The same for equal jobs. `near` prices it like its others."""
    around = near or Field(job)
    torus = job.cluster.levels[0].kind == "torus"
    found = first_that_fits(job, _ladder(job, torus))
    return None if found is None else around.candidate(_accumulated(job, around, found))


def _ladder(job: Job, torus: bool) -> Iterator[Layout]:
    """Steps 1 to 3 and what follows them, in the order in which the recipe tries them."""
    optimizer = min((level for level in job.stack.zero if level in (1, 2)), default=0)
    for recompute, zero in product(("none", "full"), (optimizer, 3)):
        if zero not in (0, *job.stack.zero) or (torus and zero < 3 and 3 in job.stack.zero):
            continue
        for change in _cuts(job, pipelines=zero < 3 and not torus):
            for schedule in _INTERLEAVED if change.get("pp", 1) != 1 else (DEFAULT_SCHEDULE,):
                one: Change = {**change, "zero": zero, "recompute": recompute, "schedule": schedule, "mb": 1}
                most = FSDP_MICRO_BATCHES if zero == 3 and recompute == "none" and not torus else job.global_batch
                yield from (x for x in changed(job, Layout(), one) if job.micro_batches(x) <= most)


def _accumulated(job: Job, near: Field, first: Layout) -> Near:
    """Step 4."""
    each, least = job.global_batch // first.dp, MICRO_BATCHES_A_STAGE * first.pp if first.pp > 1 else 1
    sizes = [m for m in MB if m > first.mb and each % m == 0 and each // m >= least]
    larger = [n for n in near.screen(replace(first, mb=mb) for mb in sizes) if n.fits]
    (smallest,) = near.screen([first])
    return max(larger, key=lambda n: n.layout.mb, default=smallest)


def _cuts(job: Job, pipelines: bool) -> Iterator[Change]:
    """Steps 1 and 2: (ep, tp, cp, pp) from the least cut on."""
    fast, model, cp = job.cluster.devices_per_node, job.model, _context(job)
    tensor = [2**i for i in range(7) if 2**i <= min(fast, MAX_TP)]
    experts = [d for d in divisors(model.experts) if d <= fast] if model.experts else [1]
    yield from ({"cp": cp, "ep": ep} for ep in experts)
    if not model.experts or not pipelines:
        yield from ({"cp": cp, "ep": experts[-1], "tp": tp} for tp in tensor[1:])
    if pipelines:
        stages = [d for d in divisors(job.cluster.world_size) if 1 < d <= model.layers + 2]
        tp = 1 if model.experts else tensor[-1]
        yield from ({"cp": cp, "ep": experts[-1], "tp": tp, "pp": pp} for pp in stages)


def _context(job: Job) -> int:
    """Ranks that a long sequence is cut over."""
    least = -(-job.seq_len // LONG_TOKENS)
    return next((d for d in divisors(job.cluster.world_size) if d >= least), 1)
