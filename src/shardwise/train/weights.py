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

    Whole blocks of `rows` come first, then the block that the padding fills up; empty shards have no view.
    """
    rows, columns = record.rows, record.columns
    flat = whole.reshape(record.shape[0], columns)
    cut = parts.unflatten(1, (rows, columns))
    full, rest = divmod(record.shape[0], rows)
    if full:
        yield flat[: full * rows].view(full, rows, columns), cut[:full]
    if rest:
        yield flat[full * rows :], cut[full, :rest]


@dataclass(slots=True)
class Slot:
    """`gradient` [shards, rows * columns] is a view into the unit's flat gradient, None while there is none."""

    record: Record
    parameter: torch.nn.Parameter
    gradient: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        return self.parameter.detach()

    def destination(self) -> torch.Tensor:
        if self.gradient is None:
            raise RuntimeError(f"{self.record.name}: its gradient arrived while no buffer was open")
        return self.gradient

    def add(self, gradient: torch.Tensor) -> None:
        """Add one micro-batch's gradient [shape of the parameter], in the buffer's dtype."""
        for mine, parts in shard_blocks(self.record, gradient, self.destination()):
            parts.add_(mine)


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
