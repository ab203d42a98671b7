"""Slot: a parameter and the place where its gradient is summed; WeightQueue: products whose W is still to come.

Gradients of parameters never travel through autograd. Every function of the model that owns a weight adds the
gradient to the weight's slot in its backward, or leaves it in the queue of the micro-batch for action W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from shardwise.plan.shards import Record


def shard_blocks(
    record: Record, whole: torch.Tensor, parts: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Matching views of the whole parameter and of its padded shards `parts` [shards, rows * columns].

    `whole` may be anything with the parameter's rows. Whole blocks of `rows` come first, then the block that the
    padding fills up; empty shards have no view.
    """
    rows = record.rows
    flat = whole.reshape(record.shape[0], -1)
    cut = parts.unflatten(1, (rows, record.columns))
    full, rest = divmod(record.shape[0], rows)
    if full:
        yield flat[: full * rows].unflatten(0, (full, rows)), cut[:full]
    if rest:
        yield flat[full * rows :], cut[full, :rest]


@dataclass(slots=True)
class Slot:
    """`gradient` [shards, rows * columns] is a view into the unit's flat gradient, None while there is none; `whole`
    the same of the parameter's shape, where there is one shard."""

    record: Record
    parameter: torch.nn.Parameter
    gradient: torch.Tensor | None = None
    whole: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        return self.parameter.detach()

    def open(self, gradient: torch.Tensor | None) -> None:
        """Sum into a view [shards, rows * columns] from now on."""
        self.gradient = gradient
        self.whole = None if gradient is None or len(gradient) > 1 else gradient.view(self.record.shape)

    def destination(self) -> torch.Tensor:
        if self.gradient is None:
            raise RuntimeError(f"{self.record.name}: its gradient arrived while no buffer was open")
        return self.gradient

    def add(self, gradient: torch.Tensor) -> None:
        """Add one micro-batch's gradient [shape of the parameter], in the buffer's dtype."""
        if self.whole is not None:
            self.whole.add_(gradient)
            return
        for mine, parts in shard_blocks(self.record, gradient, self.destination()):
            parts.add_(mine)

    def add_product(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        """Add gradient^T x; gradient [T, n], x [T, m]. Where no cast is needed the product is summed where it lands."""
        buffer, rows = self.destination(), gradient.t()
        if buffer.dtype != x.dtype:
            self.add(torch.mm(rows, x))
        elif self.whole is not None:
            self.whole.addmm_(rows, x)
        else:
            for mine, parts in shard_blocks(self.record, rows, buffer):
                if mine.dim() == 2:
                    parts.addmm_(mine, x)
                elif len(mine) == 1:
                    parts[0].addmm_(mine[0], x)
                else:
                    parts.baddbmm_(mine, x.expand(len(mine), *x.shape))


Entry = Callable[[], None]


@dataclass(slots=True)
class WeightQueue:
    """Where weight gradients go: at once, or into the queue of the action that runs (split B and W).

    An entry is a closure over the tensors that it holds, so that draining it frees them one by one.
    """

    deferred: deque[Entry] | None = field(default=None)

    def put(self, entry: Entry) -> None:
        if self.deferred is None:
            entry()
        else:
            self.deferred.append(entry)


def drain(entries: deque[Entry]) -> None:
    """Run the entries in the order in which B left them."""
    while entries:
        entries.popleft()()
