"""Memory of one unit on one rank, from the declared ops: who lives when, in forward and in backward.

A unit runs on a detached input. Its forward keeps what its ops save; its backward walks the ops in reverse, frees what
an op saved when the op is done, and makes the gradients of its inputs. With split gradients, every product keeps its
input and its output's gradient until W. What is recomputed is not kept: it lives from its first reader in the backward
to its last (there is no dropout: nothing random is kept for it). All sizes are bytes, or columns of them; peaks count
everything the unit owns at that moment, its input and the incoming gradient among it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardwise.model.spec import HEAD, Block, Count, Cut, Model, Op, Scratch, TensorDesc


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """`saved` lives from F to B, `queued` from B to W; the peaks are those inside the unit's own actions."""

    input: Count
    saved: Count
    incoming: Count
    f_peak: Count
    bw_peak: Count
    b_peak: Count
    queued: Count
    w_peak: Count


def most(values: Iterable[Count]) -> Count:
    """The largest, place by place where some are columns."""
    largest: Count = 0
    for value in values:
        columns = np.ndim(value) or np.ndim(largest)
        largest = np.maximum(largest, value) if columns else max(largest, value)
    return largest


class _Tensors:
    """Live tensors of a unit, by the storage they sit in (a residual is its source under another name)."""

    def __init__(self, model: Model, block: Block, cut: Cut) -> None:
        self.model, self.cut = model, cut
        self.owner: dict[str, str] = {}
        self.sizes: dict[str, Count] = {}
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

    def _own(self, desc: TensorDesc, size: Count) -> None:
        self.owner[desc.name], self.sizes[desc.name] = desc.name, size

    def total(self, storages: set[str]) -> Count:
        return sum(self.sizes[s] for s in storages)

    def scratch(self, moments: tuple[Scratch, ...], outputs: Count) -> Count:
        """The largest moment beside what lives already; `outputs` bytes are the op's results."""
        sizes = [sum(self.cut.bytes(self.model, t) for t in m.tensors) + m.outputs * outputs for m in moments]
        return most([outputs, *sizes])

    def running(self, op: Op, backward: bool, moments: tuple[Scratch, ...], outputs: Count) -> Count:
        """What an op adds while it runs."""
        return self.scratch(moments, outputs) + self.travelling(op, backward)

    def travelling(self, op: Op, backward: bool) -> Count:
        """What context parallelism adds to an attention: K and V of the next rank of the ring (and their gradients on
        the way, in the accumulation dtype), all heads' tokens, or all ranks' K and V."""
        if op.kind != "attention":
            return 0
        cut = self.cut
        query, keys = self.sizes[op.inputs[0]], sum(self.sizes[n] for n in op.inputs[1:3])
        widened = keys * cut.accumulate_bytes // max(1, cut.compute_bytes)
        ring = keys + backward * (keys + 2 * widened)
        exchanged = query + keys + backward * query
        gathered = (1 + backward) * keys * cut.cp
        kind = cut.cp_kind
        return (cut.cp > 1) * ((kind == 0) * ring + (kind == 1) * exchanged + (kind == 2) * gathered)

    def saved_by(self, op: Op) -> set[str]:
        return {self.owner[name] for name in op.saves} | self.kept_by(op)

    def made_by(self, op: Op) -> set[str]:
        return {d.name for d in op.outputs if d.name != op.residual}

    def kept_by(self, op: Op) -> set[str]:
        return {f"{op.name}.{k.name}" for k in op.keeps}


@dataclass(frozen=True, slots=True)
class _Remade:
    """An op that is computed again: the place of that backward that reads it first, and the storages that it needs.

    `made`: storages that it makes, each with the place of the backward that reads it last.
    """

    op: Op
    first: int
    made: dict[str, int]
    needs: set[str]


