"""The executor: runs one lowered row, instruction by instruction.

Every unit runs on a detached input; its backward is one `torch.autograd.grad` from the unit's graph edge. What leaves
a stage waits in the outbox for the batch that sends it; a sent tensor lives until the rank's next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.collective import Phase
from shardwise.plan.shards import RankUnits
from shardwise.schedule.lowering import Do, Instruction, Lowered
from shardwise.schedule.table import P2P, Batch, Op
from shardwise.train.bucket import GradientBucket
from shardwise.train.comm import Message, Work
from shardwise.train.nn import UnitModule
from shardwise.train.reduction import Reductions
from shardwise.train.unit import UnitState
from shardwise.train.weights import Entry, WeightQueue, drain
from shardwise.train.world import World

Done = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Data:
    """One step's tokens of this rank: ids and targets [micro-batches, T], None where no stage needs them.

    `scale` is 1 / valid tokens of the whole step, a scalar in the wide dtype.
    """

    ids: torch.Tensor | None
    targets: torch.Tensor | None
    scale: torch.Tensor


@dataclass(slots=True)
class _Saved:
    """What a unit keeps from F to B: its input and the graph's edge (None when the forward runs again)."""

    leaf: torch.Tensor
    edge: GradientEdge | None


@dataclass(slots=True)
class _Step:
    """Tensors in flight of one step, by (stage or unit, micro-batch)."""

    data: Data
    flow: dict[tuple[Op, int, int], torch.Tensor] = field(default_factory=dict)
    """what the next unit of an action takes: F the activation, B the gradient"""
    saved: dict[tuple[str, int], _Saved] = field(default_factory=dict)
    queues: dict[tuple[str, int], deque[Entry]] = field(default_factory=dict)
    arriving: dict[tuple[Op, int, int], tuple[Work, torch.Tensor]] = field(default_factory=dict)
    sending: deque[Work] = field(default_factory=deque)
    sums: Reductions = field(default_factory=Reductions)
    losses: list[torch.Tensor] = field(default_factory=list)


