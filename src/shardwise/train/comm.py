"""The one door for collectives and point-to-point. Nothing else in the runtime talks to another rank.

Backends: `train/distributed.py` (torch.distributed: NCCL, gloo, fake) and `train/threads.py` (ranks are threads of one
process). Tensors are contiguous; a collective on a group of one is the caller's to skip (see `World`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share this rank's coordinates outside `axes`: global, ascending; `index` is our place in it."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    handle: object = None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Work(Protocol):
    """A collective or point-to-point under way. `wait` returns when its tensors may be used (or raises); on a GPU, by
    what the current stream is given from then on. Its tensors are held until then."""

    def wait(self) -> object: ...


class Message(NamedTuple):
    """One end of a point-to-point: `tensor` is sent to or received from global rank `peer`.

    `name` says what it is, equal on both ends; `module` is the ledger's name of this end, such as `stages.3`.
    """

    send: bool
    tensor: torch.Tensor
    peer: int
    name: str
    module: str = ""


class Comm(Protocol):
    """What a backend offers one rank. `n` is a group's size; `x` is flat or has a leading dim that n divides."""

    rank: int
    world_size: int

    def group(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> Group:
        """Make (once, eagerly) the group of these global ranks; called in the same order by all its members."""
        ...

    def point_to_point_group(self, ranks: tuple[int, ...]) -> None:
        """Make the group in which `post` reaches these peers, apart from those that carry collectives."""
        ...

    def all_reduce(self, x: torch.Tensor, group: Group, op: str = "sum") -> Work:
        """In place; `op` is "sum" or "max". Asynchronous: `x` lives, and is left alone, until `wait`."""
        ...

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Work:
        """out [n * x.numel()] in the group's order <- x of each rank. Asynchronous: `x` lives until `wait`."""
        ...

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Work:
        """out [x.numel() / n] <- the sum over ranks of their `index`-th part of x; `out` may be that part itself.
        Asynchronous, as `all_reduce`."""
        ...

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> None:
        """Part j of x goes to rank j of the group; out [same shape] holds what each rank sent to us, in order."""
        ...

    def post(self, batch: list[Message]) -> list[Work]:
        """Start the operations of one batch together; each progresses independently of the others.

        A Work holds its tensor until it is waited for.
        """
        ...
