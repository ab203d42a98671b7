"""Ops that are computed again in the backward by themselves (Korthikanti et al. 2205.05198, section 5).

Such an op leaves its inputs alone. Its first reader in the backward makes the rest anew, and what was made lives until
the op's own backward is through: as long as the graph's nodes of the op and of its reader hold what they saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

Made = torch.Tensor | tuple[torch.Tensor, ...]
Reading = AbstractContextManager[Any]
"""What the reader of an op's output runs in: where it would save the output, it saves how to make it."""


@dataclass(frozen=True, slots=True)
class Remake:
    """An op and what runs in its place the second time, on the inputs as the first left them. Of the tensors that it
    saves, the first `kept` stay; its (first) output is made again for its reader, unless it is among those."""

    first: Callable[..., Made]
    second: Callable[..., Made]
    kept: int
    output: bool = True


def run(op: Remake, dropped: bool, *inputs: torch.Tensor) -> tuple[Any, Reading]:
    """What the op makes, and what the reader of its (first) output runs in; nothing is made again unless `dropped`."""
    if not dropped:
        return op.first(*inputs), nullcontext()
    call = _Call(op, [x.detach() for x in inputs])
    with saved_tensors_hooks(call.drop, call.give):
        made = op.first(*inputs)
    return made, _reading(call, _first(made).untyped_storage()._cdata) if op.output else nullcontext()


def _first(made: Made) -> torch.Tensor:
    return made if isinstance(made, torch.Tensor) else made[0]


@dataclass(slots=True)
class _Call:
    """One call: its inputs, and once they are made again its output and what it saved beside the kept."""

    op: Remake
    inputs: list[torch.Tensor]
    saves: int = 0
    output: torch.Tensor | None = None
    dropped: list[torch.Tensor] | None = None

    def drop(self, saved: torch.Tensor) -> torch.Tensor | int:
        self.saves += 1
        # Detached: an output that its own node holds with its graph would never be freed.
        return saved.detach() if self.saves <= self.op.kept else self.saves - self.op.kept - 1

    def give(self, saved: torch.Tensor | int) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else self.again()[saved]

    def again(self) -> list[torch.Tensor]:
        """What the op dropped; its output is made with it."""
        if self.dropped is None:
            saves: list[torch.Tensor] = []

            def catch(saved: torch.Tensor) -> torch.Tensor:
                saves.append(saved.detach())
                return saves[-1]

            with torch.enable_grad(), saved_tensors_hooks(catch, lambda saved: saved):
                made = self.op.second(*(x.requires_grad_() for x in self.inputs))
            self.output = _first(made).detach() if self.op.output else None
            self.dropped = saves[self.op.kept :]
        return self.dropped


def _reading(call: _Call, storage: int) -> Reading:
    def drop(saved: torch.Tensor) -> torch.Tensor | None:
        return None if saved.untyped_storage()._cdata == storage else saved.detach()

    def give(saved: torch.Tensor | None) -> torch.Tensor:
        if saved is not None:
            return saved
        call.again()
        assert call.output is not None
        return call.output

    return saved_tensors_hooks(drop, give)