class Executor:
    """Runs rows on the units of one rank. `shape` is a stage border's activation [t, h]."""

    def __init__(
        self,
        world: World,
        units: RankUnits,
        modules: dict[str, UnitModule],
        states: dict[str, UnitState],
        buckets: dict[str, GradientBucket],
        queue: WeightQueue,
        shape: tuple[int, int],
        recompute: bool,
    ) -> None:
        self.world, self.units, self.modules = world, units, modules
        self.states, self.buckets = states, buckets
        self.queue, self.shape = queue, shape
        self.again = {u.name for u in units.units if recompute and u.block.recomputable}
        self.kinds = {u.name: u.block.kind for u in units.units}
        self.copies = {s.index: s.copy for s in units.stages}
        self.lowest = {min(s for s, c in self.copies.items() if c == copy) for copy in self.copies.values()}
        state = next(iter(states.values()))
        self.dtype, self.device = state.compute, state.master.device

    def run(self, row: Lowered, data: Data, done: Done | None = None) -> list[torch.Tensor]:
        """One step; the losses of the micro-batches, where the last stage is ours.

        `done` is called with each micro-batch whose last gradient on the first of our stages is through.
        """
        step = _Step(data)
        for entry in row:
            if isinstance(entry, Instruction):
                self._instruct(entry, step)
                if done is not None and entry.last and entry.stage in self.lowest and entry.do in (Op.W, Op.BW):
                    done(entry.micro_batch)
            else:
                self._post(entry, step)
        self._settle(step)
        step.sums.finish()
        return step.losses

    def _instruct(self, x: Instruction, step: _Step) -> None:
        phase = Phase.B if x.do is Op.BW else Phase(x.do)
        with self.world.labels.at(module=x.unit, phase=phase, micro_batch=x.micro_batch):
            match x.do:
                case Op.F:
                    self._forward(x, step)
                case Op.B | Op.BW:
                    self._backward(x, step)
                case Op.W:
                    drain(step.queues.pop((x.unit, x.micro_batch)))
                case Do.REDUCE:
                    step.sums.add(self.buckets[x.unit].reduce(x.final))
                case Do.TWIN:
                    step.sums.finish()
                    self.buckets[x.unit].twin()
                case _:
                    self._on_state(x, self.states[x.unit], step)

    def _on_state(self, x: Instruction, state: UnitState, step: _Step) -> None:
        match x.do:
            case Do.UNSHARD:
                state.unshard()
            case Do.READY:
                state.ready()
            case Do.RESHARD:
                state.reshard()
            case Do.OPEN:
                state.open_gradient()
            case _:
                step.sums.finish()
                state.tie()

    def _forward(self, x: Instruction, step: _Step) -> None:
        kind, mb = self.kinds[x.unit], x.micro_batch
        leaf = self._input(x, step)
        again = x.unit in self.again
        with torch.set_grad_enabled(not again):
            y = self._call(x.unit, leaf, mb, step, dead=False)
        step.saved[x.unit, mb] = _Saved(leaf, None if again else get_gradient_edge(y))
        if kind == "head":
            step.losses.append(y.detach())
        else:
            self._leave(Op.F, x, y.detach(), step)

    def _input(self, x: Instruction, step: _Step) -> torch.Tensor:
        """The unit's input, detached: token ids, what arrived, or what the unit before it made."""
        if self.kinds[x.unit] == "embedding":
            assert step.data.ids is not None
            return step.data.ids[x.micro_batch]
        if x.first:
            self._receive(Op.F, x, step)
        return step.flow.pop((Op.F, x.stage, x.micro_batch)).requires_grad_()

    def _receive(self, tensor: Op, x: Instruction, step: _Step) -> None:
        key = (tensor, x.stage, x.micro_batch)
        if key in step.arriving:
            work, buffer = step.arriving.pop(key)
            with self.world.labels.at(module=f"stages.{x.stage}", phase=Phase.ARRIVE):
                work.wait()
            step.flow[key] = buffer

    def _leave(self, tensor: Op, x: Instruction, value: torch.Tensor, step: _Step) -> None:
        """Hand a unit's result to the next unit, of this stage or of a neighbour stage that may be ours too."""
        stage = x.stage
        if x.last:
            neighbour = stage + (1 if tensor is Op.F else -1)
            if self.copies.get(neighbour) == self.copies[stage]:
                stage = neighbour
        step.flow[tensor, stage, x.micro_batch] = value

    def _call(self, unit: str, leaf: torch.Tensor, mb: int, step: _Step, dead: bool) -> torch.Tensor:
        module = self.modules[unit]
        match self.kinds[unit]:
            case "embedding":
                return module.embedding(leaf)
            case "head":
                assert step.data.targets is not None
                return module.head(leaf, step.data.targets[mb], step.data.scale)
            case _:
                return module.layer(leaf, dead)

    def _backward(self, x: Instruction, step: _Step) -> None:
        labels, key, mb = self.world.labels, (x.unit, x.micro_batch), x.micro_batch
        if x.first:
            self._receive(Op.B, x, step)
        kind = self.kinds[x.unit]
        gradient = torch.ones_like(step.data.scale) if kind == "head" else step.flow.pop((Op.B, x.stage, mb))
        saved = step.saved.pop(key)
        if saved.edge is None:
            with labels.at(phase=Phase.RECOMPUTE), torch.enable_grad():
                saved.edge = get_gradient_edge(self._call(x.unit, saved.leaf, mb, step, dead=True))
        self.queue.deferred = step.queues.setdefault(key, deque()) if x.do is Op.B else None
        (below,) = self._gradient(x.unit, saved, gradient)
        if below is not None:
            self._leave(Op.B, x, below, step)

    def _gradient(self, unit: str, saved: _Saved, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The unit's input gradient; weights take theirs on the way. An embedding's leaves are its weights."""
        leaf = saved.leaf
        if self.kinds[unit] == "embedding":
            leaf = next(iter(self.states[unit].slots.values())).parameter
        edge = saved.edge
        assert edge is not None
        return torch.autograd.grad((edge,), (leaf,), (gradient,), allow_unused=True)

    def _post(self, batch: Batch, step: _Step) -> None:
        """Start one batch of point-to-point operations, after the sends of the one before it are through."""
        self._settle(step)
        messages = [self._message(op, step) for op in batch]
        works = self.world.comm.post(messages)
        for op, message, work in zip(batch, messages, works, strict=True):
            if op.send:
                step.sending.append(work)
            else:
                step.arriving[op.tensor, op.stage, op.micro_batch] = work, message.tensor

    def _message(self, op: P2P, step: _Step) -> Message:
        module, phase, peer = f"stages.{op.stage}", Phase.SEND if op.send else Phase.RECV, self.world.peer(op.peer)
        with self.world.labels.at(module=module, phase=phase, micro_batch=op.micro_batch, peer=peer):
            if op.send:
                tensor = step.flow.pop((op.tensor, op.stage, op.micro_batch))
            else:
                tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        what, source, micro_batch = op.message
        name = f"{what} of micro-batch {micro_batch} from stage {source}"
        return Message(op.send, tensor, peer, name, module)

    def _settle(self, step: _Step) -> None:
        """Wait for the sends under way and let go of their tensors."""
        if step.sending:
            with self.world.labels.at(module="stages", phase=Phase.SETTLE):
                while step.sending:
                    step.sending.popleft().wait()
