"""Seconds of units for one micro-batch on one rank, by cause: products and kernels, and communication by axis.

What of a communication is exposed: the part that the stack does not overlap, and of the overlapped part what the op's
own computing is too short for. Everything is a column that broadcasts: [k, 1, 1], with recomputation [k, r, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.account.columns import by_recompute
from shardwise.account.compute import unit_work, values_of
from shardwise.account.traffic import Traffic, issued, unit_traffic
from shardwise.account.units import most
from shardwise.cluster.topology import group_placement
from shardwise.collective import Kind, Phase
from shardwise.model.spec import Count
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.schedule.table import Op
from shardwise.simulate.cost import kernels_of
from shardwise.simulate.network import Links, collective_s, links

COMPUTE, RECOMPUTE, TP, CP, EP = (
    "compute",
    "recompute",
    "tp communication",
    "cp communication",
    "ep communication",
)

UNIT_CAUSES = (COMPUTE, RECOMPUTE, TP, CP, EP)

_AXES = {TP: ("tp",), CP: ("cp",), EP: ("ep", "etp")}
"""Causes of communication, and the axes that each is of."""

OPS = ("F", "B", "W")
"""An action BW takes B + W."""

Three = tuple[Count, Count, Count]
"""Seconds of F, B and W."""


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Of one kind of unit: seconds of F, B and W by cause."""

    parts: dict[str, Three]

    @property
    def total(self) -> Three:
        f, b, w = (sum(part[i] for part in self.parts.values()) for i in range(3))
        return f, b, w


@dataclass(frozen=True, slots=True)
class Timing:
    """What the units of a batch are timed with. `split`: W is an action of its own, and what it could have shared with
    B is communicated again; `pairs`: the experts' exchange of one micro-batch hides behind another one's computing."""

    job: Job
    batch: LayoutBatch
    split: bool
    pairs: bool

    def groups(self) -> dict[str, Links]:
        """The links of the axes along which units communicate."""
        b, cluster = self.batch, self.job.cluster
        return {
            "tp": links(cluster, (1, b.tp)),
            "cp": links(cluster, (b.tp, b.cp)),
            "ep": links(cluster, (b.etp, b.ep)),
            "etp": links(cluster, (1, b.etp)),
        }


