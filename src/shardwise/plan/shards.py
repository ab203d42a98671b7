"""Who holds what: the units of every stage, the flat storages of a unit, the placement record of every parameter.

Integers only. The runtime allocates by these records, the account adds them up, the ledger takes its payloads from
them: gradient reduction, clip norm and the optimizer read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwise import schedule as schedules
from shardwise.collective import Kind
from shardwise.mesh import Axes
from shardwise.model.spec import Block, Model, Parameter, Unit
from shardwise.plan.layout import Layout, split_of

TIED = "embedding.weight"


@dataclass(frozen=True, slots=True)
class Record:
    """One parameter of one unit on one rank.

    `name` is the logical parameter; the two copies of a tied weight share it. `shape` is local, after the cut of
    tensor parallelism along `tp_dim` (None: whole on every tensor-parallel rank). ZeRO cuts dim 0 into `rows` a
    shard, the last shards padded; the shard lies at `offset` of the unit's flat shard. `partial` says that every
    tensor-parallel rank holds only a part of the gradient's sum.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    partial: bool
    rows: int
    offset: int
    copies: int = 1

    @property
    def columns(self) -> int:
        return prod(self.shape[1:])

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def shard_numel(self) -> int:
        """Elements of one shard, padding included."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Storage:
    """The parameters of one unit as one flat buffer of `shards` equal parts; 1-D parameters come first."""

    unit: str
    shards: int
    records: tuple[Record, ...]

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's part, padding included."""
        return sum(r.shard_numel for r in self.records)

    @property
    def padded_numel(self) -> int:
        return self.shards * self.shard_numel

    @property
    def numel(self) -> int:
        """Elements of the parameters as the products see them."""
        return sum(r.numel for r in self.records)

    @property
    def partial_numel(self) -> int:
        """Elements of one rank's part whose gradient is still to be summed over tp: a prefix of the part."""
        return sum(r.shard_numel for r in self.records if r.partial)

    @property
    def vector_numel(self) -> int:
        """Elements of one rank's part that belong to 1-D parameters: a prefix, without weight decay."""
        return sum(r.shard_numel for r in self.records if len(r.shape) == 1)

    @property
    def tied(self) -> Record | None:
        """The record of a weight with copies on other ranks, if any."""
        return next((r for r in self.records if r.copies > 1), None)


def logical_name(unit: Unit, parameter: Parameter) -> str:
    """The model-wide name of a unit's parameter: a tied weight is the embedding's."""
    return TIED if parameter.name in unit.block.tied else f"{unit.name}.{parameter.name}"


@lru_cache(maxsize=65536)
def make_storage(model: Model, unit: Unit, tp: int, sp: bool, shards: int, shared: bool) -> Storage:
    """The flat storage of a unit. `shared`: its tied weight lives in the embedding's storage on the same rank."""
    dims, block = model.dims, unit.block
    records: list[Record] = []
    offset = 0
    for p in sorted(block.parameters, key=lambda p: len(p.dims) > 1):
        name = logical_name(unit, p)
        if p.name in block.tied and shared:
            continue
        whole = tuple(dims[d] for d in p.dims)
        shape = tuple(n // tp if i == p.tp_dim else n for i, n in enumerate(whole))
        copies = 2 if model.tied and name == TIED and not shared else 1
        rows = -(-shape[0] // shards)
        record = Record(name, shape, p.tp_dim, sp and p.tp_dim is None, rows, offset, copies)
        records.append(record)
        offset += record.shard_numel
    return Storage(unit.name, shards, tuple(records))


class GradientMove(NamedTuple):
    """One collective on a unit's gradient: what moves along which axes, and how many elements it takes."""

    kind: Kind
    axes: Axes
    elements: int


def gradient_moves(storage: Storage, zero: int, final: bool) -> list[GradientMove]:
    """How a unit's gradient is summed, in order: table 2's P -> S(0) over the shards' axis (with ZeRO), and once a
    step (`final`) P -> I of the shard over the replicas, then of the prefix that is partial over tp.
    """
    moves = [GradientMove(Kind.REDUCE_SCATTER, ("dp_shard",), storage.padded_numel)] if zero else []
    if final:
        moves.append(GradientMove(Kind.ALL_REDUCE, ("dp_replicate",), storage.shard_numel))
        if storage.partial_numel:
            moves.append(GradientMove(Kind.ALL_REDUCE, ("tp",), storage.partial_numel))
    return moves


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive units, held by one pipeline rank."""

    index: int
    rank: int
    units: tuple[Unit, ...]

    @property
    def layers(self) -> int:
        return sum(u.block.kind == "layer" for u in self.units)


@lru_cache(maxsize=65536)
def make_stages(model: Model, pp: int, schedule: str, split: tuple[int, ...]) -> tuple[Stage, ...]:
    """The units of every stage: the embedding opens the first, the head closes the last."""
    chain = list(model.units())
    stages: list[Stage] = []
    placement = schedules.build(schedule, pp, 1).placement[0]
    start = 0
    for index, layers in enumerate(split):
        stop = start + layers + (index == 0) + (index == len(split) - 1)
        stages.append(Stage(index, placement[index], tuple(chain[start:stop])))
        start = stop
    if start != len(chain):
        raise ValueError(f"split {split} places {start} of {len(chain)} units")
    return tuple(stages)


def stages_of(model: Model, layout: Layout) -> tuple[Stage, ...]:
    """The stages of a layout."""
    return make_stages(model, layout.pp, layout.schedule, split_of(layout, model.layers))


@dataclass(frozen=True, slots=True)
class RankUnits:
    """What one pipeline rank holds: its stages, one storage a unit, and which storages a unit's ops read."""

    stages: tuple[Stage, ...]
    storages: dict[str, Storage]
    uses: dict[str, tuple[str, ...]]

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(u for s in self.stages for u in s.units)


@lru_cache(maxsize=4096)
def ends_share_rank(schedule: str, pp: int) -> bool:
    """Whether the first and the last stage sit on one rank, which then shares a tied weight."""
    placement = schedules.build(schedule, pp, 1).placement[0]
    return placement[0] == placement[-1]


def rank_units(model: Model, layout: Layout, pp_rank: int) -> RankUnits:
    """Stages, storages and their users on one pipeline rank."""
    every = stages_of(model, layout)
    shared = model.tied and ends_share_rank(layout.schedule, layout.pp)
    mine = tuple(s for s in every if s.rank == pp_rank)
    storages: dict[str, Storage] = {}
    uses: dict[str, tuple[str, ...]] = {}
    for stage in mine:
        for unit in stage.units:
            storages[unit.name] = make_storage(model, unit, layout.tp, layout.sp, layout.shards, shared)
            borrowed = shared and bool(unit.block.tied)
            uses[unit.name] = (unit.name, "embedding") if borrowed else (unit.name,)
    return RankUnits(mine, storages, uses)


def tied_ranks(model: Model, layout: Layout) -> tuple[int, ...]:
    """Pipeline ranks that hold a copy of the tied weight: empty where there is one copy."""
    every = stages_of(model, layout)
    shared = ends_share_rank(layout.schedule, layout.pp)
    return () if not model.tied or shared else (every[0].rank, every[-1].rank)


def block_named(model: Model, kind: str) -> Block:
    """The model's block of one kind."""
    return next(b for b in model.blocks if b.kind == kind)
