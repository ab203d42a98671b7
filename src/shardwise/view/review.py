"""Request and Review: what is asked, all that is known of one layout, and the questions that every view asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardwise.cluster import Cluster
from shardwise.collective import Collective, Kind, Ledger, Phase
from shardwise.mesh import AXES
from shardwise.model.spec import Cut
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.settings import TrainSettings
from shardwise.plan.stack import Stack
from shardwise.results import Finding, MemoryBreakdown, StepTime
from shardwise.schedule import Timeline
from shardwise.schedule.table import Schedule

if TYPE_CHECKING:
    from shardwise.search.explain import Explanation
    from shardwise.search.fitting import NothingFits
    from shardwise.search.loss import TimeToLoss
    from shardwise.search.solve import Candidate
    from shardwise.search.whynot import WhyNot

THIN = 0.05
"""Headroom below this share of the capacity is called thin: the assumed parts alone are as uncertain."""

TRAVELS: Mapping[str, str] = {
    Phase.F: "activations",
    Phase.B: "activation gradients",
    Phase.W: "activation gradients",
    Phase.RECOMPUTE: "activations",
    Phase.UNSHARD: "parameters",
    Phase.REDUCE: "parameter gradients",
    Phase.TIE: "gradient of the tied weight",
    Phase.SEND: "activations and their gradients",
    Phase.RECV: "activations and their gradients",
    Phase.COUNT: "count of tokens",
    Phase.REPORT: "loss",
    Phase.NORM: "clip norm",
    Phase.GATHER: "parameters",
}
"""What a collective of a phase carries."""


def travels(phase: str, kind: str) -> str:
    """The inputs that products saved as shards are gathered again in their backward, beside the gradients."""
    also = ", saved inputs" if kind == Kind.ALL_GATHER and phase in (Phase.B, Phase.W) else ""
    return TRAVELS.get(phase, phase) + also


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked; `assumed` says what was left open, and how it was filled in; `mfu` names the convention of the
    model FLOPs that MFU is made of; `train` is a plan file's, which another layout of it keeps."""

    job: Job
    layout: Layout | None = None
    assumed: tuple[str, ...] = ()
    mfu: str = "exact"
    train: TrainSettings | None = None


