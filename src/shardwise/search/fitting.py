"""What makes a layout fit, and what comes closest where nothing does.

Nothing is estimated: every way that is named was evaluated, and fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.account.memory import memory_of
from shardwise.cluster import parse_cluster
from shardwise.cluster.device import Cluster, ClusterError
from shardwise.plan.job import Job
from shardwise.plan.layout import RECOMPUTED, Layout
from shardwise.plan.rules import findings
from shardwise.results import GRADIENTS, OPTIMIZER, PARAMETERS, MemoryBreakdown
from shardwise.search import phrases
from shardwise.search.neighbours import Change, Field, changed
from shardwise.search.recipe import field_recipe
from shardwise.search.solve import Candidate, SearchResult

MAX_TIMES = 64
"""More of the same nodes than so many times are not asked for."""

NAMED = 3
"""Ways of the same job that are named."""

STATE = (PARAMETERS, GRADIENTS, OPTIMIZER)
"""Parts of memory that more ranks share at best evenly: what they exceed tells how many more it takes at least."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make it fit: a layout, of this job or of one that is changed as the text says."""

    text: str
    candidate: Candidate
    job: Job


@dataclass(frozen=True, slots=True)
class Excess:
    """How far a layout is from fitting: the fullest rank's peak, the part that is largest there, what is too much."""

    memory: MemoryBreakdown
    part: str
    over_bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class NothingFits:
    """`closest`: the layout least over; None where no layout is legal at all."""

    closest: Candidate | None
    excess: Excess | None
    text: str
    ways: tuple[Way, ...]


def excess(job: Job, layout: Layout) -> Excess:
    """Of a legal layout; `over_bytes` is below 0 where it fits."""
    capacity = job.cluster.device.usable_bytes
    at = max(memory_of(job, layout), key=lambda memory: memory.total_bytes)
    parts, over = at.proved | at.assumed, at.total_bytes - capacity
    part = max(parts, key=lambda name: parts[name])
    margin = f"{phrases.size(abs(over))} {'more' if over > 0 else 'less'} than the {phrases.size(capacity)} of a device"
    text = (
        f"Pipeline rank {at.rank} peaks at {phrases.size(at.total_bytes)}, {margin}, "
        f"in the {phrases.action(at.action)}; its largest part is {part}, {phrases.size(parts[part])}."
    )
    return Excess(at, part, over, text)


# ------------------------------------------------------------------------------------------------ of the same job


def remedies(job: Job, layout: Layout) -> list[Candidate]:
    """Layouts one change away that are legal and fit, the fastest first."""
    near = Field(job)
    ways = [x for change in _one_change(job, layout) for x in changed(job, layout, change) if x != layout]
    return [near.candidate(n) for n in near.screen(ways) if n.fits]


def _one_change(job: Job, layout: Layout) -> Iterator[Change]:
    """Recompute more, cut the state further, smaller micro-batches, or more ranks for a replica."""
    if layout.recompute != "full":
        kept = [name for name in RECOMPUTED if name not in layout.recomputes]
        yield from ({"recompute": ",".join(sorted({*layout.recomputes, name}))} for name in kept)
        yield {"recompute": ",".join(RECOMPUTED)}
        yield {"recompute": "full"}
    yield from ({"zero": level} for level in job.stack.zero if level > layout.zero)
    if layout.zero and layout.dp_replicate > 1:
        yield {"dp_replicate": 1}
    if layout.mb > 1:
        yield from ({"mb": layout.mb // 2}, {"mb": 1})
    for key in ("tp", "pp", "cp"):
        yield from ({key: times * getattr(layout, key)} for times in (2, 4))
    if layout.tp > 1 and not layout.sp:
        yield {"sp": 1}
    if job.model.experts:
        yield from ({"ep": times * layout.ep} for times in (2, 4, 8))


# ----------------------------------------------------------------------------------------------------- nothing fits


def nothing_fits(job: Job, found: SearchResult) -> NothingFits:
    """Of a search in which nothing fits: what comes closest, and the cheapest ways to make it fit."""
    if found.closest is None:
        alone = Layout(dp_replicate=job.cluster.world_size)
        broken = phrases.listed([fault.message for fault in findings(alone, job)])
        return NothingFits(None, None, f"No layout keeps the rules. Without model parallelism: {broken}.", ())
    layout = found.closest.layout
    over = excess(job, layout)
    ways = [_way(phrases.difference(c.layout, layout), c, job) for c in remedies(job, layout)[:NAMED]]
    text = f"Nothing fits. {layout} comes closest. {over.text}"
    return NothingFits(found.closest, over, text, (*ways, *_other_jobs(job, layout, over.memory)))


def _way(what: str, one: Candidate, job: Job) -> Way:
    return Way(f"{what}: fits, {phrases.seconds(one.step.total_s)} a step.", one, job)


def _other_jobs(job: Job, closest: Layout, memory: MemoryBreakdown) -> Iterator[Way]:
    """The fewest times as many nodes, by powers of two, and half the sequence's length."""
    state = sum(memory.proved.get(part, 0) for part in STATE)
    times = 2
    while times * job.cluster.device.usable_bytes < state:
        times *= 2
    while times <= MAX_TIMES and (larger := enlarged(job.cluster, times)) is not None:
        more = replace(job, cluster=larger)
        if one := _fitting(more, closest):
            devices = phrases.count(larger.world_size, "device")
            yield _way(f"{times} times as many {phrases.domain(job.cluster)}s, {devices}, with {one.layout}", one, more)
            break
        times *= 2
    shorter = replace(job, seq_len=job.seq_len // 2, global_batch=2 * job.global_batch)
    if job.seq_len % 2 == 0 and (one := _fitting(shorter, closest)):
        yield _way(f"sequences of {shorter.seq_len:,} tokens, with {one.layout}", one, shorter)


def _fitting(job: Job, closest: Layout) -> Candidate | None:
    """The faster of the field's recipe, and of what came closest with its data parallelism on all devices."""
    near = Field(job)
    found = [near.candidate(n) for n in near.screen(changed(job, closest, {})) if n.fits]
    recipe = field_recipe(job, near)
    return min([*found, *([recipe] if recipe else [])], key=lambda one: one.step.total_s, default=None)


def enlarged(cluster: Cluster, times: int) -> Cluster | None:
    """So many times as many nodes of the same kind; None where it is not known how they are joined, or for too many."""
    nodes, per_node, name = cluster.nodes * times, cluster.devices_per_node, cluster.device.name
    torus = cluster.levels[0].torus
    spelled = f"{nodes}x{name}:{'x'.join(map(str, torus))}" if torus else f"{nodes}x{per_node}x{name}"
    try:
        if len(cluster.levels) == 1:
            return parse_cluster(spelled)
        levels = (*cluster.levels[:-1], replace(cluster.levels[-1], size=nodes * per_node))
        return replace(cluster, name=spelled, nodes=nodes, levels=levels)
    except ClusterError:
        return None
