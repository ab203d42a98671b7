"""Request and Review: what is asked, all that is known of one layout, and the questions that every view asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardwise.cluster import Cluster
from shardwise.collective import Collective, Kind, Ledger, Phase
from shardwise.mesh import AXES
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.results import MemoryBreakdown, StepTime
from shardwise.schedule import Timeline
from shardwise.schedule.table import Schedule

if TYPE_CHECKING:
    from shardwise.search.solve import Candidate

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
    """What is asked; `assumed` says what was left open, and how it was filled in."""

    job: Job
    layout: Layout | None = None
    assumed: tuple[str, ...] = ()


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


def ledger_rows(ledger: Ledger, cluster: Cluster) -> list[LedgerRow]:
    """The ledger summed over modules: mesh axes in order from the innermost, the largest payload first."""
    sums: dict[tuple[str, str, str, int, str], list[int]] = {}
    for entry, count in ledger.items():
        key = (entry.key.axis, str(entry.key.phase), str(entry.kind), len(entry.ranks), link_of(cluster, entry))
        total = sums.setdefault(key, [0, 0])
        total[0] += count
        total[1] += count * entry.payload_bytes
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
