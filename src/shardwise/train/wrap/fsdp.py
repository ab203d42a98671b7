"""Fully sharded data parallelism (ZeRO-3) of any module: every rank holds a part of each parameter.

Rajbhandari et al. 2020 (ZeRO), Zhao et al. 2023 (PyTorch FSDP). The module is changed in place: class, names and
parameter objects stay, the parameters become this rank's rows of themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.train.wrap.attach import Forward, Home, homes, open_window, units_of
from shardwise.train.wrap.collectives import AnyMesh, Grid, broadcast_all, grid, require_same, start_all_reduce
from shardwise.train.wrap.ddp import describe, require_values
from shardwise.train.wrap.engine import Engine
from shardwise.train.wrap.reducer import MB, Reducer
from shardwise.train.wrap.shards import Unit, cut, gather_whole, set_shard

M = TypeVar("M", bound=nn.Module)

ShardTypes = tuple[type[nn.Module], ...]

BUCKET_BYTES = 25 * MB
"""Of the gradients of parameters that are not sharded."""

METHODS = (
    "finish_gradient_synchronization",
    "gather_full_state_dict",
    "load_full_state_dict",
    "clip_grad_norm_",
    "full_parameters",
)
"""What `fsdp` adds to the module it is given: bound methods of a `Sharding`."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """`compute`: of gathered weights and the inputs of sharded modules. `output`: of what they return."""

    compute: torch.dtype | None
    output: torch.dtype | None


def fsdp(
    module: M,
    mesh: AnyMesh = None,
    shard_types: ShardTypes = (nn.Linear, nn.Embedding),
    compute_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
) -> M:
    """Shard the parameters of every module of `shard_types`, in place, and return `module`.

    The outermost module of those types is a unit, with all parameters inside: gathered when its forward begins, freed
    when it ends, and again in backward. All other parameters stay whole on every rank, their gradients are averaged.
    Rank 0's parameters and buffers go to all ranks first. A tied parameter has one shard. Collective.

    `mesh`: None (the world), a ProcessGroup, a DeviceMesh of (shard) or (replicate, shard), or a shardwise Mesh
    (`dp_shard` and `cp` shard, `dp_replicate` holds copies). `compute_dtype`: of gathered weights and of the floating
    inputs of the units; None leaves both. `output_dtype`: what units return is cast to it. Shards and their
    gradients are float32 (float64 where the parameter is).

    Adds the methods of `Sharding` to `module`; call `finish_gradient_synchronization()` before the optimizer's step.
    Raises RuntimeError where no process group is open, ValueError, naming all faults, for what cannot be sharded.
    """
    where, types = grid(mesh), tuple(shard_types)
    inner = homes(module)
    before = dict.fromkeys(unit for home in inner for unit in home.engine.units)
    claimed = {slot.shard for unit in before for slot in unit.slots}
    roots = unit_roots(module, types, claimed)
    require_values(list(module.named_parameters()))
    _require_shardable(module, roots, compute_dtype)
    _require_nested(module, inner, where)
    _spread(module, claimed, where)
    for home in inner:
        home.engine.close()
    names = {p: name for name, p in module.named_parameters()}
    units = [_unit(name, parameters, names, where, compute_dtype) for name, (_, parameters) in roots.items()]
    home = Home(_engine(module, [*before, *units], where))
    for other in inner:
        other.engine = home.engine
    for inside in module.modules():
        if any(p in home.engine.slots for p in inside._parameters.values()):
            open_window(inside, home)
    dtypes = Dtypes(compute_dtype, output_dtype)
    for root in dict.fromkeys(root for _, root in outermost(module, types)):
        attach_units(root, home, [unit for unit in units_of(root, home.engine.slots) if unit not in before], dtypes)
    attach_root(module, home)
    return module


def _spread(module: nn.Module, claimed: set[nn.Parameter], where: Grid) -> None:
    """Rank 0's parameters and buffers to all ranks; what is sharded already has been."""
    fresh = [(name, p) for name, p in module.named_parameters() if p not in claimed]
    require_same("parameters", [describe(name, p) for name, p in fresh], where.everyone)
    broadcast_all([*(p for _, p in fresh), *module.buffers()], where.everyone)


