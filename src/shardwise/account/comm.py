"""The predicted ledger: every collective that one rank issues in one step, from the two tables alone.

Activations: what each op's edges move (`account/traffic.py`). Parameters and gradients: the storages' records. Which
of them happen and how often: the rank's lowered row. Nothing here has seen the runtime.
"""

from __future__ import annotations

from collections import Counter

from shardwise.account.traffic import issued, unit_traffic
from shardwise.collective import Collective, Key, Kind, Ledger, Phase, axis_label
from shardwise.mesh import DATA, EXPERT_SHARDED, REPORT, SHARDED, Axes, Mesh, with_cp
from shardwise.model.spec import Unit
from shardwise.plan.buckets import Bucket, buckets_of
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rows import lowered_row
from shardwise.plan.shards import (
    COPIES,
    TWINS,
    RankUnits,
    Storage,
    degrees,
    kv_copies,
    placement,
    rank_units,
    tied_ranks,
)
from shardwise.schedule.lowering import Do, Instruction
from shardwise.schedule.table import P2P
from shardwise.schedule.table import Op as Act


class _Predictor:
    """Collects one rank's ledger."""

    def __init__(self, job: Job, layout: Layout, rank: int) -> None:
        self.job, self.layout, self.rank = job, layout, rank
        self.mesh: Mesh = layout.mesh
        self.experts: Mesh = layout.expert_mesh
        self.coordinates = self.mesh.coordinates(rank)
        self.ledger: Ledger = Counter()
        self._groups: dict[Axes, tuple[int, ...]] = {}

    def ranks(self, axes: Axes) -> tuple[int, ...]:
        """This rank's group along `axes`, listed once."""
        if axes not in self._groups:
            self._groups[axes] = self._ranks(axes)
        return self._groups[axes]

    def _ranks(self, axes: Axes) -> tuple[int, ...]:
        if axes == TWINS:
            return tuple(sorted(map(self.peer, self._twins(self.coordinates["pp"]))))
        if axes == COPIES:
            return self.mesh.neighbours(self.rank, "tp", int(kv_copies(self.job.model, degrees(self.layout))))
        dense = {axis for axis, _ in self.mesh.degrees}
        return (self.mesh if set(axes) <= dense else self.experts).group(self.rank, axes)

    def _twins(self, here: int) -> set[int]:
        """Pipeline ranks that hold a stage of this one."""
        pairs = zip(*placement(self.layout.schedule, self.layout.pp), strict=True)
        return {rank for pair in pairs if here in pair for rank in pair}

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
    units, buckets = {u.name: u for u in held.units}, buckets_of(held, layout)
    row = lowered_row(job.model, layout, micro_batches or job.micro_batches(layout), pp_rank)
    repeated: Counter[tuple[str, Act]] = Counter()
    for step in row:
        if isinstance(step, Instruction):
            if isinstance(step.do, Act):
                repeated[step.unit, step.do] += 1
            elif step.do in (Do.REDUCE, Do.TWIN):
                _add_sums(p, step, buckets[step.unit])
            else:
                _add_storage(p, step.do, held.storages[step.unit])
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
    for t in unit_traffic(p.job.model, unit.block.kind, cut, p.layout.recompute):
        phase = issued(t, act, act is not Act.BW)
        if phase is not None:
            module = f"{unit.name}.{t.op}" if t.op else unit.name
            dtype = {1: precision.compute, 2: precision.accumulate, 3: "int64"}[t.role]
            if t.kind in (Kind.SEND, Kind.RECV):
                _add_ring(p, module, phase, t.kind, int(t.payload_bytes), dtype, int(t.count) * count)
            else:
                p.add(module, phase, t.kind, (t.axis,), int(t.payload_bytes), dtype, int(t.count) * count)


def _add_ring(p: _Predictor, module: str, phase: Phase, kind: Kind, payload: int, dtype: str, count: int) -> None:
    """K and V go to the next rank of the ring and come from the one before."""
    ring = p.ranks(("cp",))
    here = ring.index(p.rank)
    before, after = ring[here - 1], ring[(here + 1) % len(ring)]
    if len(ring) > 1 and count:
        ranks = (p.rank, after) if kind is Kind.SEND else (before, p.rank)
        p.ledger[Collective(Key(module, phase, "cp"), kind, ranks, payload, dtype)] += count


def _add_storage(p: _Predictor, do: Do, storage: Storage) -> None:
    """Parameters gathered; in the end gradients reduced over the ranks with a copy."""
    precision, layout = p.job.precision, p.layout
    if do is Do.UNSHARD:
        payload = storage.padded_numel * precision.compute_bytes
        p.add(storage.unit, Phase.UNSHARD, Kind.ALL_GATHER, storage.shard_axes, payload, precision.compute)
    elif do is Do.TIE and storage.tied is not None:
        ranks = tuple(map(p.peer, tied_ranks(p.job.model, layout)))
        key = Key(storage.unit, Phase.TIE, "tied")
        payload = storage.tied.shard_numel * p.job.gradient_bytes
        p.ledger[Collective(key, Kind.ALL_REDUCE, ranks, payload, p.job.gradient_dtype)] += 1


def _add_sums(p: _Predictor, step: Instruction, bucket: Bucket) -> None:
    """Gradients reduced: over the shards' axes first, then the shard over every other axis."""
    moves = [bucket.twin_move()] if step.do is Do.TWIN else bucket.moves(p.layout.zero, step.final)
    for move in moves:
        payload = move.elements * p.job.gradient_bytes
        p.add(move.module, Phase.REDUCE, move.kind, move.axes, payload, p.job.gradient_dtype)


def _add_p2p(p: _Predictor, op: P2P) -> None:
    cut, precision = p.job.cut(p.layout), p.job.precision
    payload = cut.elements(p.job.model, "th") * precision.compute_bytes
    phase, kind = (Phase.SEND, Kind.SEND) if op.send else (Phase.RECV, Kind.RECV)
    here, there = p.rank, p.peer(op.peer)
    ranks = (here, there) if op.send else (there, here)
    key = Key(f"stages.{op.stage}", phase, "pp")
    p.ledger[Collective(key, kind, ranks, payload, precision.compute)] += 1


def _add_step(p: _Predictor, held: RankUnits) -> None:
    """Once a step: the token count, the loss, the clip norm, and the new parameters of ZeRO-1 and 2."""
    precision, cp = p.job.precision, p.layout.cp
    wide = precision.accumulate_bytes
    if any(s.units[-1].block.kind == "head" for s in held.stages):
        p.add("loss", Phase.COUNT, Kind.ALL_REDUCE, with_cp(DATA, cp), 8, "int64")
    p.add("loss", Phase.REPORT, Kind.ALL_REDUCE, with_cp(REPORT, cp), wide, precision.accumulate)
    p.add("clip", Phase.NORM, Kind.ALL_REDUCE, with_cp(SHARDED, cp), wide, precision.accumulate)
    if p.layout.zero == 0:
        p.add("clip.experts", Phase.NORM, Kind.ALL_REDUCE, EXPERT_SHARDED, wide, precision.accumulate)
    if p.layout.zero in (1, 2):
        for storage in held.storages.values():
            payload = storage.padded_numel * precision.compute_bytes
            p.add(storage.unit, Phase.GATHER, Kind.ALL_GATHER, storage.shard_axes, payload, precision.compute)
