"""The predicted ledger: every collective that one rank issues in one step, from the two tables alone.

Activations: each op's edges, read from table 2. Parameters and gradients: the storages' records. Which of them happen
and how often: the rank's lowered row. Nothing here has seen the runtime.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.collective import Collective, Key, Kind, Ledger, Phase, axis_label
from shardwise.mesh import DATA, REPORT, SHARDED, Axes, Mesh
from shardwise.model.spec import Cut, Model, Op, Unit
from shardwise.placement import Local, Move, stream_edges
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rows import lowered_row
from shardwise.plan.shards import RankUnits, Storage, block_named, gradient_moves, rank_units, tied_ranks
from shardwise.schedule.lowering import Do, Instruction
from shardwise.schedule.table import P2P
from shardwise.schedule.table import Op as Act


@dataclass(frozen=True, slots=True)
class Traffic:
    """One collective over tp that an op of a unit issues in one phase; `wide` tells the accumulation dtype.

    Phase B holds what the input gradient needs, phase W what the weight gradients need beside it. Where both run as
    one action the two are issued under B, and `shared` traffic of W is not issued again.
    """

    op: str
    phase: Phase
    kind: Kind
    payload_bytes: int
    wide: bool = False
    shared: bool = False


@lru_cache(maxsize=65536)
def unit_traffic(model: Model, kind: str, cut: Cut) -> tuple[Traffic, ...]:
    """Collectives over tp of one micro-batch of a unit, in every phase."""
    if cut.tp == 1:
        return ()
    block = block_named(model, kind)
    out: list[Traffic] = []
    for op in block.ops:
        out += _op_traffic(model, op, cut)
    names = {op.name for op in block.recomputed}
    again = [replace(t, phase=Phase.RECOMPUTE) for t in out if t.phase is Phase.F and t.op in names]
    return (*out, *again)


def issued(traffic: Traffic, act: Act, recompute: bool, split: bool) -> Phase | None:
    """Under which phase an action issues this collective, or None. `split`: W is an action of its own."""
    if act is Act.F:
        return Phase.F if traffic.phase is Phase.F else None
    if act is Act.W:
        return Phase.W if split and traffic.phase is Phase.W else None
    if traffic.phase is Phase.W:
        return Phase.B if not split and not traffic.shared else None
    if traffic.phase is Phase.RECOMPUTE:
        return Phase.RECOMPUTE if recompute else None
    return Phase.B if traffic.phase is Phase.B else None


def _op_traffic(model: Model, op: Op, cut: Cut) -> list[Traffic]:
    into, out = stream_edges(cut.sp)
    whole = cut.elements(model, "Th") * cut.compute_bytes
    found: list[Traffic] = []

    def add(phase: Phase, move: Move, shared: bool = False) -> None:
        if not isinstance(move, Local):
            found.append(Traffic(op.name, phase, move, whole, shared=shared))

    if op.gathers:
        add(Phase.F, into.forward)
        add(Phase.B, into.backward)
        add(Phase.W, into.forward)  # the input was saved as a shard: it is gathered again
    if op.reduces:
        add(Phase.F, out.forward)
        if op.kind == "embed":
            add(Phase.W, out.backward)  # no input gradient
        else:
            add(Phase.B, out.backward)
            add(Phase.W, out.backward, shared=True)
    if op.kind == "cross_entropy":
        rows = cut.tokens * cut.accumulate_bytes
        found += [Traffic(op.name, Phase.F, Kind.ALL_REDUCE, rows, wide=True)] * 3  # maximum, target, sum
    return found


class _Predictor:
    """Collects one rank's ledger."""

    def __init__(self, job: Job, layout: Layout, rank: int) -> None:
        self.job, self.layout, self.rank = job, layout, rank
        self.mesh: Mesh = layout.mesh
        self.coordinates = self.mesh.coordinates(rank)
        self.ledger: Ledger = Counter()
        self._groups: dict[Axes, tuple[int, ...]] = {}

    def ranks(self, axes: Axes) -> tuple[int, ...]:
        """This rank's group along `axes`, listed once."""
        if axes not in self._groups:
            self._groups[axes] = self.mesh.group(self.rank, axes)
        return self._groups[axes]

    def add(self, module: str, phase: Phase, kind: Kind, axes: Axes, payload: int, dtype: str, count: int = 1) -> None:
        ranks = self.ranks(axes)
        if len(ranks) > 1:
            self.ledger[Collective(Key(module, phase, axis_label(axes)), kind, ranks, payload, dtype)] += count

    def peer(self, pp_rank: int) -> int:
        return self.mesh.rank({**self.coordinates, "pp": pp_rank})