def _engine(module: nn.Module, units: Sequence[Unit], where: Grid) -> Engine:
    """Units in the order of registration; whatever is in none of them is averaged whole."""
    owners = {slot.shard: unit for unit in units for slot in unit.slots}
    in_order = dict.fromkeys(owners[p] for p in module.parameters() if p in owners)
    rest = [p for p in module.parameters() if p not in owners]
    return Engine([*in_order], Reducer(rest, where.everyone, BUCKET_BYTES, alike=True))


def unit_roots(
    module: nn.Module, types: ShardTypes, claimed: set[nn.Parameter]
) -> dict[str, tuple[nn.Module, list[nn.Parameter]]]:
    """Name -> (outermost module of `types`, the parameters inside that no unit before it has); never an empty list."""
    found: dict[str, tuple[nn.Module, list[nn.Parameter]]] = {}
    taken = set(claimed)
    for name, root in outermost(module, types):
        mine = [p for p in root.parameters() if p not in taken and p.is_floating_point() and p.ndim > 0]
        taken.update(mine)
        if mine:
            found[name] = root, mine
    return found


def outermost(module: nn.Module, types: ShardTypes, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules of `types` that are inside no other one, in the order of registration."""
    if isinstance(module, types):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from outermost(child, types, f"{name}.{child_name}" if name else child_name)


def _unit(
    name: str,
    parameters: Sequence[nn.Parameter],
    names: dict[nn.Parameter, str],
    where: Grid,
    dtype: torch.dtype | None,
) -> Unit:
    compute = parameters[0].dtype if dtype is None else dtype
    slots = [cut(names[p], p, where.shard, compute) for p in parameters]
    return Unit(name or "the module", slots, where, compute)


def attach_units(root: nn.Module, home: Home, units: Sequence[Unit], dtypes: Dtypes) -> None:
    """Gather `units` around the forward of `root`; those of an earlier wrapping have their own."""
    if units:
        root.forward = Forward(root.forward, home, units, dtypes.compute, dtypes.output)


def attach_root(module: nn.Module, home: Home) -> None:
    """The forward that all others are inside of, and the methods."""
    module.forward = Forward(module.forward, home)
    sharding = Sharding(module, home)
    for method in METHODS:
        setattr(module, method, getattr(sharding, method))


def sharding(module: nn.Module) -> Sharding:
    """The methods that `fsdp` added to `module`, for those who check types. Raises TypeError for other modules."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, Forward):
        raise TypeError(f"{type(module).__name__} was not wrapped by fsdp")
    return Sharding(module, forward.home)


class Sharding:
    """What `fsdp` lets a module do. Every method is collective."""

    def __init__(self, module: nn.Module, home: Home) -> None:
        self.module, self.home = module, home

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the average over ranks: this rank's rows of it, in `.grad` of the shards.

        Call it after backward, before clipping and stepping. To accumulate, run several backwards, then call it once:
        each backward reduces at once, and adds to the shards' gradients.
        """
        self.home.engine.finish()

    def gather_full_state_dict(self) -> dict[str, Any]:
        """The module's state with plain whole tensors, in the shards' dtype, under the original names, on every rank.

        Tied parameters share one tensor. Buffers and extra state as in `state_dict`.
        """
        whole: dict[nn.Parameter, torch.Tensor] = {}
        found: dict[str, Any] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if value in self.home.engine.slots if isinstance(value, nn.Parameter) else False:
                slot, unit = self.home.engine.slots[value]
                if value not in whole:
                    whole[value] = gather_whole(slot, unit.grid.shard)
                found[name] = whole[value]
            else:
                found[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return found

    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `gather_full_state_dict`; each rank passes the same whole tensors.

        Raises ValueError, naming all, for names or shapes that differ; nothing is changed then.
        """
        mine = self.module.state_dict(keep_vars=True)
        slots = self.home.engine.slots
        faults = [f"{name} is missing" for name in mine if name not in state]
        faults += [f"{name} is not in the module" for name in state if name not in mine]
        for name in mine.keys() & state.keys():
            if isinstance(mine[name], torch.Tensor):
                sharded = isinstance(mine[name], nn.Parameter) and mine[name] in slots
                wanted = slots[mine[name]][0].shape if sharded else mine[name].shape
                if state[name].shape != wanted:
                    faults.append(f"{name}: found {list(state[name].shape)}, wanted {list(wanted)}")
        if faults:
            raise ValueError("; ".join(faults))
        for name, value in mine.items():
            if isinstance(value, nn.Parameter) and value in slots:
                slot, unit = slots[value]
                set_shard(slot, state[name], unit.grid.shard)
            elif isinstance(value, torch.Tensor):
                value.detach().copy_(state[name])

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their one 2-norm is at most `max_norm`; that norm before, equal on every rank.

        torch.nn.utils.clip_grad_norm_ would see this rank's rows alone.
        """
        engine = self.home.engine
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        if not grads:
            return torch.zeros(())
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=grads[0].device)
        for unit in engine.units:
            total += _square_norm([slot.shard for slot in unit.slots], total)
        if engine.units and engine.units[0].grid.shard.size > 1:
            start_all_reduce(total, engine.units[0].grid.shard).wait()
        norm = (total + _square_norm(engine.reducer.parameters, total)).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.dtype))
        return norm

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """In this block, `module.weight` of any module inside is the whole parameter, gathered when first read.

        For computing with weights outside the model's forward, gradients included. Every rank reads the same ones, in
        the same order. In-place changes of a whole parameter are lost.
        """
        with self.home.engine.scope():
            yield


def _square_norm(parameters: Sequence[nn.Parameter], like: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(like)
    for p in parameters:
        if p.grad is not None:
            total += torch.linalg.vector_norm(p.grad, dtype=like.dtype).square()
    return total


def _require_shardable(
    module: nn.Module, roots: dict[str, tuple[nn.Module, list[nn.Parameter]]], compute: torch.dtype | None
) -> None:
    """Raise ValueError, naming all, for what would be silently wrong."""
    faults = [f"the module has a {name} of its own" for name in METHODS if hasattr(type(module), name)]
    if compute is not None and not compute.is_floating_point:
        faults.append(f"compute_dtype is {compute}, wanted a floating one")
    for name, (root, parameters) in roots.items():
        kinds = sorted({str(p.dtype) for p in parameters})
        if compute is None and len(kinds) > 1:
            faults.append(f"{name} mixes {' and '.join(kinds)}: pass compute_dtype")
        if len({torch.promote_types(p.dtype, torch.float32) for p in parameters}) > 1:
            faults.append(f"{name} mixes float64 with narrower parameters: convert the module first")
        for inside in root.modules():
            if isinstance(inside, nn.RNNBase):
                faults.append(f"{name}: {type(inside).__name__} keeps its weights in a list, which cannot be followed")
            if getattr(inside, "max_norm", None) is not None:
                faults.append(f"{name}: max_norm changes the weight in forward, which a shard cannot follow")
            if getattr(inside, "sparse", False):
                faults.append(f"{name}: sparse gradients cannot be sharded, build it with sparse=False")
    if faults:
        raise ValueError("; ".join(faults))


def _require_nested(module: nn.Module, inner: Sequence[Home], where: Grid) -> None:
    """Raise ValueError where earlier wrappings reach outside `module`, or over other ranks."""
    inside = set(module.parameters())
    for engine in (home.engine for home in inner):
        if not inside.issuperset([*engine.slots, *engine.reducer.parameters]):
            raise ValueError("a module around this one is sharded already: wrap from the inside out")
        for ranks in (engine.reducer.ranks, *(unit.grid.everyone for unit in engine.units)):
            if ranks.size != where.everyone.size:
                raise ValueError(f"a module inside is sharded over {ranks.size} ranks, not {where.everyone.size}")
