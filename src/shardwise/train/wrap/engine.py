"""When units are gathered, freed and reduced: the one state behind all modules that were wrapped together.

A unit is gathered when a forward enters its module, when its weight is read as an attribute while a forward computes,
and when backward unpacks a tensor that was saved from it. At that moment the gather of the next unit starts, and no
other: at most two units are there at a time, besides those of forwards that are nested in one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.train.wrap.reducer import Reducer
from shardwise.train.wrap.shards import Reduction, Slot, Unit
from shardwise.train.wrap.trace import Trace

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009

IN_FLIGHT = 2
"""Reductions under way; each holds a unit's gradient."""


@dataclass(slots=True, eq=False)
class _Weight:
    """A saved view of a unit's buffer, kept as its geometry alone."""

    unit: Unit
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True, eq=False)
class _Other:
    """A saved tensor that hooks outside of ours (recomputation, offload) have packed."""

    unpack: Callable[[Any], torch.Tensor]
    value: Any


class Engine:
    """Units in the order of registration, and what is under way. `reducer` averages what is not sharded."""

    def __init__(self, units: Sequence[Unit], reducer: Reducer) -> None:
        self.units, self.reducer = list(units), reducer
        self.slots: dict[nn.Parameter, tuple[Slot, Unit]] = {s.shard: (s, u) for u in units for s in u.slots}
        self.trace = Trace.guess(self.units)
        self._depth = 0
        self._present: dict[int, Unit] = {}
        """units that are gathered, by the address of their buffer"""
        self._ahead: Unit | None = None
        self._reductions: deque[Reduction] = deque()
        self._stamp: int | None = None
        """versions of all shards when the first gradient since the last `finish` arrived"""
        self._in_backward = False
        self._hooks = [hook for unit in units for slot in unit.slots for hook in self._listen(unit, slot)]
        self._pack_hook = self._pack

    def _listen(self, unit: Unit, slot: Slot) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for leaf, hook in (slot.whole, partial(self._arrived, unit, slot)), (slot.shard, partial(_refuse_shard, slot)):
            trainable = leaf.requires_grad
            yield leaf.requires_grad_().register_post_accumulate_grad_hook(hook)  # a frozen one may thaw later
            leaf.requires_grad_(trainable)

    def close(self) -> None:
        """Hand the units to another engine. Raises RuntimeError in the middle of a step."""
        if self._depth or self._stamp is not None:
            raise RuntimeError("wrap before the first step, or after finish_gradient_synchronization()")
        for hook in self._hooks:
            hook.remove()
        self.reducer.close()

    # Forward

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A forward of any wrapped module. The outermost one starts the trace, and ends with nothing gathered."""
        outermost = self._depth == 0 and not in_backward()
        if outermost:
            self._begin()
        self._depth += 1
        try:
            with self._saving():
                yield
        finally:
            self._depth -= 1
            if outermost:
                self.trace.note(None)
                self._reshard_all()

    def _begin(self) -> None:
        self._reshard_all()
        if self._in_backward:  # it raised, or it would have said that it ended
            self._abandon()
        elif self._stamp is not None:
            if self._stamp != self._version():
                raise RuntimeError("parameters changed before finish_gradient_synchronization() was called")
            self.finish()
        self.reducer.refresh()
        self.trace.restart()

    def _saving(self) -> Any:
        """Pack what autograd saves. The innermost hooks alone are called, so ours hand on to those outside."""
        if not torch.is_grad_enabled():
            return nullcontext()
        # Private to torch, as is `in_backward`; torch's own checkpointing asks the same two questions.
        outer = _autograd._top_saved_tensors_default_hooks(False)
        if outer is None:
            return torch.autograd.graph.saved_tensors_hooks(self._pack_hook, self._unpack)
        if getattr(outer[0], "engine", None) is self or outer[0] is self._pack_hook:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(_PackOver(self, *outer), self._unpack)

    @contextmanager
    def using(self, units: Sequence[Unit]) -> Iterator[None]:
        """A forward of one unit's module: gathered inside the block, freed after it."""
        with self.scope():
            held: list[Unit] = []
            try:
                for unit in units:
                    self._need(unit)
                    unit.pins += 1
                    held.append(unit)
                yield
            finally:
                for unit in held:
                    unit.pins -= 1
                    if not unit.pins and not unit.kept:
                        self._reshard(unit)

    def read(self, parameter: Any) -> Any:
        """What a module's attribute gives: the whole parameter while a forward computes, else the shard."""
        found = self.slots.get(parameter)
        if found is None:
            return parameter
        slot, unit = found
        if not unit.pins:
            if not self._depth and not (torch.is_grad_enabled() and in_backward()):
                return parameter
            self._need(unit)
            unit.kept = True
        return slot.whole

    def _need(self, unit: Unit) -> None:
        """Gather `unit` now, unless it is here; start the gather of the one after."""
        if unit.buffer is not None:
            return
        if self._ahead is not None and self._ahead is not unit:
            self._ahead.cancel()
        self._ahead = None
        if not unit.in_flight:
            unit.start()
        unit.land()
        if unit.buffer is not None and unit.buffer.numel():
            self._present[unit.buffer.untyped_storage().data_ptr()] = unit
        following = self.trace.note(unit)
        if following is not None and following.buffer is None:
            self._ahead = following
            following.start()

    def _reshard(self, unit: Unit) -> None:
        if unit.buffer is not None and unit.buffer.numel():
            self._present.pop(unit.buffer.untyped_storage().data_ptr(), None)
        unit.reshard()

    def _reshard_all(self, but: Unit | None = None) -> None:
        if but is None and self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        for unit in list(self._present.values()):
            if unit is not but and not unit.pins:
                self._reshard(unit)

    # Saved tensors

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._present and tensor.layout is torch.strided:
            unit = self._present.get(tensor.untyped_storage().data_ptr())
            if unit is not None and tensor.dtype is unit.compute:
                return _Weight(unit, unit.version, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return tensor

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, _Other):
            return packed.unpack(packed.value)
        if torch.is_grad_enabled():
            raise RuntimeError(f"{packed.unit.name}: a backward through a backward (create_graph) is not supported")
        if packed.version != packed.unit.version:
            raise RuntimeError(f"{packed.unit.name}: its parameters changed between forward and backward")
        self._enter_backward()
        if not self._depth:  # else this backward is a part of a forward, which may hold what it has read
            self._reshard_all(but=packed.unit)
        self._need(packed.unit)
        return packed.unit.buffer.as_strided(packed.size, packed.stride, packed.offset)

    # Backward

    def _enter_backward(self) -> None:
        if not self._in_backward and in_backward():
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)

    def _leave_backward(self) -> None:
        self._in_backward = False
        if not self._depth:
            self._reshard_all()

    def _arrived(self, unit: Unit, slot: Slot, whole: torch.Tensor) -> None:
        """Autograd has added up all uses of one parameter."""
        if whole.grad is not None and whole.grad.layout is not torch.strided:
            raise RuntimeError(f"{slot.name}: its gradient is sparse, wanted dense: build it with sparse=False")
        self._enter_backward()
        if self._stamp is None:
            self._stamp = self._version()
        slot.arrived = True
        if unit.complete:
            if not unit.pins:
                self._reshard(unit)
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        while len(self._reductions) >= IN_FLIGHT:
            self._reductions.popleft().land()
        self._reductions.append(unit.start_reduce())

    def _abandon(self) -> None:
        """Forget a backward that failed on every rank."""
        self._in_backward, self._stamp = False, None
        while self._reductions:
            self._reductions.popleft().drop()
        for unit in self.units:
            unit.forget_gradients()
        self.reducer.abandon()

    def finish(self) -> None:
        """Reduce what is left, wait for all of it."""
        for unit in self.units:
            if any(slot.arrived for slot in unit.slots):
                self._reduce(unit)
        while self._reductions:
            self._reductions.popleft().land()
        self.reducer.finish()
        self._stamp = None

    def _version(self) -> int:
        return sum(unit.version for unit in self.units)


class _PackOver:
    """Our pack hook on top of another one."""

    def __init__(self, engine: Engine, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]):
        self.engine, self._outer_pack, self._outer_unpack = engine, pack, unpack

    def __call__(self, tensor: torch.Tensor) -> Any:
        packed = self.engine._pack(tensor)
        return _Other(self._outer_unpack, self._outer_pack(tensor)) if packed is tensor else packed


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def _refuse_shard(slot: Slot, shard: torch.Tensor) -> None:
    shard.grad = None
    raise RuntimeError(
        f"{slot.name}: a loss was computed from this rank's shard; read the parameter as an attribute of its module "
        "inside the model's forward, or inside `with model.full_parameters():`"
    )
