"""Why a search came out as it did, in plain sentences: what binds the winner, which rules of thumb it follows, how far
the field's recipe is behind, what the nearest layouts lack, and who consumes the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rules import findings
from shardwise.plan.runs import runs_here
from shardwise.results import Finding, StepTime
from shardwise.search import phrases
from shardwise.search.advice import Advice, advice
from shardwise.search.limits import Limits
from shardwise.search.neighbours import Change, Field, Near, changed
from shardwise.search.recipe import field_recipe
from shardwise.search.solve import Candidate, SearchResult, family
from shardwise.search.space import RECOMPUTE as WAYS
from shardwise.simulate.stage import GATHER, REDUCE
from shardwise.simulate.step import BUBBLE, OPTIMIZER, TRANSFER
from shardwise.simulate.unit import COMPUTE, CP, EP, RECOMPUTE, TP

MAX_TOO_LARGE = 4
MAX_ILLEGAL = 2
"""Rejected layouts that are named."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A layout against the winner: `gap` is the share of the winner's step that it takes longer."""

    candidate: Candidate
    gap: float
    text: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that is not among the best, and what it lacks. `gap` as in Comparison, below 0 where it would be faster;
    None where no time can be given, because it breaks a rule."""

    layout: Layout
    gap: float | None
    over_bytes: int
    findings: tuple[Finding, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """`runs`: why our own runtime does not run the winner; empty where it does."""

    limit: str
    advice: tuple[Advice, ...]
    recipe: Comparison | None
    rejected: tuple[Rejected, ...]
    batch: str
    runs: tuple[Finding, ...]


def explain(job: Job, found: SearchResult, limits: Limits | None = None) -> Explanation:
    """Of a search that found something. Raises ValueError where nothing fits: `fitting.nothing_fits` has that."""
    if not found.best:
        raise ValueError("nothing fits: there is no winner to explain")
    winner = found.best[0]
    near = Field(job, winner)
    return Explanation(
        limit=limit(job, winner),
        advice=advice(near, winner, limits or Limits()),
        recipe=compare_recipe(near, winner),
        rejected=rejected(near, winner.layout),
        batch=batch(job, winner.layout),
        runs=tuple(runs_here(winner.layout, job)),
    )


# ------------------------------------------------------------------------------------------------- what binds the step


def limit(job: Job, winner: Candidate) -> str:
    """What the step is made of, and which resource binds it."""
    step = winner.step
    parts = sorted(((s, cause) for cause, s in step.parts_s.items() if s >= 0.01 * step.total_s), reverse=True)
    said = phrases.listed([f"{phrases.percent(s / step.total_s)} {phrases.CAUSES[cause]}" for s, cause in parts])
    use = f"{phrases.size(winner.peak_bytes)} of {phrases.size(winner.capacity_bytes)}"
    made = f"A step takes {phrases.seconds(step.total_s)}: {said}; the fullest rank needs {use}."
    return f"{made} {_bound(job, winner.layout, step)}"


def _bound(job: Job, layout: Layout, step: StepTime) -> str:
    """How far computing is from the data sheet, and the resource behind the largest cost beside it."""
    computing = step.mfu * step.total_s / step.parts_s[COMPUTE]
    rate = f"Computing reaches {phrases.percent(computing)} of the data sheet's peak"
    costs = {c: s for c, s in step.parts_s.items() if c != COMPUTE}
    cause = max(costs, key=lambda c: costs[c])
    if costs[cause] < 0.01 * step.total_s:
        return f"{rate} and binds the step: nothing else costs 1 %."
    return f"{rate}; the largest cost beside it is {phrases.CAUSES[cause]}, bound by {_resource(job, layout, cause)}."


def _resource(job: Job, layout: Layout, cause: str) -> str:
    """What a cause takes its time from."""
    stride = phrases.strides(layout)
    groups = {
        TP: ("tp", [(1, layout.tp)]),
        CP: ("cp", [(stride["cp"], layout.cp)]),
        EP: ("ep", [(1, layout.ep * layout.etp)]),
        GATHER: ("dp_shard", [(stride["cp"], layout.cp), (stride["dp_shard"], layout.dp_shard)]),
        REDUCE: ("dp", [(stride[axis], getattr(layout, axis)) for axis in ("cp", "dp_shard", "dp_replicate")]),
        TRANSFER: ("pp", [(stride["pp"], layout.pp)]),
    }
    if cause == BUBBLE:
        return (
            f"the {job.micro_batches(layout):,} micro-batches that the batch gives {phrases.count(layout.pp, 'stage')}"
        )
    if cause == RECOMPUTE:
        return "the memory that it spares"
    if cause == OPTIMIZER:
        return "the bandwidth of the devices' memory"
    axis, group = groups[cause]
    where = phrases.place(job.cluster, group, ring=cause not in (EP, TRANSFER))
    return f"the network: {axis}={getattr(layout, axis):,} {where}"


# ------------------------------------------------------------------------------------------------------- comparisons


def compare_recipe(near: Field, winner: Candidate) -> Comparison | None:
    """The recipe's layout against the winner."""
    found = field_recipe(near.job, near)
    if found is None:
        return None
    gap = found.step.total_s / winner.step.total_s - 1
    if family(found.layout) == family(winner.layout):
        return Comparison(found, gap, "The field's recipe comes to the same layout.")
    return Comparison(found, gap, f"The field's recipe gives {found.layout}, which {phrases.slower(gap)}.")