def _remade(block: Block, tensors: _Tensors, again: tuple[Op, ...]) -> dict[int, _Remade]:
    """By the place of the op. One whose output nobody reads makes what it keeps alone, of what it saved.

    Attention's output stays: it is the next product's input, and only the core runs again (Korthikanti et al.
    2205.05198, section 5).
    """
    found: dict[int, _Remade] = {}
    for own, op in reversed(list(enumerate(block.ops))):
        if op in again:
            outputs = set[str]() if op.kind == "attention" else tensors.made_by(op)
            readers = [i for i, o in enumerate(block.ops) if tensors.saved_by(o) & outputs]
            readers += [later.first for later in found.values() if later.needs & outputs]
            made = dict.fromkeys(tensors.kept_by(op), own)
            if readers:
                made |= dict.fromkeys(outputs, min(readers))
            needs = {tensors.owner[n] for n in (op.inputs if readers else op.saves)}
            found[own] = _Remade(op, max([own, *readers]), made, needs)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class _Walk:
    """A forward's peak, and the storages alive at its end."""

    peak: Count
    alive: set[str]


def _forward(block: Block, tensors: _Tensors, keep: bool, dead_tail: bool, again: dict[int, _Remade]) -> _Walk:
    """`dead_tail`: the last product is not computed, only its node is made; `again`: ops whose results are dropped."""
    alive = {tensors.owner[d.name] for d in block.inputs}
    pinned = set(alive)
    dropped = set[str]().union(*(r.made for r in again.values()))
    last_use = {tensors.owner[n]: i for i, op in enumerate(block.ops) for n in op.inputs}
    last_use[tensors.owner[block.output.name]] = len(block.ops)
    peak = tensors.total(alive)
    for i, op in enumerate(block.ops):
        made = tensors.made_by(op) | tensors.kept_by(op)
        if dead_tail and i == len(block.ops) - 1:
            made = set[str]()
        else:
            peak = most([peak, tensors.total(alive) + tensors.running(op, False, op.scratch_f, tensors.total(made))])
        if keep:
            pinned |= tensors.saved_by(op) | (again[i].needs if i in again else set[str]())
        alive |= made
        alive = {s for s in alive if (s in pinned and s not in dropped) or last_use.get(s, -1) > i}
    return _Walk(peak, alive)


def _gradient_of(name: str) -> str:
    return f"d {name}"


@dataclass(slots=True)
class _Backward:
    """Peaks of a walk over the ops in reverse, and what it leaves for W: per product, the storages it holds."""

    peak: Count
    queue: list[tuple[Op, set[str]]]


def _held(block: Block, tensors: _Tensors, again: dict[int, _Remade]) -> list[set[str]]:
    """Saved storages that live while the backward of the i-th op runs."""
    saves = [tensors.saved_by(op) | (again[i].needs if i in again else set[str]()) for i, op in enumerate(block.ops)]
    found = [set[str]().union(*saves[: i + 1]) for i in range(len(block.ops))]
    for r in again.values():
        for i, here in enumerate(found):
            here.difference_update(r.made)
            here.update(name for name, last in r.made.items() if last <= i <= r.first)
    return found


def _second_runs(tensors: _Tensors, again: list[_Remade], live: set[str]) -> Count:
    """The largest moment of making these again, one after the other, where what they make is in `live` already.

    Queries and keys are rotated too: that takes less than the backward of attention, which follows.
    """
    live = live.difference(*(r.made for r in again))
    peak: Count = 0
    for r in again:
        made = tensors.made_by(r.op) | tensors.kept_by(r.op)
        running = tensors.running(r.op, False, r.op.scratch_f, tensors.total(made))
        peak = most([peak, tensors.total(live) + running])
        live = live.union(r.made)
    return peak


