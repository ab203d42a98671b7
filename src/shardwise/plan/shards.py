"""Who holds what: the units of every stage, the flat storages of a unit, the placement record of every parameter.

Integers only. The runtime allocates by these records, the account adds them up, the ledger takes its payloads from
them: gradient reduction (`buckets.py`), clip norm and the optimizer read nothing else. Sizes may be columns: the
account asks for many layouts at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwise import schedule as schedules
from shardwise.mesh import Axes, with_cp
from shardwise.model.spec import EMBEDDING, HEAD, KV_DIMS, Block, Count, Cut, Model, Parameter, Unit
from shardwise.plan.layout import Layout, split_of

TIED = "embedding.weight"

TWINS = ("twins",)
"""Not an axis of the mesh: the two pipeline ranks that hold one stage."""

COPIES = ("kv_copies",)
"""Not an axis of the mesh: neighbouring tensor-parallel ranks that hold the same kv heads, where there are fewer."""

EXPERTS = "experts"
"""Suffix of the storage that holds a unit's routed experts: their state is cut over axes of its own."""


@dataclass(frozen=True, slots=True)
class Record:
    """One parameter of one unit on one rank.

    `name` is the logical parameter, of shape `whole`; the two copies of a tied weight share it. `shape` is local, after
    the cut of tensor parallelism along `tp_dim` (None: whole on every tensor-parallel rank), the last parts padded;
    `neighbours` so many ranks in a row hold the same part, each a part of its gradient's sum. ZeRO cuts dim 0 into
    `rows` a shard, the last shards padded; the shard lies at `offset` of the unit's flat shard. `partial` says that
    every tensor-parallel rank holds only a part of the gradient's sum.
    """

    name: str
    whole: tuple[int, ...]
    shape: tuple[Count, ...]
    tp_dim: int | None
    partial: Count
    rows: Count
    offset: Count
    neighbours: Count = 1
    copies: int = 1

    @property
    def columns(self) -> Count:
        return prod(self.shape[1:])

    @property
    def numel(self) -> Count:
        return prod(self.shape)

    @property
    def shard_numel(self) -> Count:
        """Elements of one shard, padding included."""
        return self.rows * self.columns

    def box(self, tp_index: int) -> tuple[slice, ...]:
        """What of the whole parameter a tensor-parallel rank holds: the first corner of `shape`, the rest is padding.
        Routed experts, which have axes of their own, are not cut here."""
        found = [slice(0, n) for n in self.whole]
        if self.tp_dim is not None:
            n, size = self.whole[self.tp_dim], self.shape[self.tp_dim]
            first = min(tp_index // self.neighbours * size, n)
            found[self.tp_dim] = slice(first, min(first + size, n))
        return tuple(found)

    def counted(self, tp_index: int) -> bool:
        """Whether this tensor-parallel rank is the first of those that hold the same part."""
        return tp_index % self.neighbours == 0 if self.tp_dim is not None else tp_index == 0


@dataclass(frozen=True, slots=True)
class Storage:
    """Parameters of one unit as one flat buffer of `shards` equal parts; 1-D parameters come first.

    The shards lie along `shard_axes`; ranks along `copy_axes` hold the same shard.
    """

    unit: str
    shards: Count
    records: tuple[Record, ...]
    shard_axes: Axes = ("dp_shard",)
    copy_axes: Axes = ("dp_replicate",)
    twins: bool = False
    """whether another pipeline rank holds the same stage, as the other copy of its schedule"""

    @property
    def shard_numel(self) -> Count:
        """Elements of one rank's part, padding included."""
        return sum(r.shard_numel for r in self.records)

    @property
    def padded_numel(self) -> Count:
        return self.shards * self.shard_numel

    @property
    def numel(self) -> Count:
        """Elements of the parameters as the products see them."""
        return sum(r.numel for r in self.records)

    @property
    def vector_numel(self) -> Count:
        """Elements of one rank's part that belong to 1-D parameters: a prefix, without weight decay."""
        return sum(r.shard_numel for r in self.records if len(r.shape) == 1)

    @property
    def parts(self) -> int:
        """Flat views that the optimizer steps: 1-D parameters, and the others."""
        return len({len(r.shape) == 1 for r in self.records})

    @property
    def tied(self) -> Record | None:
        """The record of a weight with copies on other ranks, if any."""
        return next((r for r in self.records if r.copies > 1), None)


def logical_name(model: Model, unit: Unit, parameter: Parameter) -> str:
    """The model-wide name of a unit's parameter: a tied weight is the embedding's, or of a tail's unit the head's; all
    runs of a looped layer have one set."""
    if parameter.name not in unit.block.tied:
        return f"{storage_owner(model, unit).name}.{parameter.name}"
    return TIED if model.tied or parameter.name == TIED else f"{HEAD}.{parameter.name}"


def _lives_elsewhere(unit: Unit, parameter: Parameter, shared: bool) -> bool:
    """Whether a tied weight lies in another unit's storage on the same rank: the head's, which the tail is always
    with, or the embedding's."""
    if parameter.name not in unit.block.tied:
        return False
    return shared or (unit.name != HEAD and parameter.name != TIED)


def _place(p: Parameter) -> tuple[bool, bool, bool, bool]:
    """1-D parameters first; among either, those whose gradient is partial over tp: always, then under sequence
    parallelism. 1-D ones of kv heads come last, others first of those that are cut: a dense layer's lie together.
    """
    matrix = len(p.dims) > 1
    return matrix, not p.partial, p.tp_dim is not None or p.expert, _of_kv_heads(p) != matrix


def _of_kv_heads(p: Parameter) -> bool:
    return p.tp_dim is not None and p.dims[p.tp_dim] in KV_DIMS


def kv_copies(model: Model, cut: Cut) -> Count:
    """Tensor-parallel ranks that hold the same kv heads; 1 for a model without any."""
    held = any(_of_kv_heads(p) for b in model.blocks for p in b.parameters)
    return cut.tp // cut.kv_parts(model) if held else 1


class State(NamedTuple):
    """Into how many parts ZeRO cuts the state of dense parameters and of routed experts."""

    shards: Count
    edp: Count


def storages(model: Model, unit: Unit, cut: Cut, state: State, shared: bool) -> tuple[Storage, ...]:
    """The flat storages of a unit: dense parameters, then routed experts, if it has any of either.

    `shared`: the unit's tied weight lives in the embedding's storage on the same rank. `cut` and `state` may hold
    columns.
    """
    found: list[Storage] = []
    for expert, suffix in ((False, ""), (True, f".{EXPERTS}")):
        shards = state.edp if expert else state.shards
        records: list[Record] = []
        offset: Count = 0
        for p in sorted(unit.block.parameters, key=_place):
            if p.expert is not expert or _lives_elsewhere(unit, p, shared):
                continue
            name, whole = logical_name(model, unit, p), tuple(model.dims[d] for d in p.dims)
            shape = tuple(cut.local(model, d) for d in p.dims)
            copies = 2 if name == TIED and (model.tied or model.tail) and not shared else 1
            rows = -(-shape[0] // shards)
            partial = p.partial or cut.sp if p.tp_dim is None and not expert else False
            neighbours = cut.tp // cut.kv_parts(model) if _of_kv_heads(p) else 1
            record = Record(name, whole, shape, p.tp_dim, partial, rows, offset, neighbours, copies)
            records.append(record)
            offset = offset + record.shard_numel
        if records:
            found.append(Storage(unit.name + suffix, shards, tuple(records)))
    return tuple(found)


@lru_cache(maxsize=65536)
def _storages(model: Model, unit: Unit, layout: Layout, shared: bool) -> tuple[Storage, ...]:
    """Those of a layout, with their axes."""
    cut = degrees(layout)
    found = storages(model, unit, cut, State(layout.shards, max(1, layout.edp)), shared)
    twins = len(placement(layout.schedule, layout.pp)) > 1
    axes = [_axes(layout, s.unit.endswith(f".{EXPERTS}")) for s in found]
    return tuple(Storage(s.unit, s.shards, s.records, *a, twins) for s, a in zip(found, axes, strict=True))


def _axes(layout: Layout, expert: bool) -> tuple[Axes, Axes]:
    """(axes of the shards, axes of the copies)."""
    if expert:
        if layout.zero:
            return ("edp",), ("dp_replicate",)
        return ("edp",), (("dp_replicate", "edp") if layout.order == "dp" else ("edp",))
    if layout.zero:
        return with_cp(("dp_shard",), layout.cp), ("dp_replicate",)
    return ("dp_shard",), with_cp(("dp_replicate",), layout.cp)


def degrees(layout: Layout) -> Cut:
    """How a layout cuts parameters; it says nothing of tokens and bytes."""
    return Cut(0, layout.tp, layout.sp, 0, 0, cp=layout.cp, ep=layout.ep, etp=layout.etp)


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive units, held by one pipeline rank; `copy` counts where a schedule holds every stage twice."""

    index: int
    rank: int
    units: tuple[Unit, ...]
    copy: int = 0


@lru_cache(maxsize=65536)
def make_stages(model: Model, pp: int, schedule: str, split: tuple[int, ...]) -> tuple[Stage, ...]:
    """The units of every stage, copy by copy: the embedding opens the first, the tail and the head close the last."""
    chain = list(model.units())
    behind = len(model.tail) + 1
    if sum(split) + 1 + behind != len(chain):
        raise ValueError(f"split {split} places {sum(split)} of {len(chain) - 1 - behind} layers")
    parts: list[tuple[Unit, ...]] = []
    start = 0
    for index, layers in enumerate(split):
        stop = start + layers + (index == 0) + behind * (index == len(split) - 1)
        parts.append(tuple(chain[start:stop]))
        start = stop
    copies = enumerate(placement(schedule, pp))
    return tuple(Stage(i, ranks[i], units, copy) for copy, ranks in copies for i, units in enumerate(parts))


@lru_cache(maxsize=4096)
def placement(schedule: str, pp: int) -> tuple[tuple[int, ...], ...]:
    """[copy][stage] -> pipeline rank."""
    return schedules.placement(schedule, pp)


def stages_of(model: Model, layout: Layout) -> tuple[Stage, ...]:
    """The stages of a layout."""
    return make_stages(model, layout.pp, layout.schedule, split_of(layout, model.layers))


@dataclass(frozen=True, slots=True)
class RankUnits:
    """What one pipeline rank holds: its stages, its storages, and which storages a unit's ops read."""

    stages: tuple[Stage, ...]
    storages: dict[str, Storage]
    uses: dict[str, tuple[str, ...]]

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(u for s in self.stages for u in s.units)


@lru_cache(maxsize=4096)
def ends_share_rank(schedule: str, pp: int) -> bool:
    """Whether every rank that holds the last stage holds the first one too: they share a tied weight."""
    firsts = {ranks[0] for ranks in placement(schedule, pp)}
    return all(ranks[-1] in firsts for ranks in placement(schedule, pp))


def rank_units(model: Model, layout: Layout, pp_rank: int) -> RankUnits:
    """Stages, storages and their users on one pipeline rank."""
    every = stages_of(model, layout)
    shared = ends_share_rank(layout.schedule, layout.pp)
    mine = tuple(s for s in every if s.rank == pp_rank)
    held: dict[str, Storage] = {}
    uses: dict[str, tuple[str, ...]] = {}
    for stage in mine:
        for unit in stage.units:
            owner = storage_owner(model, unit)
            own = _storages(model, owner, layout, shared)
            held |= {s.unit: s for s in own}
            uses[unit.name] = (*(s.unit for s in own), *borrowed(model, unit.block, shared))
    return RankUnits(mine, held, uses)


def borrowed(model: Model, block: Block, shared: bool) -> tuple[str, ...]:
    """Storages of other units on the same rank that a block's tied weights lie in; `shared`: the embedding's is one."""
    if not block.tied:
        return ()
    heads = (HEAD,) if block.kind in model.tail and not (model.tied and shared) else ()
    return (*heads, *((EMBEDDING,) if shared else ()))


def storage_owner(model: Model, unit: Unit) -> Unit:
    """The unit whose parameters this one uses: of a looped model, the same layer's first run."""
    if model.loops == 1 or not unit.name.startswith("layers."):
        return unit
    return Unit(f"layers.{int(unit.name.removeprefix('layers.')) % len(model.chain)}", unit.block)


def tied_ranks(model: Model, layout: Layout) -> tuple[int, ...]:
    """Pipeline ranks that hold a copy of the tied weight: empty where there is one copy."""
    tied = any(b.tied for b in model.blocks)
    if not tied or ends_share_rank(layout.schedule, layout.pp):
        return ()
    every = stages_of(model, layout)
    first, last = min(s.index for s in every), max(s.index for s in every)
    return tuple(sorted({s.rank for s in every if s.index in (first, last)}))


def block_named(model: Model, kind: str) -> Block:
    """The model's block of one kind."""
    return model.block(kind)
