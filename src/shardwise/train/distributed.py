"""`Comm` over torch.distributed: NCCL, gloo, and the fake process group under which one rank runs alone.

Every operation is issued inside the label of its axis, since a recorder reads the label when the operation is
dispatched. On NCCL and fake the logical operation is the issued one; gloo has lowerings, in a table below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from shardwise.collective import Labels, Phase, axis_label
from shardwise.train.arithmetic import group_index, reduce_in_order, require, require_divisible, require_op, type_text
from shardwise.train.comm import Group, Message, Work

T = TypeVar("T")

BACKENDS = ("nccl", "gloo", "fake")
OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def open_world(
    backend: str,
    rank: int,
    world_size: int,
    rendezvous: object = None,
    *,
    labels: Labels | None = None,
    timeout_s: float = 60.0,
    device: torch.device | None = None,
) -> DistributedComm:
    """Join the world. `rendezvous` is a torch store, or an init method: `env://` (torchrun), `file://...`, `tcp://...`.

    `fake` needs no rendezvous. `device` is this rank's GPU, for NCCL. Raises ValueError for an unknown backend and
    CommError when the others do not come within `timeout_s`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "fake" and rendezvous is None:
        # Importing the module registers the backend. It is private to torch, but there is no other door to it.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rendezvous = FakeStore()
    where = {"init_method" if rendezvous is None or isinstance(rendezvous, str) else "store": rendezvous}
    try:
        # The default group is not bound to a device: else torch makes each subgroup by splitting it, which all ranks
        # of the world would have to join. It carries no operation, so under NCCL it never gets a communicator.
        dist.init_process_group(
            backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), **cast(Any, where)
        )
    except RuntimeError as error:
        raise CommError(f"rank {rank} could not join a {backend} world of {world_size}: {error}") from error
    return DistributedComm(backend, labels or Labels(), timeout_s=timeout_s, device=device)


def close_world() -> None:
    """Leave the world; nothing happens where none is open."""
    if dist.is_initialized():
        dist.destroy_process_group()