def unit_seconds(timing: Timing) -> dict[str, UnitSeconds]:
    """Every kind of unit of the job's model."""
    groups = timing.groups()
    return {kind: UnitSeconds(_parts(_Kind.of(timing, kind, groups))) for kind in timing.job.model.kinds}


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of unit: F, B and W of each op, and of all ops together."""

    timing: Timing
    kind: str
    groups: dict[str, Links]
    ops: dict[str, Three]
    computed: Three
    core: Three
    """of its attention"""

    @staticmethod
    def of(timing: Timing, kind: str, groups: dict[str, Links]) -> _Kind:
        job, device = timing.job, kernels_of(timing.job)
        work = unit_work(job.model, kind, job.cuts(timing.batch), job.seq_len)
        ops = {w.name: device.op_s(w) for w in work}
        core = _summed([ops[w.name] for w in work if w.kind == "attention"])
        return _Kind(timing, kind, groups, ops, _summed(list(ops.values())), core)

    def traffic(self, way: str) -> tuple[Traffic, ...]:
        job = self.timing.job
        return unit_traffic(job.model, self.kind, job.cuts(self.timing.batch), way)

    def again(self, way: str) -> tuple[Count, ...]:
        """Seconds that recomputing adds to B: computing, and communication in the order of _AXES."""
        ops = [self.ops[op.name][0] for op in self.timing.job.model.block(self.kind).again(way)]
        repeated = [t for t in self.traffic(way) if t.phase is Phase.RECOMPUTE]
        core = self.core[0] if ops else 0.0
        return sum(ops), *(self.exposed(cause, repeated, core, 0.0) for cause in _AXES)

    def exposed(self, cause: str, traffic: list[Traffic], core: Count, computed: Count) -> Count:
        """Seconds of the collectives of a cause that neither attention nor other computing hides."""
        return _exposed(self.timing, cause, _axis_s(self.timing, traffic, cause, self.groups), core, computed)


def _summed(each: list[Three]) -> Three:
    f, b, w = (sum(three[i] for three in each) for i in range(3))
    return f, b, w


def _parts(of: _Kind) -> dict[str, Three]:
    timing = of.timing
    extra = by_recompute(timing.batch, of.again)
    traffic = of.traffic("none")
    f, b, w = of.computed
    acts = ((Op.F, f), (Op.B, b), (Op.W, w)) if timing.split else ((Op.F, f), (Op.BW, b + w))
    parts: dict[str, Three] = {COMPUTE: of.computed, RECOMPUTE: (0.0, extra[0], 0.0)}
    for cause, more in zip(_AXES, extra[1:], strict=True):
        seconds: list[Count] = [0.0, 0.0, 0.0]
        for i, (act, computed) in enumerate(acts):
            mine = [t for t in traffic if issued(t, act, timing.split)]
            seconds[i] = of.exposed(cause, mine, of.core[i], computed)
        joined = _joined_s(timing, of.kind) if cause == CP else 0.0
        parts[cause] = seconds[0] + joined, seconds[1] + more + joined, seconds[2]
    return parts


def _joined_s(timing: Timing, kind: str) -> Count:
    """Seconds of kernels, in F and as many in B, that put together what context parallelism computes in parts.

    Each further step of a ring adds what it attended to (in B, gradients of queries) to the sum so far, in the
    accumulation dtype, and starts another kernel. Heads exchanged for tokens are packed before and unpacked after;
    gathered keys are copied into one tensor.
    """
    job, batch = timing.job, timing.batch
    cut, device, block = job.cuts(batch), kernels_of(job), job.model.block(kind)
    tensors = values_of(block)
    total: Count = 0.0
    for op in block.ops:
        if op.kind == "attention":
            q, k, v, out = (cut.elements(job.model, tensors[n].dims) for n in (*op.inputs[:3], op.outputs[0].name))
            added = 3.0 * (batch.cp - 1) * out * cut.accumulate_bytes
            packed = 4.0 * (q + k + v + out) * cut.compute_bytes
            copied = 2.0 * (k + v) * batch.cp * cut.compute_bytes
            for i, (moved, starts) in enumerate(((added, 2 * (batch.cp - 1)), (packed, 8), (copied, 2))):
                seconds = moved / device.bytes_per_s + starts * device.launch_s
                total = total + (batch.cp > 1) * (batch.cp_kind == i) * seconds
    return total


def _axis_s(timing: Timing, traffic: list[Traffic], cause: str, groups: dict[str, Links]) -> Count:
    """Seconds of the collectives of a cause, none of them hidden."""
    copies = timing.job.model.top_k if timing.job.stack.dispatcher == "deduplicated" else 1
    total: Count = 0.0
    for t in traffic:
        if t.axis in _AXES[cause] and t.kind is not Kind.RECV:  # what is received travels while the same is sent
            total = total + t.count * _one_s(t, groups[t.axis], copies)
    return total


def _one_s(t: Traffic, group: Links, copies: int) -> Count:
    if t.kind is Kind.SEND:  # one step of a ring
        hop = group.ring_s / np.maximum(1, group.size - 1)
        return np.where(group.size > 1, t.payload_bytes / group.bytes_per_s + hop, 0.0)
    return collective_s(t.kind, t.payload_bytes, group, copies if t.axis == "ep" else 1)


def _exposed(timing: Timing, cause: str, seconds: Count, core: Count, computed: Count) -> Count:
    """What is left of a communication: a ring of K and V hides behind the attention of the part that is there, the
    experts' exchange behind another micro-batch where the schedule pairs them."""
    overlap = timing.job.stack.overlap
    share = {TP: overlap.tp, CP: overlap.cp, EP: 1.0 if timing.pairs else overlap.ep}[cause]
    if not share:
        return seconds
    if cause == TP:  # products and transfers in one kernel, which takes memory that all ranks of the group can address
        share = share * (group_placement(1, timing.batch.tp, timing.job.cluster.levels[0].size)[1] == 1)
    behind = computed
    if cause == CP:
        cp = timing.batch.cp
        behind = np.where(timing.batch.cp_kind == 0, core * (cp - 1) / np.maximum(1, cp), 0.0)
    return seconds - share * (seconds - most([0.0, seconds - behind]))
