"""One rank of a plan, built: world, model state, executor, optimizer; and its training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.collective import Labels, Phase
from shardwise.model.spec import Model, Unit
from shardwise.plan.buckets import buckets_of
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, LayoutError
from shardwise.plan.rows import lowered_row
from shardwise.plan.runs import runs_here
from shardwise.plan.settings import TrainSettings
from shardwise.plan.shards import RankUnits, Record, degrees, kv_copies, logical_name, rank_units, stages_of, tied_ranks
from shardwise.train.bucket import GradientBucket
from shardwise.train.comm import Comm
from shardwise.train.initial import initial_values
from shardwise.train.nn import Context, UnitModule, rope_tables
from shardwise.train.optim import Optimizer, OptimizerSettings, clip_norm, report, token_scale
from shardwise.train.pipeline import Data, Done, Executor
from shardwise.train.unit import UnitState, torch_dtype
from shardwise.train.weights import Slot, WeightQueue
from shardwise.train.world import World


@dataclass(slots=True)
class Rank:
    """Everything that one rank holds. Made by `build_rank`."""

    job: Job
    layout: Layout
    world: World
    states: dict[str, UnitState]
    executor: Executor
    optimizer: Optimizer
    wide: torch.dtype
    device: torch.device

    @property
    def micro_batches(self) -> int:
        return self.job.micro_batches(self.layout)

    @property
    def needs_ids(self) -> bool:
        return "embedding" in self.states

    @property
    def needs_targets(self) -> bool:
        return "head" in self.states

    @property
    def counted(self) -> list[UnitState]:
        """States whose gradients the clip norm counts here: of a stage that is held twice, the first copy's."""
        second = {u.name for s in self.executor.units.stages if s.copy for u in s.units}
        return [state for name, state in self.states.items() if name not in second]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Scalars on the device: reading them is the loop's business, never the step's."""

    loss: torch.Tensor
    norm: torch.Tensor


def build_rank(
    job: Job,
    layout: Layout,
    comm: Comm,
    labels: Labels,
    *,
    seed: int | None = 0,
    settings: OptimizerSettings | None = None,
    device: torch.device | None = None,
) -> Rank:
    """Allocate one rank's state and wire its executor. `seed` None leaves the weights at zero (a dry run).

    Raises LayoutError where the plan is legal but this runtime would compute something else.
    """
    if broken := runs_here(layout, job):
        raise LayoutError([f"{layout}: {finding}" for finding in broken])
    device = device or torch.device("cpu")
    model, precision = job.model, job.precision
    compute, wide = torch_dtype(precision.compute), torch_dtype(precision.accumulate)
    pp_rank = layout.mesh.coordinates(comm.rank)["pp"]
    held = rank_units(model, layout, pp_rank)
    twins, copies = _twins(model, layout, held), int(kv_copies(model, degrees(layout)))
    world = World(layout.mesh, comm, labels, tied_ranks(model, layout), twins, copies)
    states, buckets = _allocate(job, layout, held, world, device)
    queue = WeightQueue()
    cos, sin = rope_tables(model, job.seq_len, compute)
    context = Context(model, world, queue, layout.sp, wide, (cos.to(device), sin.to(device)), layout.recompute)
    modules: dict[str, UnitModule] = {}
    for unit in held.units:
        modules[unit.name] = UnitModule(unit, _slots_of(model, unit, held, states), context)
    cut = job.cut(layout)
    shape = (cut.tokens // (layout.tp if layout.sp else 1), model.hidden)
    executor = Executor(world, held, modules, states, buckets, queue, shape, layout.recompute == "full")
    optimizer = Optimizer(states.values(), job.optimizer, settings or OptimizerSettings.of(TrainSettings()))
    rank = Rank(job, layout, world, states, executor, optimizer, wide, device)
    if seed is not None:
        set_weights(rank, lambda record, tp_index: initial_values(model, record, tp_index, seed))
    return rank


def _twins(model: Model, layout: Layout, held: RankUnits) -> tuple[int, ...]:
    """Pipeline ranks that hold a rank's stages, itself among them, where each stage is held twice."""
    mine = {s.index for s in held.stages}
    return tuple(sorted({s.rank for s in stages_of(model, layout) if s.index in mine}))


def _allocate(
    job: Job, layout: Layout, held: RankUnits, world: World, device: torch.device
) -> tuple[dict[str, UnitState], dict[str, GradientBucket]]:
    """The state of every storage, in the order of the model, and the buckets of their gradients."""
    wide = torch_dtype(job.precision.accumulate)
    places: dict[str, torch.Tensor] = {}
    flats: dict[str, torch.Tensor] = {}
    found = buckets_of(held, layout)
    for name, bucket in found.items():
        if len(bucket.storages) > 1:
            flats[name] = torch.zeros(int(bucket.shard_numel), dtype=wide, device=device)
            parts = flats[name].split([int(s.shard_numel) for s in bucket.storages])
            places |= {s.unit: part for s, part in zip(bucket.storages, parts, strict=True)}
    states = {
        name: UnitState(s, layout.zero, job, world, device, places.get(name)) for name, s in held.storages.items()
    }
    return states, {
        name: GradientBucket(bucket, states[bucket.storages[0].unit], flats.get(name), world)
        for name, bucket in found.items()
    }


def _slots_of(model: Model, unit: Unit, held: RankUnits, states: dict[str, UnitState]) -> dict[str, Slot]:
    """The unit's parameters by their names in the unit; a tied weight may sit in another unit's storage."""
    every = {name: slot for storage in held.uses[unit.name] for name, slot in states[storage].slots.items()}
    return {p.name: every[logical_name(model, unit, p)] for p in unit.block.parameters}


def set_weights(rank: Rank, part: Callable[[Record, int], torch.Tensor]) -> None:
    """Set every parameter from `part(record, tensor-parallel index)`, the record's box of the whole, in any dtype."""
    tp_index = rank.world.index("tp")
    for state in rank.states.values():
        state.load({r.name: part(r, tp_index).to(state.wide) for r in state.storage.records})


def train_step(
    rank: Rank,
    ids: torch.Tensor | None,
    targets: torch.Tensor | None,
    micro_batches: int | None = None,
    done: Done | None = None,
) -> StepResult:
    """One optimizer step over this rank's micro-batches. ids, targets [micro-batches, T]; None where not needed.

    `micro_batches` runs fewer than the job's (a dry run's steady state); `done` is told of each as it ends.
    """
    result = gradients(rank, ids, targets, micro_batches, done)
    with rank.world.labels.at(phase=Phase.UPDATE):
        rank.optimizer.step(result.norm)
    return result


def gradients(
    rank: Rank,
    ids: torch.Tensor | None,
    targets: torch.Tensor | None,
    micro_batches: int | None = None,
    done: Done | None = None,
) -> StepResult:
    """Forward and backward of one step: every gradient summed over all ranks, in the states' gradient shards."""
    world = rank.world
    for state in rank.states.values():
        state.zero_gradient()
    scale = torch.zeros((), dtype=rank.wide, device=rank.device)
    if targets is not None:
        with world.at("loss", Phase.COUNT):
            scale = token_scale(targets, rank.wide, world)
    count = micro_batches or rank.micro_batches
    row = lowered_row(rank.job.model, rank.layout, count, world.coordinates["pp"])
    losses = rank.executor.run(row, Data(ids, targets, scale), done)
    with world.at("loss", Phase.REPORT):
        loss = report(losses, rank.wide, rank.device, world)
    with world.at("clip", Phase.NORM):
        norm = clip_norm(rank.counted, world)
    return StepResult(loss, norm)