def _backward(block: Block, tensors: _Tensors, split: bool, again: dict[int, _Remade]) -> _Backward:
    """The walk of B (`split`) or of BW. Gradients are storages too, added to `tensors`."""
    grads = {block.output.name: _gradient_of(block.output.name)}
    tensors.sizes[grads[block.output.name]] = 0 if block.kind == HEAD else tensors.sizes[block.output.name]
    held_saves = _held(block, tensors, again)
    inputs = {tensors.owner[d.name] for d in block.inputs}
    outer = grads[block.output.name]
    live_grads = {outer}
    walk = _Backward(0, [])
    queued: set[str] = set()
    for i in reversed(range(len(block.ops))):
        op = block.ops[i]
        live = held_saves[i] | inputs | live_grads | queued
        walk.peak = most([walk.peak, _second_runs(tensors, [r for r in again.values() if r.first == i], live)])
        incoming = {grads[d.name] for d in op.outputs if d.name in grads}
        made = _make_gradients(op, tensors, grads)
        moments = op.scratch_b if split and op.kind in PRODUCTS else op.scratch_b + op.scratch_w
        walk.peak = most([walk.peak, tensors.total(live) + tensors.running(op, True, moments, tensors.total(made))])
        if split and op.parameters:
            held = _queue_entry(op, tensors, grads)
            walk.queue.append((op, held))
            queued |= held
        live_grads |= {grads[n] for n in op.inputs if n in grads}
        needed = {grads[d.name] for o in block.ops[:i] for d in o.outputs if d.name in grads}
        live_grads = {g for g in live_grads if g == outer or g in needed or g not in incoming}
    return walk


PRODUCTS = ("linear", "embed", "router", "experts")
"""Kinds of ops whose weight gradient can wait for an action of its own."""


def _make_gradients(op: Op, tensors: _Tensors, grads: dict[str, str]) -> set[str]:
    """Gradients of the op's inputs: new storages, but for a residual (the incoming one) and logits (in place)."""
    made: set[str] = set()
    for name in op.inputs:
        if name == op.residual:
            grads[name] = grads[op.outputs[0].name]
        elif op.kind == "cross_entropy":
            grads[name] = name
        elif op.kind != "embed":
            grads[name] = _gradient_of(name)
            tensors.sizes[grads[name]] = tensors.sizes[tensors.owner[name]]
            made.add(grads[name])
    return made


def _queue_entry(op: Op, tensors: _Tensors, grads: dict[str, str]) -> set[str]:
    """What a queued weight gradient holds: a product its input and its outputs' gradients, a norm the results."""
    if op.kind not in PRODUCTS:
        name = f"{op.name}.dw"
        made = (TensorDesc("dw", p.dims, "accumulate") for p in op.parameters)
        tensors.sizes[name] = sum(tensors.cut.bytes(tensors.model, d) for d in made)
        return {name}
    return tensors.saved_by(op) | {grads[d.name] for d in op.outputs if d.name in grads}


def _weight_peak(tensors: _Tensors, queue: list[tuple[Op, set[str]]]) -> Count:
    """Draining the queue in the order in which B filled it."""
    peak: Count = 0
    for i, (op, _) in enumerate(queue):
        live = set[str]().union(*(held for _, held in queue[i:]))
        moments = op.scratch_w if op.kind in PRODUCTS else ()
        peak = most([peak, tensors.total(live) + tensors.scratch(moments, 0)])
    return peak


def unit_memory(model: Model, kind: str, cut: Cut, recompute: str) -> UnitMemory:
    """Memory of a unit of this kind. `recompute`: none; full, to keep the input alone and run the forward again
    before B; or the ops that are computed again by themselves. `cut` may hold columns."""
    block = model.block(kind)
    full = recompute == "full" and block.recomputable
    tensors = _Tensors(model, block, cut)
    again = _remade(block, tensors, () if full else block.again(recompute))
    source = tensors.total({tensors.owner[d.name] for d in block.inputs})
    forward = _forward(block, tensors, not full, False, again)
    output = tensors.sizes[block.output.name]
    remade = _Tensors(model, block, cut)
    second = _forward(block, remade, True, not block.reruns_tail, {}).peak if full else 0
    whole, split = _backward(block, tensors, False, again), _backward(block, remade, True, again)
    gradient = 0 if kind == HEAD else output
    before = second + gradient if full else 0
    return UnitMemory(
        input=source,
        saved=source if full else tensors.total(forward.alive - {block.output.name}),
        incoming=gradient,
        f_peak=forward.peak,
        bw_peak=most([whole.peak, before]),
        b_peak=most([split.peak, before]),
        queued=remade.total(set[str]().union(*(held for _, held in split.queue))),
        w_peak=_weight_peak(remade, split.queue),
    )
