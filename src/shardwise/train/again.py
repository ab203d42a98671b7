"""Ops that are computed again in the backward by themselves (Korthikanti et al. 2205.05198, section 5).

Such an op leaves its inputs alone. The first node of the graph that reads what it dropped makes it anew, ahead of that
what the op reads itself, where it was dropped too. What was made lives as long as the nodes that saved it. No op draws
random numbers (there is no dropout), so a second run has the first one's values and no generator's state is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.collective import Labels, Phase

Made = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Remake:
    """An op and what runs in its place the second time, on the inputs as the first left them. Of the tensors that it
    saves, the first `kept` stay. `read`: its (first) output is made again for those that save it."""

    first: Callable[..., Made]
    second: Callable[..., Made]
    kept: int
    read: bool = True


class Again:
    """The ops of one unit that are computed again, by their kinds."""

    def __init__(self, kinds: Collection[str], labels: Labels) -> None:
        self.kinds, self.labels = kinds, labels
        self.outputs: dict[int, tuple[StorageWeakRef, _Call]] = {}
        """by the address of their storage, which a weak reference keeps from being used by another one"""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What the unit's forward runs in."""
        if not self.kinds:
            yield
            return
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self.outputs.clear()

    def run(self, kind: str, op: Remake, *inputs: torch.Tensor) -> Any:
        """What the op makes."""
        if kind not in self.kinds:
            return op.first(*inputs)
        call = _Call(op.second, self.labels, [self._pack(x) for x in inputs])
        # The graph holds `drop`, which must not hold `op`: its first run may have tensors in it.
        saves, kept = 0, op.kept

        def drop(saved: torch.Tensor) -> Packed:
            nonlocal saves
            saves += 1
            return self._pack(saved) if saves <= kept else call.part(saves - 1)

        with saved_tensors_hooks(drop, _unpack):
            made = op.first(*inputs)
        if op.read:
            storage = _first(made).untyped_storage()
            self.outputs[storage._cdata] = StorageWeakRef(storage), call
        return made

    def _pack(self, saved: torch.Tensor) -> Packed:
        """Detached: an output that its own node holds with its graph would never be freed."""
        found = self.outputs.get(saved.untyped_storage()._cdata)
        return saved.detach() if found is None else found[1].part(_OUTPUT)


def _first(made: Made) -> torch.Tensor:
    return made if isinstance(made, torch.Tensor) else made[0]


_OUTPUT = -1


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Part:
    """In place of a saved tensor: the call that makes it again, as its output or as one of those that it saves."""

    call: _Call
    index: int
    tensor: torch.Tensor | None = None


Packed = torch.Tensor | _Part


def _unpack(packed: Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    if packed.tensor is None:
        packed.call.run()
    assert packed.tensor is not None
    return packed.tensor


@dataclass(eq=False, slots=True)
class _Call:
    """One call of an op. Its parts belong to the nodes that saved them: it holds no tensor once it has run again."""

    second: Callable[..., Made]
    labels: Labels
    inputs: list[Packed]
    parts: list[ref[_Part]] = field(default_factory=list[Any])

    def part(self, index: int) -> _Part:
        made = _Part(self, index)
        self.parts.append(ref(made))
        return made

    def run(self) -> None:
        """Give every part its tensor."""
        saves: list[torch.Tensor] = []

        def catch(saved: torch.Tensor) -> torch.Tensor:
            saves.append(saved.detach())
            return saves[-1]

        inputs = [_unpack(x).detach().requires_grad_() for x in self.inputs]
        self.inputs.clear()
        with (
            self.labels.at(phase=Phase.RECOMPUTE),
            torch.enable_grad(),
            saved_tensors_hooks(catch, lambda saved: saved),
        ):
            made = self.second(*inputs)
        for part in filter(None, (known() for known in self.parts)):
            part.tensor = _first(made).detach() if part.index == _OUTPUT else saves[part.index]