def rejected(near: Field, layout: Layout) -> tuple[Rejected, ...]:
    """Layouts one change from the winner that would be faster but do not fit, those that lack least first; then some
    that break a rule."""
    ways = [x for change in _changes(near.job, layout) for x in changed(near.job, layout, change) if x != layout]
    legal = near.screen(ways)
    faster = [n for n in legal if not n.fits and near.slower(n) < -phrases.SAME]
    closest = [near.exact(n) for n in sorted(faster, key=lambda n: n.over_bytes)[:MAX_TOO_LARGE]]
    found = [_too_large(near, n, layout) for n in closest if not n.fits]
    kept = {n.layout for n in legal}
    illegal = [x for x in dict.fromkeys(ways) if x not in kept]
    return (*found, *(_illegal(near.job, x, layout) for x in illegal[:MAX_ILLEGAL]))


def _changes(job: Job, layout: Layout) -> Iterator[Change]:
    """One key at a time, to what may cost less where memory and the rules allow it."""
    yield from ({"recompute": way} for way in WAYS if way not in (layout.recompute, "full"))
    yield from ({"zero": level} for level in (0, *job.stack.zero) if level < layout.zero)
    degrees = {key: int(getattr(layout, key)) for key in ("tp", "cp", "pp", "mb", "ep")}
    yield from ({key: n // 2} for key, n in degrees.items() if n % 2 == 0 and key != "mb")
    yield from ({key: 2 * n} for key, n in degrees.items() if key != "ep" or job.model.experts)


def _too_large(near: Field, one: Near, winner: Layout) -> Rejected:
    gap = near.slower(one)
    text = (
        f"{phrases.difference(one.layout, winner)} would be {phrases.percent(gap)} faster, but needs "
        f"{phrases.size(one.peak_bytes)}, {phrases.size(one.over_bytes)} more than a device has."
    )
    return Rejected(one.layout, gap, one.over_bytes, (), text)


def _illegal(job: Job, layout: Layout, winner: Layout) -> Rejected:
    faults = tuple(findings(layout, job))
    return Rejected(
        layout, None, 0, faults, f"{phrases.difference(layout, winner)} breaks a rule: {faults[0].message}."
    )


# ---------------------------------------------------------------------------------------------------------- the batch


def batch(job: Job, layout: Layout) -> str:
    """Who consumes the batch, and how far data parallelism could go. The search never raises it."""
    m, n, replica = job.micro_batches(layout), job.global_batch, layout.tp * layout.cp * layout.pp
    use = f"dp {layout.dp:,} x micro-batch {layout.mb:,} x {m:,} accumulated"
    return (
        f"The batch of {phrases.count(n, 'sequence')} ({job.tokens:,} tokens) is {use}. It feeds at most dp={n:,}, "
        f"a sequence each: {phrases.count(n * replica, 'device')} with replicas of {replica:,}."
    )
