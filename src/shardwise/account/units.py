"""Memory of one unit on one rank, from the declared ops: who lives when, in forward and in backward.

A unit runs on a detached input. Its forward keeps what its ops save; its backward walks the ops in reverse, frees what
an op saved when the op is done, and makes the gradients of its inputs. With split gradients, every product keeps its
input and its output's gradient until W. All sizes are bytes; peaks count everything the unit owns at that moment,
its input and the incoming gradient among it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.model.spec import HEAD, Block, Cut, Model, Op, Scratch, TensorDesc
from shardwise.plan.shards import block_named


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """`saved` lives from F to B, `queued` from B to W; the peaks are those inside the unit's own actions."""

    input: int
    saved: int
    incoming: int
    f_peak: int
    bw_peak: int
    b_peak: int
    queued: int
    w_peak: int


class _Tensors:
    """Live tensors of a unit, by the storage they sit in (a residual is its source under another name)."""

    def __init__(self, model: Model, block: Block, cut: Cut) -> None:
        self.model, self.cut = model, cut
        self.owner: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        for desc in block.inputs:
            # Token ids stay with the data of the step; they are no activation.
            self._own(desc, 0 if desc.name == "ids" else cut.bytes(model, desc))
        for op in block.ops:
            for desc in op.outputs:
                if desc.name == op.residual:
                    self.owner[desc.name] = self.owner[op.inputs[0]]
                else:
                    self._own(desc, cut.bytes(model, desc))
            for desc in op.keeps:
                self._own(TensorDesc(f"{op.name}.{desc.name}", desc.dims), cut.bytes(model, desc))

    def _own(self, desc: TensorDesc, size: int) -> None:
        self.owner[desc.name], self.sizes[desc.name] = desc.name, size

    def total(self, storages: set[str]) -> int:
        return sum(self.sizes[s] for s in storages)

    def scratch(self, moments: tuple[Scratch, ...], outputs: int) -> int:
        """The largest moment beside what lives already; `outputs` bytes are the op's results."""
        sizes = [sum(self.cut.bytes(self.model, t) for t in m.tensors) + m.outputs * outputs for m in moments]
        return max([outputs, *sizes])

    def saved_by(self, op: Op) -> set[str]:
        return {self.owner[name] for name in op.saves} | {f"{op.name}.{k.name}" for k in op.keeps}

    def made_by(self, op: Op) -> set[str]:
        return {d.name for d in op.outputs if d.name != op.residual}


def _forward(block: Block, tensors: _Tensors, keep: bool, dead_tail: bool) -> tuple[int, set[str]]:
    """(peak, storages alive at the end). `dead_tail`: the last product is not computed, only its node is made."""
    alive = {tensors.owner[d.name] for d in block.inputs}
    pinned = set(alive)
    last_use = {tensors.owner[n]: i for i, op in enumerate(block.ops) for n in op.inputs}
    last_use[tensors.owner[block.output.name]] = len(block.ops)
    peak = tensors.total(alive)
    for i, op in enumerate(block.ops):
        made = tensors.made_by(op) | {f"{op.name}.{k.name}" for k in op.keeps}
        if dead_tail and i == len(block.ops) - 1:
            made = set[str]()
        else:
            peak = max(peak, tensors.total(alive) + tensors.scratch(op.scratch_f, tensors.total(made)))
        if keep:
            pinned |= tensors.saved_by(op)
        alive |= made
        alive = {s for s in alive if s in pinned or last_use.get(s, -1) > i}
    return peak, alive


def _gradient_of(name: str) -> str:
    return f"d {name}"


@dataclass(slots=True)
class _Backward:
    """Peaks of a walk over the ops in reverse, and what it leaves for W: per product, the storages it holds."""

    peak: int
    queue: list[tuple[Op, set[str]]]


