"""The wrappers' door to other ranks: groups made from what the caller has, and the five operations that they issue.

Nothing here starts a process group or reads the environment. Works are torch's: `wait()` orders the caller (gloo) or
the current stream (NCCL) behind the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.collective import Labels
from shardwise.mesh import DATA, Axes, Mesh, with_cp
from shardwise.train.distributed import DistributedComm

AnyMesh = Mesh | DeviceMesh | dist.ProcessGroup | None
"""Where data parallel ranks are: our mesh, torch's, one group, or None for the whole world."""

BROADCAST_BYTES = 25 * 2**20
"""A broadcast of many tensors goes in pieces of about this size."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process group, its size, and our place in it."""

    group: dist.ProcessGroup
    size: int
    index: int


@dataclass(frozen=True, slots=True)
class Grid:
    """`shard`: the ranks that share one copy of the parameters. `replicate`: our twins in the other copies, if any.

    `everyone` is both together: all ranks whose gradients are averaged.
    """

    shard: Ranks
    replicate: Ranks | None
    everyone: Ranks


def data_ranks(mesh: AnyMesh) -> Ranks:
    """All data parallel ranks of `mesh`. Raises RuntimeError where no process group is open, ValueError for a mesh
    that is not of this world or has several dims."""
    _require_open()
    if isinstance(mesh, Mesh):
        return _along(mesh, _present(mesh, DATA))
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"found a DeviceMesh of {mesh.ndim} dims, wanted 1: pass mesh[name] of its data dim")
        return _ranks(mesh.get_group())
    return _ranks(mesh)


def grid(mesh: AnyMesh) -> Grid:
    """Shards along `dp_shard` (and `cp`) of our Mesh, copies along `dp_replicate`; of a DeviceMesh of two dims, the
    last and the first. Raises as `data_ranks`."""
    _require_open()
    if isinstance(mesh, Mesh):
        copies = _present(mesh, ("dp_replicate",))
        shard = _along(mesh, _present(mesh, ("dp_shard",)))
        replicate = _along(mesh, copies) if mesh.degree(copies) > 1 else None
        return Grid(shard, replicate, shard if replicate is None else data_ranks(mesh))
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        replicate, shard = _ranks(mesh.get_group(0)), _ranks(mesh.get_group(1))
        numbers = sorted(mesh.mesh.flatten().tolist())
        everyone = _ranks(_group(("dp_replicate", "dp_shard"), tuple(numbers)))
        return Grid(shard, replicate if replicate.size > 1 else None, everyone)
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 2:
        raise ValueError(
            f"found a DeviceMesh of {mesh.ndim} dims, wanted (replicate, shard): pass mesh[names] of those"
        )
    shard = data_ranks(mesh)
    return Grid(shard, None, shard)


def _require_open() -> None:
    if not dist.is_initialized():
        raise RuntimeError("no process group is open: call torch.distributed.init_process_group first")


def _ranks(group: dist.ProcessGroup | None) -> Ranks:
    group = dist.group.WORLD if group is None else group
    size, index = dist.get_world_size(group), dist.get_rank(group)
    if group is None or index < 0:
        raise ValueError("this rank is not in the process group that was passed")
    return Ranks(group, size, index)


def _present(mesh: Mesh, axes: Axes) -> Axes:
    """Those of `axes` that the mesh has; context parallel ranks share the state, as data parallel ranks do."""
    names = {axis for axis, _ in mesh.degrees}
    cp = mesh.degree("cp") if "cp" in names and "dp_shard" in axes else 1
    return tuple(axis for axis in with_cp(axes, cp) if axis in names)


def _along(mesh: Mesh, axes: Axes) -> Ranks:
    world_size = dist.get_world_size()
    if mesh.world_size != world_size:
        raise ValueError(f"the mesh has {mesh.world_size} ranks, the open process group {world_size}")
    return _ranks(_group(axes, mesh.group(dist.get_rank(), axes)))


def _group(axes: Axes, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    backend = dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    comm = DistributedComm(backend, Labels(), timeout_s=1800.0, device=device)  # torch's default patience
    return cast(dist.ProcessGroup, comm.group(axes, ranks).handle)


# torch 2.13 renames these two and warns of the old names; torch 2.11 has the old names alone.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_all_reduce(x: torch.Tensor, ranks: Ranks) -> dist.Work:
    """The sum, in place."""
    return cast(dist.Work, dist.all_reduce(x, group=ranks.group, async_op=True))


def start_all_gather(out: torch.Tensor, x: torch.Tensor, ranks: Ranks) -> dist.Work:
    """out [size * numel] <- x [numel] of each rank, both flat."""
    return _all_gather(out, x, ranks.group, True)


def start_broadcast(x: torch.Tensor, ranks: Ranks, source: int = 0) -> dist.Work:
    """In place, from place `source` of the group."""
    return cast(dist.Work, dist.broadcast(x, group=ranks.group, group_src=source, async_op=True))


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """A reduce-scatter under way; `wait` gives this rank's part of the sum, a fresh tensor."""

    work: dist.Work
    received: torch.Tensor
    parts: int

    @staticmethod
    def start(x: torch.Tensor, ranks: Ranks) -> ReduceScatter:
        """x: flat, in `size` equal parts; the caller keeps it alive. On gloo an all-to-all and a sum in rank order:
        half the bytes of gloo's own."""
        if dist.get_backend(ranks.group) == "gloo":
            received = torch.empty_like(x)
            work = dist.all_to_all_single(received, x, group=ranks.group, async_op=True)
            return ReduceScatter(cast(dist.Work, work), received, ranks.size)
        out = x.new_empty(x.numel() // ranks.size)
        return ReduceScatter(_reduce_scatter(out, x, group=ranks.group, async_op=True), out, 1)

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.received if self.parts == 1 else self.received.view(self.parts, -1).sum(0)


def broadcast_all(tensors: Iterable[torch.Tensor], ranks: Ranks) -> None:
    """Every tensor takes the first rank's values. Tensors of one dtype and device travel together."""
    if ranks.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same in kinds.values():
        for piece in pieces(same, BROADCAST_BYTES):
            flat = torch.cat([t.reshape(-1) for t in piece])
            start_broadcast(flat, ranks).wait()
            unflatten(flat, piece)


def pieces(tensors: Sequence[torch.Tensor], limit_bytes: float) -> list[list[torch.Tensor]]:
    """The tensors in order, in runs of at most `limit_bytes`; a larger tensor has its own."""
    found: list[list[torch.Tensor]] = []
    room = 0.0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not found or size > room:
            found.append([])
            room = limit_bytes
        found[-1].append(tensor)
        room -= size
    return found


def unflatten(flat: torch.Tensor, into: Iterable[torch.Tensor]) -> None:
    """Copy consecutive parts of `flat` into the tensors."""
    offset = 0
    with torch.no_grad():
        for tensor in into:
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()


def require_same(what: str, mine: Sequence[str], ranks: Ranks) -> None:
    """Raise ValueError on every rank where ranks disagree: each would wait for other collectives than its peers."""
    if ranks.size == 1:
        return
    everyone: list[Any] = [None] * ranks.size
    dist.all_gather_object(everyone, list(mine), group=ranks.group)
    first = everyone[0]
    for place, theirs in enumerate(everyone):
        if theirs != first:
            n = next((i for i, (a, b) in enumerate(zip(first, theirs, strict=False)) if a != b), None)
            pair = f"{len(first)} and {len(theirs)} of them" if n is None else f"{first[n]} and {theirs[n]}"
            raise ValueError(f"ranks 0 and {place} of the group have different {what}: {pair}; build the same on each")