class CommError(RuntimeError):
    """An operation failed or timed out. Names rank, operation, tensor, axes and ranks; chained to the cause."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One operation, as errors name it."""

    rank: int
    kind: str
    tensor: torch.Tensor
    group: Group
    peer: str = ""

    def run(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except RuntimeError as error:
            where = f"{axis_label(self.group.axes)} (ranks {', '.join(map(str, self.group.ranks))})"
            what = f"{self.kind} {type_text(self.tensor)}{self.peer}"
            raise CommError(f"rank {self.rank}: {what} on {where} failed: {error}") from error


@dataclass(frozen=True, slots=True)
class _CallWork:
    """A backend's work with a name; it keeps the tensor alive, which gloo's does not.

    NCCL runs it on a stream of its own, behind what the current stream held when it was issued; its `wait` returns at
    once and only has the current stream wait. A tensor that is let go after `wait` is reused by that stream alone.
    """

    call: _Call
    work: Work

    def wait(self) -> None:
        self.call.run(self.work.wait)


class _Works(NamedTuple):
    """Several works of the backend as one."""

    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class DistributedComm:
    """`Comm` of this process in the world that torch.distributed has open; made by `open_world`."""

    def __init__(self, backend: str, labels: Labels, *, timeout_s: float = 60.0, device: torch.device | None = None):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.backend = backend
        self.labels = labels
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device if self.backend == "nccl" else None
        self._groups: dict[tuple[tuple[str, ...], tuple[int, ...]], Group] = {}
        self._pairs: dict[int, Group] = {}

    def group(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> Group:
        """Make the group, once. Only its members take part, so this does not grow with the world.

        torch names such a group by its ranks and by how many groups this process has made: members must agree on
        both. Where only some ranks need a group, the others make another one (of themselves alone) in its place.
        """
        if (axes, ranks) not in self._groups:
            same = next((g for g in self._groups.values() if g.ranks == ranks), None)
            # Axes of degree 1 give several names to one set of ranks: one communicator serves them all.
            made = self._new_group(axes, ranks) if same is None else replace(same, axes=axes)
            self._groups[axes, ranks] = made
        return self._groups[axes, ranks]

    def point_to_point_group(self, ranks: tuple[int, ...], axes: tuple[str, ...] = ("pp",)) -> None:
        """Make the group in which `post` reaches these peers: never one of the groups that carry collectives."""
        group = self._new_group(axes, ranks)
        self._pairs |= dict.fromkeys(ranks, group)

    def all_reduce(self, x: torch.Tensor, group: Group, op: str = "sum") -> Work:
        require_op(op)
        require(x, x, x.numel())
        call = _Call(self.rank, f"all_reduce {op}", x, group)
        return self._start(call, lambda: dist.all_reduce(x, OPS[op], group=_handle(group), async_op=True))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Work:
        require(out, x, x.numel() * group.size)
        call = _Call(self.rank, "all_gather", x, group)
        return self._start(call, lambda: _all_gather(out.view(-1), x.view(-1), _handle(group), True))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Work:
        require_divisible(x, group.size)
        require(out, x, x.numel() // group.size)
        lowering = REDUCE_SCATTER[self.backend]
        call = _Call(self.rank, "reduce_scatter sum", x, group)
        return self._start(call, lambda: lowering(out.view(-1), x.view(-1), group))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> None:
        require_divisible(x, group.size)
        require(out, x, x.numel())
        flat = out.view(-1), x.view(-1)
        self._label(
            _Call(self.rank, "all_to_all", x, group), lambda: dist.all_to_all_single(*flat, group=_handle(group))
        )

    def post(self, batch: list[Message]) -> list[Work]:
        ends = [(message, self._pair_group(message.peer)) for message in batch]
        for message, _ in ends:
            require(message.tensor, message.tensor, message.tensor.numel())
        return self._post_fused(ends) if self.backend == "nccl" else [self._post_one(*end) for end in ends]

    def _post_one(self, message: Message, group: Group) -> Work:
        """Issued alone, each with its own label; gloo lets all that is posted progress."""
        call, start = _message_call(self.rank, message, group), dist.isend if message.send else dist.irecv
        with self.labels.at(module=message.module, phase=Phase.SEND if message.send else Phase.RECV):
            work = self._label(call, lambda: start(message.tensor, message.peer, group=_handle(group)))
        return _CallWork(call, cast(Work, work))

    def _post_fused(self, ends: list[tuple[Message, Group]]) -> list[Work]:
        """One NCCL kernel a group, or its operations would run in order; its works stand for each of them."""
        works: dict[Group, Work] = {}
        for group in dict.fromkeys(group for _, group in ends):
            here = [message for message, other in ends if other is group]
            call = _message_call(self.rank, here[0], group)
            works[group] = _Works(
                self._label(call, lambda g=group, h=here: dist.batch_isend_irecv([_p2p_op(m, g) for m in h]))
            )
        return [_CallWork(_message_call(self.rank, message, group), works[group]) for message, group in ends]

    def _pair_group(self, peer: int) -> Group:
        if peer not in self._pairs:
            if self.backend == "nccl":  # the first batch of a communicator must be joined by all its ranks
                raise ValueError(f"rank {self.rank} has no point-to-point group with rank {peer}")
            everyone = tuple(range(self.world_size))
            default = Group(("pp",), everyone, self.rank, dist.group.WORLD)
            self._pairs = dict.fromkeys(everyone, default) | self._pairs
        return self._pairs[peer]

    def _new_group(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> Group:
        index = group_index(axes, ranks, self.rank, self.world_size)
        name = axis_label(axes)
        try:
            # With `device_id` NCCL makes the communicator now, not inside the first step.
            handle = dist.new_group(
                list(ranks),
                backend="cpu:fake,meta:fake" if self.backend == "fake" else None,  # a dry run may hold meta tensors
                timeout=self._timeout,
                use_local_synchronization=True,
                group_desc=name,
                device_id=self._device,
            )
        except RuntimeError as error:
            hint = "(do all members make it, after equally many groups?)"
            raise CommError(f"rank {self.rank}: group {name} of ranks {ranks} failed {hint}: {error}") from error
        return Group(axes, ranks, index, handle)

    def _start(self, call: _Call, function: Callable[[], Any]) -> Work:
        return _CallWork(call, cast(Work, self._label(call, function)))

    def _label(self, call: _Call, function: Callable[[], T]) -> T:
        with self.labels.at(axis=axis_label(call.group.axes)):
            return call.run(function)


def _handle(group: Group) -> Any:
    return group.handle


def _message_call(rank: int, message: Message, group: Group) -> _Call:
    kind, preposition = ("send", "to") if message.send else ("recv", "from")
    return _Call(rank, f"{kind} {message.name!r}", message.tensor, group, f" {preposition} rank {message.peer}")


def _p2p_op(message: Message, group: Group) -> dist.P2POp:
    return dist.P2POp(dist.isend if message.send else dist.irecv, message.tensor, message.peer, _handle(group))


# torch 2.13 renames these two and warns of the old names; torch 2.11 may have the old names alone.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _native_reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: Group) -> Any:
    return _reduce_scatter(out, x, OPS["sum"], _handle(group), True)


@dataclass(frozen=True, slots=True)
class _Summing:
    """Parts of a sum on their way from all ranks; they are added where one waits for them."""

    work: Any
    received: torch.Tensor
    out: torch.Tensor
    group: Group

    def wait(self) -> None:
        self.work.wait()
        with torch.no_grad():
            self.out.copy_(reduce_in_order(self.received.view(self.group.size, -1).unbind(0), "sum"))


def _all_to_all_and_sum(out: torch.Tensor, x: torch.Tensor, group: Group) -> Any:
    """(n-1)/n of x on the wire, where gloo's own sends twice that; and the sum is in rank order, as on threads."""
    received = torch.empty_like(x)
    return _Summing(dist.all_to_all_single(received, x, group=_handle(group), async_op=True), received, out, group)


REDUCE_SCATTER: dict[str, Callable[[torch.Tensor, torch.Tensor, Group], Any]] = {
    "nccl": _native_reduce_scatter,
    "fake": _native_reduce_scatter,
    "gloo": _all_to_all_and_sum,
}
"""How a backend carries out the logical reduce-scatter. Only gloo differs, so a ledger never sees a lowering."""