def _backward(block: Block, tensors: _Tensors, split: bool) -> _Backward:
    """The walk of B (`split`) or of BW. Gradients are storages too, added to `tensors`."""
    grads = {block.output.name: _gradient_of(block.output.name)}
    tensors.sizes[grads[block.output.name]] = 0 if block.kind == HEAD else tensors.sizes[block.output.name]
    held_saves = [tensors.saved_by(op) for op in block.ops]
    inputs = {tensors.owner[d.name] for d in block.inputs}
    outer = grads[block.output.name]
    live_grads = {outer}
    walk = _Backward(0, [])
    queued: set[str] = set()
    for i in reversed(range(len(block.ops))):
        op = block.ops[i]
        saved = set[str]().union(*held_saves[: i + 1]) | inputs
        base = tensors.total(saved | live_grads | queued)
        incoming = {grads[d.name] for d in op.outputs if d.name in grads}
        made = _make_gradients(op, tensors, grads)
        moments = op.scratch_b if split and op.kind in ("linear", "embed") else op.scratch_b + op.scratch_w
        walk.peak = max(walk.peak, base + tensors.scratch(moments, tensors.total(made)))
        if split and op.parameters:
            held = _queue_entry(op, tensors, grads)
            walk.queue.append((op, held))
            queued |= held
        live_grads |= {grads[n] for n in op.inputs if n in grads}
        needed = {grads[d.name] for o in block.ops[:i] for d in o.outputs if d.name in grads}
        live_grads = {g for g in live_grads if g == outer or g in needed or g not in incoming}
    return walk


def _make_gradients(op: Op, tensors: _Tensors, grads: dict[str, str]) -> set[str]:
    """Gradients of the op's inputs: new storages, but for a residual (the incoming one) and logits (in place)."""
    made: set[str] = set()
    for name in op.inputs:
        if name == op.residual and op.kind == "linear":
            grads[name] = grads[op.outputs[0].name]
        elif op.kind == "cross_entropy":
            grads[name] = name
        elif op.kind != "embed":
            grads[name] = _gradient_of(name)
            tensors.sizes[grads[name]] = tensors.sizes[tensors.owner[name]]
            made.add(grads[name])
    return made


def _queue_entry(op: Op, tensors: _Tensors, grads: dict[str, str]) -> set[str]:
    """What a queued weight gradient holds: a product its input and its outputs' gradients, a norm the result."""
    if op.kind == "norm":
        name = f"{op.name}.dw"
        tensors.sizes[name] = tensors.cut.bytes(tensors.model, TensorDesc("dw", "h", "accumulate"))
        return {name}
    return tensors.saved_by(op) | {grads[d.name] for d in op.outputs}


def _weight_peak(tensors: _Tensors, queue: list[tuple[Op, set[str]]]) -> int:
    """Draining the queue in the order in which B filled it."""
    peak = 0
    for i, (op, _) in enumerate(queue):
        live = set[str]().union(*(held for _, held in queue[i:]))
        moments = op.scratch_w if op.kind in ("linear", "embed") else ()
        peak = max(peak, tensors.total(live) + tensors.scratch(moments, 0))
    return peak


@lru_cache(maxsize=65536)
def unit_memory(model: Model, kind: str, cut: Cut, recompute: bool) -> UnitMemory:
    """Memory of a unit of this kind. `recompute`: keep the input alone and run the forward again before B."""
    block = block_named(model, kind)
    recompute = recompute and block.recomputable
    tensors = _Tensors(model, block, cut)
    source = tensors.total({tensors.owner[d.name] for d in block.inputs})
    f_peak, kept = _forward(block, tensors, keep=not recompute, dead_tail=False)
    output = tensors.sizes[block.output.name]
    full = _Tensors(model, block, cut)
    again, _ = _forward(block, full, keep=True, dead_tail=True) if recompute else (0, set[str]())
    whole, split = _backward(block, tensors, split=False), _backward(block, full, split=True)
    gradient = 0 if kind == HEAD else output
    return UnitMemory(
        input=source,
        saved=source if recompute else tensors.total(kept - {block.output.name}),
        incoming=gradient,
        f_peak=f_peak,
        bw_peak=max(whole.peak, again + gradient if recompute else 0),
        b_peak=max(split.peak, again + gradient if recompute else 0),
        queued=full.total(set[str]().union(*(held for _, held in split.queue))),
        w_peak=_weight_peak(full, split.queue),
    )
