"""Finding out: the searches and reviews that the commands print. Everything heavy is imported inside."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardwise.view import terminal
from shardwise.view.asking import read_ranks

if TYPE_CHECKING:
    from shardwise.plan.job import Job
    from shardwise.plan.layout import Layout
    from shardwise.plan.stack import Stack
    from shardwise.search.limits import Limits
    from shardwise.search.solve import SearchResult
    from shardwise.view.review import AtLevel, Others, Request, Review, Told, UnderStack

MAX_DRAWN: Final = 20_000
"""Stages times micro-batches of a whole picture; a longer step is drawn with fewer micro-batches."""

KEPT: Final = 10
"""Layouts in the table of `plan`."""


def review(job: Job, layout: Layout, rank: int = 0, detailed: bool = True) -> Review:
    """All that is known of one legal layout; `detailed`, with one global rank's communication and the pipeline."""
    from shardwise.account.comm import predict_ledger
    from shardwise.account.compute import flops_per_token
    from shardwise.account.memory import memory_of
    from shardwise.search.fitting import remedies
    from shardwise.simulate.step import step_time, timeline
    from shardwise.view.review import Review

    read_ranks([str(rank)], layout.world_size)
    schedule, times = timeline(job, layout, drawn(job, layout) if detailed else layout.pp)
    of = Review(
        job=job,
        layout=layout,
        memory=memory_of(job, layout),
        step=step_time(job, layout),
        flops_per_token=flops_per_token(job.model, job.seq_len),
        rank=rank,
        ledger=predict_ledger(job, layout, rank) if detailed else Counter(),
        schedule=schedule,
        timeline=times,
    )
    return of if of.fits else replace(of, remedies=remedies(job, layout))


def in_convention(of: Review, name: str) -> Review:
    """The same with model FLOPs, and so MFU, counted by one of the conventions."""
    from shardwise.account.compute import flops_per_token

    if name == "exact":
        return of
    each = flops_per_token(of.job.model, of.job.seq_len, name)
    return replace(of, step=replace(of.step, model_flops=each * of.job.tokens), flops_per_token=each)


def drawn(job: Job, layout: Layout) -> int:
    """Micro-batches of the picture: all, or where they are very many, enough for both ends and a steady middle."""
    whole = job.micro_batches(layout)
    return whole if whole * layout.stages <= MAX_DRAWN else min(whole, layout.pp * max(4, 64 // layout.pp))


def search(asked: Request, keep: int = KEPT, limits: Limits | None = None) -> SearchResult:
    """The `keep` best layouts of a job."""
    from shardwise.search.halves import halves
    from shardwise.search.heap import keep_freed_memory
    from shardwise.search.limits import Limits
    from shardwise.search.solve import solve

    keep_freed_memory()
    job, limits = asked.job, limits or Limits()
    with halves(job, limits) as survey, terminal.working("search") as tell:
        return solve(job, lambda what, n, of: tell(f"search: {what}, {n:,} of {of:,}"), keep, limits, survey)


def tell(
    asked: Request, found: SearchResult, limits: Limits | None = None, critical_batch_tokens: int | None = None
) -> Told:
    """Why a search came out as it did; why not the layout that is asked about; how long a loss takes."""
    from shardwise.search.explain import explain
    from shardwise.search.fitting import nothing_fits
    from shardwise.search.heap import no_collection
    from shardwise.search.loss import time_to_loss
    from shardwise.search.whynot import why_not
    from shardwise.view.review import Told

    job, critical = asked.job, critical_batch_tokens
    with terminal.working("explain"), no_collection():
        return Told(
            explanation=explain(job, found, limits) if found.best else None,
            nothing=None if found.best else nothing_fits(job, found),
            why_not=None if asked.layout is None else why_not(job, asked.layout, found),
            critical_batch_tokens=critical,
            loss=()
            if critical is None
            else tuple(time_to_loss(c.step.total_s, job.tokens, critical) for c in found.best),
        )


def elsewhere(job: Job, layout: Layout, mfu: str, levels: bool, stacks: bool) -> Others:
    """The same layout at every ZeRO level and under every stack, as far as that is asked."""
    from shardwise.view.review import Others

    return Others(
        levels=tuple(at_levels(job, layout, mfu)) if levels else (),
        stacks=tuple(under_stacks(job, layout, mfu)) if stacks else (),
    )


def at_levels(job: Job, layout: Layout, mfu: str = "exact") -> list[AtLevel]:
    """The same layout at every ZeRO level that its stack offers, from none on."""
    from shardwise.account.compute import flops_per_token
    from shardwise.account.memory import memory_of
    from shardwise.plan.rules import findings
    from shardwise.simulate.step import step_time
    from shardwise.view.review import AtLevel

    found: list[AtLevel] = []
    for level in sorted({0, *job.stack.zero}):
        one = _at_level(layout, level)
        if one.zero != level or findings(one, job):
            continue
        fullest = max(memory_of(job, one), key=lambda m: m.total_bytes)
        step = replace(step_time(job, one), model_flops=flops_per_token(job.model, job.seq_len, mfu) * job.tokens)
        found.append(AtLevel(one, fullest, job.cluster.device.usable_bytes, step))
    return found


def _at_level(layout: Layout, level: int) -> Layout:
    """Over the same ranks; over all that hold the same, where the layout cuts no state."""
    if not level:
        return replace(layout, dp_replicate=layout.dp, dp_shard=1, zero=0)
    cut = {} if layout.zero else {"dp_replicate": 1, "dp_shard": layout.dp}
    return replace(layout, **cut, zero=level)


def under_stacks(job: Job, layout: Layout, mfu: str = "exact") -> list[UnderStack]:
    """The same layout under every known software stack: what it takes, or why it does not exist there. A stack without
    its ZeRO level is asked for the nearest one that cuts more, else less."""
    from shardwise.account.compute import flops_per_token
    from shardwise.model.hf import from_config, to_config
    from shardwise.plan.plan import find_stack
    from shardwise.plan.rules import findings
    from shardwise.plan.stack import known_stacks, under
    from shardwise.search.solve import evaluate
    from shardwise.view.review import UnderStack

    plain = from_config(to_config(job.model), job.model.name)
    found: list[UnderStack] = []
    for name in dict.fromkeys((job.stack.name, *known_stacks())):
        stack = job.stack if name == job.stack.name else find_stack(name)
        own = replace(job, model=under(plain, stack), stack=stack)
        layouts = [layout, *_other_levels(layout, stack)]
        legal = [one for one in layouts if not findings(one, own)]
        if not legal:
            found.append(UnderStack(stack, None, tuple(findings(layout, own))))
            continue
        one = evaluate(own, legal[0])
        counted = replace(one.step, model_flops=flops_per_token(own.model, own.seq_len, mfu) * own.tokens)
        found.append(UnderStack(stack, replace(one, step=counted)))
    return found


def _other_levels(layout: Layout, stack: Stack) -> list[Layout]:
    """The layout at the ZeRO levels that a stack offers, where it does not offer its own."""
    if layout.zero in stack.zero:
        return []
    levels = sorted(stack.zero, key=lambda level: (level < layout.zero, abs(level - layout.zero)))
    return [_at_level(layout, level) for level in levels]
