"""Rules of thumb of the field, apart from legality: does a layout follow them, and what is that worth here?

Every rule looks for the nearest layout that does the opposite: one or two keys changed, everything else that it leaves
open set as is best for it. The numbers are the model's, the rules the field's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.runs import runs_here
from shardwise.search import phrases
from shardwise.search.limits import Limits
from shardwise.search.neighbours import ALONE, PIPELINES, STATE, Change, Field, Near, Options, changed
from shardwise.search.recipe import LONG_TOKENS
from shardwise.search.solve import Candidate


@dataclass(frozen=True, slots=True)
class Advice:
    """A rule of thumb: whether the layout follows it, what that buys or costs, and the nearest layout that does the
    opposite, where there is one."""

    id: str
    rule: str
    followed: bool
    text: str
    alternative: Candidate | None


@dataclass(frozen=True, slots=True)
class Ask:
    """The layout that is asked about, with its neighbours."""

    near: Field
    center: Candidate
    limits: Limits

    @property
    def job(self) -> Job:
        return self.near.job

    @property
    def layout(self) -> Layout:
        return self.center.layout

    def nearest(self, changes: Iterable[Change], options: Options = STATE) -> Near | None:
        """The best of the layouts that these changes lead to."""
        ways = [x for change in changes for x in changed(self.job, self.layout, change, options)]
        return self.near.nearest(x for x in ways if x != self.layout)


@dataclass(frozen=True, slots=True)
class Said:
    """What one rule finds: `here` says what the layout does, `opposite` is the nearest layout that does not do it."""

    followed: bool
    here: str
    opposite: Near | None


def _always(job: Job) -> bool:
    del job
    return True


@dataclass(frozen=True, slots=True)
class Guideline:
    """`look` says what a layout does and finds the nearest one that does the opposite."""

    id: str
    rule: str
    look: Callable[[Ask], Said]
    applies: Callable[[Job], bool] = _always


def advice(near: Field, center: Candidate, limits: Limits) -> tuple[Advice, ...]:
    """Every rule that says something of this model on this cluster. `near` is around `center`."""
    ask = Ask(near, center, limits)
    return tuple(_advice(ask, rule) for rule in GUIDELINES if rule.applies(ask.job))


def _advice(ask: Ask, rule: Guideline) -> Advice:
    said = rule.look(ask)
    if said.opposite is None:
        return Advice(rule.id, rule.rule, said.followed, said.here, None)
    other = ask.near.candidate(said.opposite)
    return Advice(rule.id, rule.rule, said.followed, f"{said.here} {_worth(ask, said.followed, other)}", other)


def _worth(ask: Ask, followed: bool, other: Candidate) -> str:
    """What following or breaking the rule is worth."""
    gap = other.step.total_s / ask.center.step.total_s - 1
    change = phrases.difference(other.layout, ask.layout)
    if not other.fits:
        lacks = phrases.size(other.peak_bytes - other.capacity_bytes)
        time = "as fast" if abs(gap) < phrases.SAME else f"{phrases.percent(gap)} {'slower' if gap > 0 else 'faster'}"
        return f"{change} would be {time}, but needs {lacks} more than a device has."
    if abs(gap) < phrases.SAME:
        return f"{change} takes as long: the rule makes no difference here."
    if gap < 0:
        beyond = "" if _allowed(ask, other.layout) else ", but is beyond the limits of this search"
        return f"{change} {phrases.slower(gap)}{beyond}."
    word = "Following" if followed else "Breaking"
    return f"{change} {phrases.slower(gap)}. {word} the rule saves that."


def _allowed(ask: Ask, layout: Layout) -> bool:
    """Whether a search within these limits could have found a layout."""
    limits = ask.limits
    if limits.runnable and runs_here(layout, ask.job):
        return False
    keys = {*limits.pins, *limits.forbids}
    values = {key: int(v) if isinstance(v := getattr(layout, key), bool) else v for key in keys}
    return all(limits.allows(key, value) for key, value in values.items())


# -------------------------------------------------------------------------------------------------------- the rules


def _fast_domain(ask: Ask) -> Said:
    x, cluster = ask.layout, ask.job.cluster
    fast, where = cluster.devices_per_node, phrases.domain(cluster)
    inner = {"tp": x.tp, "ep": x.ep * x.etp}
    if cluster.nodes == 1:
        here = f"All {fast:,} devices are one {where}: no group leaves it."
        return Said(True, here, ask.nearest([{"tp": 2 * x.tp}, *_halved(x, "tp")]))
    said = [f"{key}={n} {phrases.place(cluster, [(1, n)], ring=key == 'tp')}" for key, n in inner.items() if n > 1]
    here = f"{phrases.listed(said)}." if said else f"No layer is cut, so none of its groups leaves a {where}."
    if max(inner.values()) <= fast:
        wider: list[Change] = [{"tp": 2 * fast}, *({"ep": n * fast} for n in (2, 4) if x.ep > 1)]
        return Said(True, here, ask.nearest(wider))
    etp = min(x.etp, fast)
    narrower: list[Change] = [{"tp": min(x.tp, fast), "ep": ep, "etp": etp} for ep in _down(x.ep) if ep * etp <= fast]
    return Said(False, here, ask.nearest(narrower[:2]))


def _across_nodes(ask: Ask) -> Said:
    x = ask.layout
    holds = _held_by_a_node(ask)
    if x.pp == 1:
        here = "No pipeline: a node can hold the model." if holds else "No pipeline, though no node can hold the model."
        return Said(holds, here, ask.nearest([{"pp": 2}, {"pp": 4}], PIPELINES))
    where = phrases.place(ask.job.cluster, [(phrases.strides(x)["pp"], x.pp)], ring=False)
    why = "a node could hold the whole model" if holds else "no node can hold the model"
    return Said(not holds, f"The pipeline of {x.pp} stages {where}; {why}.", ask.nearest([{"pp": 1}]))


def _held_by_a_node(ask: Ask) -> bool:
    """Whether the model fits with its state cut within each node alone and everything recomputed."""
    x, job = ask.layout, ask.job
    whole: Change = {"pp": 1, "zero": min(3, max(job.stack.zero, default=0)), "mb": 1, "recompute": "full"}
    ranks = max(1, job.cluster.devices_per_node // (x.tp * x.cp))
    ways = changed(job, x, whole)
    held = [replace(y, dp_replicate=y.dp // ranks, dp_shard=ranks) for y in ways if y.zero and y.dp % ranks == 0]
    return any(near.fits for near in ask.near.screen(held))


def _experts_first(ask: Ask) -> Said:
    x = ask.layout
    followed = x.etp == 1 and (x.ep >= x.tp or x.ep == ask.job.model.experts)
    cut = f"each is cut over etp={x.etp}" if x.etp > 1 else "none is cut"
    here = f"The experts are spread over ep={x.ep}, {cut}; tp={x.tp}."
    if followed:
        fewer = max(1, x.ep // 2)
        return Said(True, here, ask.nearest([{"ep": fewer, "tp": 2 * x.tp, "etp": etp} for etp in (1, 2)]))
    spread: Change = {"ep": x.ep * x.etp, "etp": 1}
    wider: list[Change] = [{**half, "ep": 2 * x.ep, "etp": 1} for half in _halved(x, "tp")]
    return Said(False, here, ask.nearest([spread, *wider]))


def _long_context(ask: Ask) -> Said:
    x, tokens = ask.layout, ask.job.seq_len
    whole = f"Each rank has sequences of {tokens:,} tokens whole."
    cut = f"cp={x.cp} leaves each rank {tokens // x.cp:,} of a sequence's {tokens:,} tokens."
    if x.cp > 1:
        return Said(tokens > LONG_TOKENS, cut, ask.nearest([{"cp": 1}, {"cp": 1, "tp": 2 * x.tp}]))
    return Said(tokens <= LONG_TOKENS, whole, ask.nearest([{"cp": 2}]))


def _data_parallel_last(ask: Ask) -> Said:
    x = ask.layout
    here = f"A replica takes {phrases.count(x.tp * x.cp * x.pp, 'device')}, which leaves dp={x.dp:,}."
    smaller = [change for key in ("tp", "cp", "pp") for change in _halved(x, key)]
    if not smaller:
        return Said(True, here, ask.nearest([{"tp": 2}, {"cp": 2}]))
    found = ask.nearest(smaller)
    if found is None:
        return Said(True, f"{here} No smaller one is legal: the batch feeds dp={ask.job.global_batch:,} at most.", None)
    return Said(not found.fits, here, found)


def _batch_and_memory(ask: Ask) -> Said:
    x, m = ask.layout, ask.job.micro_batches(ask.layout)
    steps = f"{m:,} micro-batches are accumulated" if m > 1 else "Nothing is accumulated"
    here = f"{steps}, with {phrases.count(x.mb, 'sequence')} each; recompute={x.recompute}."
    if x.recompute != "none":
        found = ask.nearest([{"recompute": "none"}], ALONE)
        return Said(found is None or not found.fits, here, found)
    return Said(True, here, ask.nearest([{"recompute": "full"}], ALONE))


def _halved(layout: Layout, key: str) -> list[Change]:
    """The change that halves a degree, where it is even."""
    degree = int(getattr(layout, key))
    return [{key: degree // 2}] if degree % 2 == 0 else []


def _down(degree: int) -> list[int]:
    """A degree, its half, a quarter .. as long as they are whole."""
    found = [degree]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found


def _switched(job: Job) -> bool:
    return job.cluster.levels[0].kind != "torus"


_PTD = "Narayanan et al. 2104.04473"
_MOE = "Megatron Core's MoE guide"

GUIDELINES: tuple[Guideline, ...] = (
    Guideline(
        "fast-domain",
        f"Tensor and expert parallelism stay inside the fast domain ({_PTD}, takeaway 1; {_MOE}).",
        _fast_domain,
    ),
    Guideline(
        "across-nodes",
        f"A model that no node can hold is laid over nodes by the pipeline, and no other ({_PTD}, takeaway 1).",
        _across_nodes,
        _switched,
    ),
    Guideline(
        "experts-first",
        f"Experts are spread before they are cut: expert before tensor parallelism ({_MOE}).",
        _experts_first,
        lambda job: bool(job.model.experts),
    ),
    Guideline(
        "long-context",
        f"Context parallelism is for sequences over {LONG_TOKENS:,} tokens (Megatron Core's parallelism guide).",
        _long_context,
    ),
    Guideline(
        "data-parallel-last",
        f"A replica takes no more devices than memory asks for, data parallelism the rest ({_PTD}, takeaway 2).",
        _data_parallel_last,
    ),
    Guideline(
        "batch-and-memory",
        "Accumulate where the batch asks for it, recompute only where memory does (Korthikanti et al. 2205.05198).",
        _batch_and_memory,
    ),
)
"""In the order in which the field applies them."""