def predict_ledger(job: Job, layout: Layout, rank: int, micro_batches: int | None = None) -> Ledger:
    """Every collective of one step on global rank `rank`. `micro_batches` overrides the job's, for shorter steps."""
    p = _Predictor(job, layout, rank)
    pp_rank = p.coordinates["pp"]
    held = rank_units(job.model, layout, pp_rank)
    units = {u.name: u for u in held.units}
    row = lowered_row(job.model, layout, micro_batches or job.micro_batches(layout), pp_rank)
    repeated: Counter[tuple[str, Act]] = Counter()
    for step in row:
        if isinstance(step, Instruction):
            if isinstance(step.do, Act):
                repeated[step.unit, step.do] += 1
            else:
                _add_storage(p, step.do, held.storages[step.unit], step.final)
        else:
            for op in step:
                _add_p2p(p, op)
    for (name, act), count in repeated.items():
        _add_compute(p, units[name], act, count)
    _add_step(p, held)
    return p.ledger


def _add_compute(p: _Predictor, unit: Unit, act: Act, count: int) -> None:
    """The edges of a unit's ops under one kind of action."""
    cut, precision = p.job.cut(p.layout), p.job.precision
    recompute = p.layout.recompute == "full"
    for t in unit_traffic(p.job.model, unit.block.kind, cut):
        phase = issued(t, act, recompute, act is not Act.BW)
        if phase is not None:
            module = f"{unit.name}.{t.op}" if t.op else unit.name
            dtype = precision.accumulate if t.wide else precision.compute
            p.add(module, phase, t.kind, ("tp",), t.payload_bytes, dtype, count)


def _add_storage(p: _Predictor, do: Do, storage: Storage, final: bool) -> None:
    """Parameters gathered, gradients reduced: over the shards' axis first, then the shard over every other axis."""
    precision, layout = p.job.precision, p.layout
    compute, wide = precision.compute_bytes, precision.accumulate_bytes
    if do is Do.UNSHARD:
        payload = storage.padded_numel * compute
        p.add(storage.unit, Phase.UNSHARD, Kind.ALL_GATHER, ("dp_shard",), payload, precision.compute)
    elif do is Do.REDUCE:
        for move in gradient_moves(storage, layout.zero, final):
            p.add(storage.unit, Phase.REDUCE, move.kind, move.axes, move.elements * wide, precision.accumulate)
    elif do is Do.TIE and storage.tied is not None:
        ranks = tuple(map(p.peer, tied_ranks(p.job.model, layout)))
        key = Key(storage.unit, Phase.TIE, "tied")
        payload = storage.tied.shard_numel * wide
        p.ledger[Collective(key, Kind.ALL_REDUCE, ranks, payload, precision.accumulate)] += 1


def _add_p2p(p: _Predictor, op: P2P) -> None:
    cut, precision = p.job.cut(p.layout), p.job.precision
    payload = cut.elements(p.job.model, "th") * precision.compute_bytes
    phase, kind = (Phase.SEND, Kind.SEND) if op.send else (Phase.RECV, Kind.RECV)
    here, there = p.rank, p.peer(op.peer)
    ranks = (here, there) if op.send else (there, here)
    key = Key(f"stages.{op.stage}", phase, "pp")
    p.ledger[Collective(key, kind, ranks, payload, precision.compute)] += 1


def _add_step(p: _Predictor, held: RankUnits) -> None:
    """Once a step: the token count, the loss, the clip norm, and ZeRO-1's new parameters."""
    precision = p.job.precision
    wide = precision.accumulate_bytes
    if "head" in held.storages:
        p.add("loss", Phase.COUNT, Kind.ALL_REDUCE, DATA, 8, "int64")
    p.add("loss", Phase.REPORT, Kind.ALL_REDUCE, REPORT, wide, precision.accumulate)
    p.add("clip", Phase.NORM, Kind.ALL_REDUCE, SHARDED, wide, precision.accumulate)
    if p.layout.zero == 1:
        for storage in held.storages.values():
            payload = storage.padded_numel * precision.compute_bytes
            p.add(storage.unit, Phase.GATHER, Kind.ALL_GATHER, ("dp_shard",), payload, precision.compute)
