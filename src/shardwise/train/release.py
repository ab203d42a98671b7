"""Collectives that are over when nobody but the caller holds their tensors.

A thread of gloo lets go of a tensor a moment after the wait for it has ended. Where that is the last holder, the memory
is released there, and a profiler of this thread does not see it go. It costs little, and only a profile pays it.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from shardwise.train.comm import Comm, Group, Message, Work

PAUSE_S: Final = 2e-5
PATIENCE_S: Final = 0.5
"""Longest wait for one operation: who holds a tensor longer than this means to."""


class Releasing:
    """A `Comm` that hands everything on to another one."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size

    def group(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> Group:
        return self.comm.group(axes, ranks)

    def point_to_point_group(self, ranks: tuple[int, ...]) -> None:
        self.comm.point_to_point_group(ranks)

    def all_reduce(self, x: torch.Tensor, group: Group, op: str = "sum") -> Work:
        held = _Held((x,))
        return _Releasing(self.comm.all_reduce(x, group, op), held)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Work:
        held = _Held((out, x))
        return _Releasing(self.comm.all_gather(out, x, group), held)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Work:
        held = _Held((out, x))
        return _Releasing(self.comm.reduce_scatter(out, x, group), held)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> None:
        held = _Held((out, x))
        self.comm.all_to_all(out, x, group)
        held.wait()

    def post(self, batch: list[Message]) -> list[Work]:
        """As it is: no thread holds a message."""
        return self.comm.post(batch)


class _Releasing:
    """A work that ends when its tensors are free."""

    def __init__(self, work: Work, held: _Held) -> None:
        self.works, self.held = [work], held

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()  # and drop it: it holds them as well
        self.held.wait()


class _Held:
    """By how many some tensors' memory is held now, and the wait until it is not held by more."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.storages = [x.untyped_storage() for x in tensors]
        self.holders = [_holders(storage) for storage in self.storages]

    def wait(self) -> None:
        latest = time.perf_counter() + PATIENCE_S
        while any(map(int.__gt__, map(_holders, self.storages), self.holders)) and time.perf_counter() < latest:
            time.sleep(PAUSE_S)
        self.storages.clear()


def _holders(storage: Any) -> int:
    """There is no public way to ask."""
    return torch._C._storage_Use_Count(storage._cdata)