@dataclass(frozen=True, slots=True)
class UnderStack:
    """One layout under one software stack: what it takes, or the rules that it breaks there."""

    stack: Stack
    found: Candidate | None
    broken: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Review:
    """One layout of one job. `memory` has an entry for each pipeline rank, `ledger` is that of global rank `rank`.

    `remedies` are layouts one change away that fit, where this one does not.
    """

    job: Job
    layout: Layout
    memory: Sequence[MemoryBreakdown]
    step: StepTime
    flops_per_token: float
    rank: int
    ledger: Ledger
    schedule: Schedule
    timeline: Timeline
    remedies: Sequence[Candidate] = ()

    @property
    def fullest(self) -> MemoryBreakdown:
        """The pipeline rank that needs most."""
        return max(self.memory, key=lambda m: m.total_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self.job.cluster.device.usable_bytes

    @property
    def headroom_bytes(self) -> int:
        """What the fullest rank leaves; negative where the layout does not fit."""
        return self.capacity_bytes - self.fullest.total_bytes

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0


@dataclass(frozen=True, slots=True)
class AtLevel:
    """One layout at one ZeRO level: its fullest rank, and its step."""

    layout: Layout
    memory: MemoryBreakdown
    capacity_bytes: int
    step: StepTime


@dataclass(frozen=True, slots=True)
class Others:
    """The same layout elsewhere: at the ZeRO levels, under the software stacks; empty where that was not asked."""

    levels: tuple[AtLevel, ...] = ()
    stacks: tuple[UnderStack, ...] = ()


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of a search beside its ranking. `explanation` where something fits, `nothing` where nothing does;
    `loss` has an entry for each layout of the ranking where a critical batch was given."""

    explanation: Explanation | None = None
    nothing: NothingFits | None = None
    why_not: WhyNot | None = None
    critical_batch_tokens: int | None = None
    loss: tuple[TimeToLoss, ...] = ()


class LedgerRow(NamedTuple):
    """Collectives of one axis, phase and kind on one rank: how many a step, and the bytes of their payloads."""

    axis: str
    phase: str
    kind: str
    travels: str
    ranks: int
    link: str
    issued: int
    payload_bytes: int
    alone_s: float
    """seconds of all of them with nothing to hide them"""


def ledger_rows(ledger: Ledger, cluster: Cluster) -> list[LedgerRow]:
    """The ledger summed over modules: mesh axes in order from the innermost, the largest payload first."""
    sums: dict[tuple[str, str, str, int, str], tuple[int, int, float]] = {}
    known: dict[tuple[tuple[int, ...], str, int], float] = {}
    for entry, count in ledger.items():
        key = (entry.key.axis, str(entry.key.phase), str(entry.kind), len(entry.ranks), link_of(cluster, entry))
        same = (entry.ranks, str(entry.kind), entry.payload_bytes)
        if same not in known:
            known[same] = alone_s(cluster, entry)
        issued, payload, seconds = sums.get(key, (0, 0, 0.0))
        sums[key] = issued + count, payload + count * entry.payload_bytes, seconds + count * known[same]
    rows = [
        LedgerRow(axis, phase, kind, travels(phase, kind), ranks, link, *total)
        for (axis, phase, kind, ranks, link), total in sums.items()
    ]
    return sorted(rows, key=lambda row: (_axis_order(row.axis), -row.payload_bytes))


def link_of(cluster: Cluster, entry: Collective) -> str:
    """The innermost level of the network that joins all ranks of a collective."""
    low, high = min(entry.ranks), max(entry.ranks)
    inside = (level.name for level in cluster.levels if low // level.size == high // level.size)
    return next(inside, cluster.levels[-1].name)


def alone_s(cluster: Cluster, entry: Collective) -> float:
    """Seconds of one collective that nothing hides."""
    from shardwise.simulate.network import collective_s, links, pair_s

    if entry.kind in (Kind.SEND, Kind.RECV):
        return pair_s(cluster, entry.payload_bytes, entry.ranks[0], entry.ranks[1], 1)
    return float(collective_s(entry.kind, entry.payload_bytes, links(cluster, *_factors(entry.ranks))))


def _factors(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """A group as (stride, size), innermost first: groups of a mesh are progressions of progressions."""
    found: list[tuple[int, int]] = []
    while len(ranks) > 1:
        stride, size = ranks[1] - ranks[0], 1
        while size < len(ranks) and ranks[size] - ranks[0] == size * stride:
            size += 1
        found.append((stride, size))
        ranks = ranks[::size]
    return found


class Flops(NamedTuple):
    """Hardware FLOPs a token of the whole model: forward, input gradients, weight gradients, and what is recomputed."""

    f: float
    b: float
    w: float
    recompute: float

    @property
    def total(self) -> float:
        return sum(self)


def hardware_flops(job: Job, layout: Layout) -> Flops:
    """What a token costs on the device: the backward of fused attention runs five products, the forward two."""
    from shardwise.account.compute import unit_flops, units_of

    model = job.model
    cut = Cut(job.seq_len, 1, False, job.precision.compute_bytes, job.precision.accumulate_bytes, seq_len=job.seq_len)
    f = b = w = again = 0.0
    for kind, units in units_of(model).items():
        remade = {op.name for op in model.block(kind).again(layout.recompute)}
        for op in unit_flops(model, kind, cut, job.seq_len):
            f, b, w = f + units * op.f, b + units * op.b, w + units * op.w
            again += units * op.f * (op.name in remade)
    return Flops(*(float(x) / job.seq_len for x in (f, b, w, again)))


class Logits(NamedTuple):
    """Of one micro-batch on a rank with the head: the logits, and all that the loss holds at its fullest moment."""

    own_bytes: int
    at_loss_bytes: int


def logits_of(job: Job, layout: Layout) -> Logits | None:
    """None for a model without a vocabulary."""
    cut, model = job.cut(layout), job.model
    for block in model.blocks:
        made = {d.name: d for op in block.ops for d in op.outputs}
        for op in block.ops:
            if op.kind == "cross_entropy":
                own = int(cut.bytes(model, made[op.inputs[0]]))
                working = (sum(int(cut.bytes(model, t)) for t in moment.tensors) for moment in op.scratch_f)
                kept = sum(int(cut.bytes(model, t)) for t in op.keeps)
                return Logits(own, own + kept + max(working, default=0))
    return None


def families(found: Sequence[Candidate]) -> list[tuple[Candidate, int]]:
    """The best of each family, and how many others of it are among `found`.

    A family is one layout but for how its data-parallel ranks part into dp_replicate x dp_shard.
    """
    from shardwise.search.solve import family

    kept: dict[Layout, tuple[Candidate, int]] = {}
    for one in found:
        best, others = kept.get(family(one.layout), (one, -1))
        kept[family(one.layout)] = (best, others + 1)
    return list(kept.values())


def _axis_order(axis: str) -> tuple[int, str]:
    inner_first = AXES[::-1]
    return (inner_first.index(axis) if axis in inner_first else len(inner_first), axis)


NO_COMMUNICATION = ("compute", "recompute", "bubble", "optimizer")
"""Parts of a step in which no rank waits for the network; all others are exposed communication."""


def communication_s(step: StepTime) -> float:
    """Seconds in which the devices wait for the network alone."""
    return sum(seconds for name, seconds in step.parts_s.items() if name not in NO_COMMUNICATION)


def bubble_s(step: StepTime) -> float:
    """Seconds in which the pipeline leaves the busiest rank idle."""
    return step.parts_s.get("bubble", 0.0)
