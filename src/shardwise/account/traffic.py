"""What the ops of a unit communicate for one micro-batch on one rank, read from table 2 and from the compound edges.

Payloads may be columns. Where the kind of a collective depends on a column (sequence parallelism or not, one kind of
context parallelism or another), every variant is listed, with a count that is zero where it is not taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.collective import Kind, Phase
from shardwise.model.spec import Count, Cut, Model, Op, TensorDesc
from shardwise.placement import Local, Move, stream_edges
from shardwise.plan.stack import GATHERED
from shardwise.schedule.table import Op as Act

COMPUTE, WIDE, INTEGER = 1, 2, 3
"""Roles of what travels: `Traffic.role`."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One collective over one axis that an op of a unit issues in one phase, `count` times.

    Phase B holds what the input gradient needs, phase W what the weight gradients need beside it. Where both run as
    one action the two are issued under B, and `shared` traffic of W is not issued again.
    """

    op: str
    phase: Phase
    kind: Kind
    payload_bytes: Count
    axis: str = "tp"
    role: int = COMPUTE
    shared: bool = False
    count: Count = 1


def unit_traffic(model: Model, kind: str, cut: Cut, recompute: str) -> tuple[Traffic, ...]:
    """Collectives of one micro-batch of a unit, in every phase; `recompute` as of a layout."""
    block = model.block(kind)
    tensors = {d.name: d for d in (*block.inputs, *(d for op in block.ops for d in op.outputs))}
    out = [t for op in block.ops for t in _Edges(model, op, cut, tensors).all()]
    names = {op.name for op in block.again(recompute)}
    again = [replace(t, phase=Phase.RECOMPUTE) for t in out if t.phase is Phase.F and t.op in names]
    return tuple(t for t in (*out, *again) if not isinstance(t.count, int) or t.count)


def issued(traffic: Traffic, act: Act, split: bool) -> Phase | None:
    """Under which phase an action issues this collective, or None. `split`: W is an action of its own."""
    if act is Act.F:
        return Phase.F if traffic.phase is Phase.F else None
    if act is Act.W:
        return Phase.W if split and traffic.phase is Phase.W else None
    if traffic.phase is Phase.W:
        return Phase.B if not split and not traffic.shared else None
    return traffic.phase if traffic.phase in (Phase.B, Phase.RECOMPUTE) else None


class _Edges:
    """The traffic of one op."""

    def __init__(self, model: Model, op: Op, cut: Cut, tensors: dict[str, TensorDesc]) -> None:
        self.model, self.op, self.cut, self.tensors = model, op, cut, tensors

    def all(self) -> Iterator[Traffic]:
        if self.op.gathers or self.op.reduces:
            yield from self._tp(False, 1 - self.cut.sp)
            yield from self._tp(True, self.cut.sp)
        match self.op.kind:
            case "cross_entropy":
                rows = self.cut.tokens * self.cut.accumulate_bytes
                summed = Traffic(self.op.name, Phase.F, Kind.ALL_REDUCE, rows, role=WIDE, count=3)
                yield summed  # maximum, target, sum
            case "norm":
                yield from self._normed()
            case "attention":
                yield from self._cp()
            case "dispatch":
                yield from self._experts(self.op.outputs[0], Kind.ALL_GATHER, counted=True)
            case "combine":
                yield from self._experts(self.tensors[self.op.inputs[0]], Kind.REDUCE_SCATTER, counted=False)
            case _:
                pass

    def _size(self, dims: str) -> Count:
        return self.cut.elements(self.model, dims) * self.cut.compute_bytes

    def _tp(self, sp: bool, count: Count) -> Iterator[Traffic]:
        """The edges stream -> R before a column product, and P -> stream behind a row product."""
        into, out = stream_edges(sp)
        op = self.op

        def move(phase: Phase, kind: Move, dims: str, shared: bool = False) -> Iterator[Traffic]:
            if not isinstance(kind, Local):
                payload = self._size(dims.replace("t", "T"))
                yield Traffic(op.name, phase, kind, payload, shared=shared, count=count)

        if op.gathers:
            dims = self.tensors[op.inputs[0]].dims
            yield from move(Phase.F, into.forward, dims)
            yield from move(Phase.B, into.backward, dims)
            if all(kept.name != GATHERED for kept in op.keeps):
                yield from move(Phase.W, into.forward, dims)  # saved as a shard: gathered again
        if op.reduces:
            dims = op.outputs[0].dims
            yield from move(Phase.F, out.forward, dims)
            if op.kind == "embed":
                yield from move(Phase.W, out.backward, dims)  # no input gradient
            else:
                yield from move(Phase.B, out.backward, dims)
                yield from move(Phase.W, out.backward, dims, shared=True)

    def _normed(self) -> Iterator[Traffic]:
        """A norm over features that tensor parallelism cuts (OLMo 2's of queries and keys) sums its rows' squares."""
        rows = self.cut.tokens * self.cut.accumulate_bytes
        cut = sum(p.tp_dim is not None for p in self.op.parameters)
        for phase in (Phase.F, Phase.B):
            yield Traffic(self.op.name, phase, Kind.ALL_REDUCE, rows, role=WIDE, count=cut)

    def _cp(self) -> Iterator[Traffic]:
        """Context parallelism: a ring of K and V (Liu et al. 2310.01889; backward c - 1 steps of K and V and c of their
        gradients), heads for tokens (Jacobs et al. 2309.14509), or K and V gathered (Llama 3, 2407.21783, 3.3.2)."""
        cut, name = self.cut, self.op.name
        q, k, v = (self.tensors[n].dims for n in self.op.inputs[:3])
        keys = self._size(k) + self._size(v)
        wide = keys * cut.accumulate_bytes // max(1, cut.compute_bytes)
        on = cut.cp > 1
        ring, heads, gather = (on * (cut.cp_kind == i) * 1 for i in range(3))
        for phase, steps, payload, role in (
            (Phase.F, cut.cp - 1, keys, COMPUTE),
            (Phase.B, cut.cp - 1, keys, COMPUTE),
            (Phase.B, cut.cp, wide, WIDE),
        ):
            for kind in (Kind.SEND, Kind.RECV):
                yield Traffic(name, phase, kind, payload, "cp", role, count=ring * steps)
        out = self.op.outputs[0].dims
        for phase in (Phase.F, Phase.B):
            for dims in (q, k, v, out):
                yield Traffic(name, phase, Kind.ALL_TO_ALL, self._size(dims), "cp", count=heads)
            yield Traffic(name, phase, Kind.ALL_GATHER, keys * cut.cp, "cp", count=gather)
        yield Traffic(name, Phase.B, Kind.REDUCE_SCATTER, keys * cut.cp, "cp", count=gather)

    def _experts(self, copies: TensorDesc, over_etp: Kind, counted: bool) -> Iterator[Traffic]:
        """Routed copies over ep, and their gather (or scatter) over etp; the way back is the other one's way."""
        name, width = self.op.name, copies.dims[1:]
        moved, gathered = self._size("c" + width), self._size("D" + width)
        back = Kind.REDUCE_SCATTER if over_etp is Kind.ALL_GATHER else Kind.ALL_GATHER
        if counted:
            rows = self.model.experts * 8
            yield Traffic(name, Phase.F, Kind.ALL_TO_ALL, rows, "ep", INTEGER, count=(self.cut.ep > 1) * 1)
        for phase, kind in ((Phase.F, over_etp), (Phase.B, back)):
            yield Traffic(name, phase, Kind.ALL_TO_ALL, moved, "ep", count=(self.cut.ep > 1) * 1)
            yield Traffic(name, phase, kind, gathered, "etp", count=(self.cut.etp > 1) * 1)
