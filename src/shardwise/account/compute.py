"""FLOPs and bytes moved, read off the declared ops: what a unit computes, and what it only carries.

A multiply and an add are two FLOPs. Two counts are kept apart. *Model* FLOPs are three times the forward ones, causal
attention exact, nothing for recomputation: what MFU is made of. *Hardware* FLOPs are what a rank executes: the backward
of fused attention runs five products where the forward runs two, because it makes the scores again (Dao 2307.08691,
section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from shardwise.model.spec import KINDS, Block, Cut, Model, Op, TensorDesc
from shardwise.plan.shards import block_named

ATTENTION_BACKWARD = 2.5
"""FLOPs of the backward of fused attention, in forwards: five products against two."""


class Product(NamedTuple):
    """y [tokens, rows] = x [tokens, columns] w^T, on one rank. dgrad and wgrad turn the same three sizes around."""

    tokens: int
    rows: int
    columns: int

    @property
    def flops(self) -> float:
        """Of the forward; dgrad and wgrad cost the same."""
        return 2.0 * self.tokens * self.rows * self.columns


class Moved(NamedTuple):
    """Bytes that memory-bound kernels read and write, and how many such kernels there are."""

    bytes: float = 0.0
    kernels: int = 0


class OpWork(NamedTuple):
    """What one op of a unit does for one micro-batch on one rank.

    `products` run in F, as dgrad in B and as wgrad in W; `core_flops` are those of the attention's forward; `moved` is
    what memory-bound kernels carry in F, B and W, beside what the products read and write themselves.
    """

    name: str
    products: tuple[Product, ...]
    core_flops: float
    moved: tuple[Moved, Moved, Moved]


class OpFlops(NamedTuple):
    """Hardware FLOPs of one op for one micro-batch on one rank."""

    name: str
    f: float
    b: float
    w: float


def mean_context(seq_len: int) -> float:
    """Keys that a query of a causal sequence sees on average: token i sees i + 1 of them."""
    return (seq_len + 1) / 2


@lru_cache(maxsize=4096)
def unit_work(model: Model, kind: str, cut: Cut, seq_len: int) -> tuple[OpWork, ...]:
    """The ops of a unit of this kind, in their order."""
    block = block_named(model, kind)
    return tuple(_work(model, block, op, cut, seq_len) for op in block.ops)


def unit_flops(model: Model, kind: str, cut: Cut, seq_len: int) -> tuple[OpFlops, ...]:
    """Hardware FLOPs of the ops of a unit of this kind, in their order, without recomputation."""
    found: list[OpFlops] = []
    for work in unit_work(model, kind, cut, seq_len):
        products = sum(p.flops for p in work.products)
        b = products + ATTENTION_BACKWARD * work.core_flops
        found.append(OpFlops(work.name, products + work.core_flops, b, products))
    return tuple(found)


def flops_per_token(model: Model, seq_len: int) -> float:
    """Model FLOPs of training on one token: forward and twice that for backward, head once, lookup free."""
    cut = Cut(tokens=seq_len, tp=1, sp=False, compute_bytes=2, accumulate_bytes=4)
    repeats = {"layer": model.layers}
    forward = sum(op.f * repeats.get(kind, 1) for kind in KINDS for op in unit_flops(model, kind, cut, seq_len))
    return 3 * forward / seq_len


def _work(model: Model, block: Block, op: Op, cut: Cut, seq_len: int) -> OpWork:
    products: tuple[Product, ...] = ()
    if op.kind == "linear":
        sizes = [[cut.elements(model, d) for d in p.dims] for p in op.parameters]
        products = tuple(Product(cut.tokens, rows, columns) for rows, columns in sizes)
    core = 0.0
    if op.kind == "attention":
        # Scores and their product with the values: 2 * 2 FLOPs for each query element and key.
        core = 4.0 * cut.elements(model, op.outputs[0].dims) * mean_context(seq_len)
    return OpWork(op.name, products, core, _moved(model, block, op, cut))


def _moved(model: Model, block: Block, op: Op, cut: Cut) -> tuple[Moved, Moved, Moved]:
    """Bytes of the memory-bound kernels in F, B and W.

    Elementwise chains count as the one kernel that they can be fused into; the loss, which no kernel fuses, by passes.
    """
    tensors = {d.name: d for d in (*block.inputs, *(d for o in block.ops for d in o.outputs))}

    def size(names: list[str]) -> float:
        return float(sum(cut.bytes(model, tensors[n]) for n in names))

    nothing = Moved()
    match op.kind:
        case "norm" | "swiglu":
            made = [d.name for d in op.outputs if d.name != op.residual]
            gradients = [d.name for d in op.outputs]
            forward = Moved(size([*op.inputs, *made]), 1)
            return forward, Moved(size([*op.saves, *gradients, *op.inputs]), 1), nothing
        case "attention":
            # The rotation reads and writes q and k, and their gradients on the way back.
            rotated = Moved(2 * size(["q", "k"]), 1)
            return rotated, rotated, nothing
        case "linear":
            return _around_products(model, op, cut, size)
        case "embed":
            return _lookup(model, cut)
        case "cross_entropy":
            return _cross_entropy(model, cut, tensors[op.inputs[0]])
        case _:
            raise ValueError(f"no bytes are known of an op of kind {op.kind!r}")


def _around_products(model: Model, op: Op, cut: Cut, size: Callable[[list[str]], float]) -> tuple[Moved, Moved, Moved]:
    """The residual's addition in F; in W, each product is added to the gradient buffer (read dw, read and write it)."""
    forward = Moved(3 * size([op.outputs[0].name]), 1) if op.residual else Moved()
    elements = sum(cut.elements(model, p.dims) for p in op.parameters)
    added = Moved(float(elements) * (cut.compute_bytes + 2 * cut.accumulate_bytes), len(op.parameters))
    return forward, Moved(), added


def _lookup(model: Model, cut: Cut) -> tuple[Moved, Moved, Moved]:
    """F reads a row a token and writes it; W widens the gradient and adds it to the rows of the buffer."""
    rows = float(cut.elements(model, "Th"))
    widened = cut.compute_bytes + cut.accumulate_bytes
    return Moved(2 * rows * cut.compute_bytes, 1), Moved(), Moved(rows * (widened + 3 * cut.accumulate_bytes), 2)


def _cross_entropy(model: Model, cut: Cut, logits: TensorDesc) -> tuple[Moved, Moved, Moved]:
    """Pass by pass, as the operation runs. B scales in place the gradient that F left in the logits.

    F: the maximum; widen and subtract; exp in place; the sum; scale in place; narrow into the logits.
    """
    narrow = float(cut.bytes(model, logits))
    wide = float(cut.elements(model, logits.dims) * cut.accumulate_bytes)
    forward = narrow + (narrow + wide) + 2 * wide + wide + 2 * wide + (wide + narrow)
    return Moved(forward, 6), Moved(2 * narrow, 1), Moved()
