"""FLOPs and bytes moved, read off the declared ops: what a unit computes, and what it only carries.

A multiply and an add are two FLOPs. Two counts are kept apart. *Model* FLOPs are three times the forward ones, causal
attention exact, nothing for recomputation: what MFU is made of. *Hardware* FLOPs are what a rank executes: the backward
of fused attention runs five products where the forward runs two, because it makes the scores again (Dao 2307.08691,
section 3.1). A `Cut` may hold columns; so may every number here.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, Final, NamedTuple

from shardwise.model.spec import Block, Count, Cut, Model, Op, TensorDesc

ATTENTION_BACKWARD = 2.5
"""FLOPs of the backward of fused attention, in forwards: five products against two."""

EAGER_BACKWARD: Final = 2.0
"""The same where the scores were kept: four products against two."""

CORE_BACKWARD: Final = {"attention": ATTENTION_BACKWARD, "scan": 2.0, "conv": 2.0}
"""FLOPs of the backward of what is no matrix product, in forwards. All of it runs in B: W has no core."""


class Product(NamedTuple):
    """y [tokens, rows] = x [tokens, columns] w^T, on one rank. dgrad and wgrad turn the same three sizes around.

    A grouped product shares its tokens out among `groups` weights of rows x columns each.
    """

    tokens: Count
    rows: Count
    columns: Count
    groups: Count = 1

    @property
    def flops(self) -> Count:
        """Of the forward; dgrad and wgrad cost the same."""
        return 2.0 * self.tokens * self.rows * self.columns


class Moved(NamedTuple):
    """Bytes that memory-bound kernels read and write, and how many such kernels there are."""

    bytes: Count = 0.0
    kernels: int = 0


class OpWork(NamedTuple):
    """What one op of a unit does for one micro-batch on one rank.

    `products` run in F, as dgrad in B and as wgrad in W; `core_flops` are those of the forward of attention, scan or
    convolution and `core_b_flops` of its backward; `moved` is what memory-bound kernels carry in F, B and W, beside
    what the products read and write themselves.
    """

    name: str
    products: tuple[Product, ...]
    core_flops: Count
    moved: tuple[Moved, Moved, Moved]
    core_b_flops: Count = 0.0
    kind: str = ""


class OpFlops(NamedTuple):
    """Hardware FLOPs of one op for one micro-batch on one rank."""

    name: str
    f: Count
    b: Count
    w: Count


def mean_context(seq_len: int, window: int | None = None) -> float:
    """Keys that a query of a causal sequence sees on average: token i sees min(i + 1, window) of them."""
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return window - window * (window - 1) / (2 * seq_len)


def unit_work(model: Model, kind: str, cut: Cut, seq_len: int) -> tuple[OpWork, ...]:
    """The ops of a unit of this kind, in their order."""
    block = model.block(kind)
    values = values_of(block)
    return tuple(_work(model, values, op, cut, seq_len) for op in block.ops)


def values_of(block: Block) -> dict[str, TensorDesc]:
    """The block's values by name: its inputs and every op's outputs."""
    return {d.name: d for d in (*block.inputs, *(d for op in block.ops for d in op.outputs))}


def unit_flops(model: Model, kind: str, cut: Cut, seq_len: int) -> tuple[OpFlops, ...]:
    """Hardware FLOPs of the ops of a unit of this kind, in their order, without recomputation."""
    found: list[OpFlops] = []
    for work in unit_work(model, kind, cut, seq_len):
        products = sum(p.flops for p in work.products)
        found.append(OpFlops(work.name, products + work.core_flops, products + work.core_b_flops, products))
    return tuple(found)


def _work(model: Model, values: dict[str, TensorDesc], op: Op, cut: Cut, seq_len: int) -> OpWork:
    core: Count = 0.0
    match op.kind:
        case "attention":
            # Two FLOPs a key for every element of a query, and for every element of what is made of the values.
            width = cut.elements(model, values[op.inputs[0]].dims) + cut.elements(model, op.outputs[0].dims)
            core = 2.0 * width * mean_context(seq_len, op.window)
        case "scan":
            core = _scan_flops(model, cut)
        case "conv":
            core = 2.0 * cut.elements(model, op.outputs[0].dims) * model.sizes["W"]
        case _:
            pass
    again = EAGER_BACKWARD if _scores(op) else CORE_BACKWARD.get(op.kind, 0.0)
    backward = again * core
    products = _products(model, values, op, cut)
    return OpWork(op.name, products, core, _moved(model, values, op, cut), backward, op.kind)


def _products(model: Model, values: dict[str, TensorDesc], op: Op, cut: Cut) -> tuple[Product, ...]:
    """One a matrix of the op; its tokens are those of the op's input, gathered where the op gathers."""
    if op.kind not in ("linear", "router", "experts"):
        return ()
    stream = values[op.inputs[0]].dims[0]
    tokens = cut.rows(model, "T" if op.gathers and stream == "t" else stream)
    found: list[Product] = []
    for parameter in op.parameters:
        if parameter.name.endswith(".bias"):
            continue
        rows, columns = (cut.local(model, "x" if d == "X" else d) for d in parameter.dims)
        groups = cut.local(model, "X") // cut.local(model, "x") if op.kind == "experts" else 1
        found.append(Product(tokens, rows, columns, groups))
    return tuple(found)


def _scores(op: Op) -> TensorDesc | None:
    """The softmax that an attention keeps where it is not fused."""
    return next((keep for keep in op.keeps if op.kind == "attention" and keep.name == "softmax"), None)


def _scan_flops(model: Model, cut: Cut) -> Count:
    """The chunked scan of Mamba-2 (Dao and Gu 2405.21060, section 6), a token: C B^T and its product with the inputs
    inside a chunk of Q tokens, 2 Q g N + 2 Q i; the states in and out, 4 N i."""
    inner, chunk = cut.local(model, "i"), model.sizes["C"]
    groups_and_state = (cut.local(model, "m") - inner) / 2
    within = 2 * chunk * (groups_and_state + inner)
    return 1.0 * cut.rows(model, "T") * (within + 4 * model.sizes["N"] * inner)


# ---------------------------------------------------------------------------------------------------- bytes moved


class _Sizes(NamedTuple):
    """Bytes of a unit's values on one rank."""

    model: Model
    values: dict[str, TensorDesc]
    cut: Cut

    def __call__(self, *names: str) -> Count:
        return 1.0 * sum(self.cut.bytes(self.model, self.values[n]) for n in names)

    def of(self, dims: str, wide: bool = False) -> Count:
        """Bytes of a tensor that no value names."""
        width = self.cut.accumulate_bytes if wide else self.cut.compute_bytes
        return 1.0 * self.cut.elements(self.model, dims) * width


def _moved(model: Model, values: dict[str, TensorDesc], op: Op, cut: Cut) -> tuple[Moved, Moved, Moved]:
    """Bytes of the memory-bound kernels in F, B and W.

    Elementwise chains count as the one kernel that they can be fused into; the loss, which no kernel fuses, by passes.
    """
    size = _Sizes(model, values, cut)
    match op.kind:
        case "norm" | "swiglu" | "activation" | "conv":
            return _elementwise(op, size)
        case "attention":
            # The rotation reads and writes q and k, and their gradients on the way back.
            rotated = Moved(2 * size(*op.inputs[:2]), 1) if model.rope_theta else Moved()
            if not (kept := _scores(op)):
                return rotated, rotated, Moved()
            # Eager: scores written, scaled and masked, exponentiated, dropped out; and as much on the way back.
            passes = 4 * size.cut.bytes(model, kept)
            eager = Moved(rotated.bytes + passes, 4)
            return eager, eager, Moved()
        case "linear" | "experts":
            return _around_products(model, op, cut, size)
        case "embed":
            return _lookup(size) if op.reduces else _positions(size)
        case "cross_entropy":
            return _cross_entropy(model, cut, values[op.inputs[0]])
        case "router":
            # Scores to probabilities, the choice among them, the weights; the same three passes back.
            passes = Moved(3 * size.of("tE", wide=True), 3)
            return passes, passes, _added(model, op, cut)
        case "dispatch" | "combine":
            return _routed(op, size)
        case "scan":
            states = 2 * size.of("TG", wide=True)
            made = size(*op.inputs, op.outputs[0].name)
            return Moved(made + states, 3), Moved(2 * made + 2 * states, 5), Moved()
        case "nothing":
            return Moved(), Moved(), Moved()
        case _:
            raise ValueError(f"no bytes are known of an op of kind {op.kind!r}")


def _elementwise(op: Op, size: _Sizes) -> tuple[Moved, Moved, Moved]:
    """F reads the inputs and writes what is new; B reads what was saved and the gradients, and writes others."""
    made = [d.name for d in op.outputs if d.name != op.residual]
    passed = [name for name in op.inputs if name != op.residual]
    kept = sum(size.cut.bytes(size.model, keep) for keep in op.keeps if keep.dims[-1] != "1")
    backward = size(*op.saves, *(d.name for d in op.outputs), *passed) + kept
    return Moved(size(*op.inputs, *made), 1), Moved(backward, 1), Moved()


def _around_products(model: Model, op: Op, cut: Cut, size: _Sizes) -> tuple[Moved, Moved, Moved]:
    """The residual's addition in F; in W, each product is added to the gradient buffer."""
    forward = Moved(3 * size(op.outputs[0].name), 1) if op.residual else Moved()
    return forward, Moved(), _added(model, op, cut)


def _added(model: Model, op: Op, cut: Cut) -> Moved:
    """A weight gradient added to the buffer: read dw, read and write the buffer."""
    elements = sum(cut.elements(model, p.dims) for p in op.parameters)
    return Moved(1.0 * elements * (cut.compute_bytes + 2 * cut.accumulate_bytes), len(op.parameters))


def _lookup(size: _Sizes) -> tuple[Moved, Moved, Moved]:
    """F reads a row a token and writes it; W widens the gradient and adds it to the rows of the buffer."""
    narrow, wide = size.of("Th"), size.of("Th", wide=True)
    return Moved(2 * narrow, 1), Moved(), Moved(narrow + wide + 3 * wide, 2)


def _positions(size: _Sizes) -> tuple[Moved, Moved, Moved]:
    """F adds a row a token to the stream; W sums the gradient into the rows of the buffer."""
    return Moved(3 * size.of("th"), 1), Moved(), Moved(size.of("th") + 2 * size.of("Ph", wide=True), 1)


def _routed(op: Op, size: _Sizes) -> tuple[Moved, Moved, Moved]:
    """Copies put in the order of their ranks and, as they arrive, of their experts; or the other way, and summed."""
    ends = (size.values[op.inputs[0]], op.outputs[0])
    stream, copies = ends if op.kind == "dispatch" else reversed(ends)
    width = copies.dims[1]
    bytes_ = size(stream.name) + size.of(f"c{width}") + 2 * size(copies.name)
    moved = Moved(bytes_, 2)
    return Moved(bytes_ + 2 * size(op.residual), 2) if op.residual else moved, moved, Moved()


def _cross_entropy(model: Model, cut: Cut, logits: TensorDesc) -> tuple[Moved, Moved, Moved]:
    """Pass by pass, as the operation runs. B scales in place the gradient that F left in the logits.

    F: the maximum; widen and subtract; exp in place; the sum; scale in place; narrow into the logits.
    """
    narrow = 1.0 * cut.bytes(model, logits)
    wide = 1.0 * cut.elements(model, logits.dims) * cut.accumulate_bytes
    forward = narrow + (narrow + wide) + 2 * wide + wide + 2 * wide + (wide + narrow)
    return Moved(forward, 6), Moved(2 * narrow, 1), Moved()


# ------------------------------------------------------------------------------------- model FLOPs, by convention

CONVENTIONS: Final = {
    "exact": "3 x forward: causal attention to the key, windows, the router, multi-token prediction",
    "megatron": "as Megatron-LM counts: s/2 keys a query, no router, vocabulary padded to 128",
    "narayanan": "attention not halved (Narayanan 2104.04473, Korthikanti 2205.05198)",
    "palm": "6 (N - input embedding, unless tied) + 12 L a d s (PaLM, torchtitan)",
    "6n": "6 N, N the parameters that a token meets",
}
"""Conventions of model FLOPs a token: MFU means nothing without one."""


@lru_cache(maxsize=4096)
def flops_per_token(model: Model, seq_len: int, convention: str = "exact") -> float:
    """Model FLOPs of training on one token by one of CONVENTIONS: forward and twice that for backward, lookup free."""
    if convention == "6n":
        return 6.0 * model.active_parameters
    if convention == "palm":
        return 6.0 * _past_the_lookup(model) + 6.0 * seq_len * _attention_width(model)
    if convention not in CONVENTIONS:
        raise ValueError(f"convention {convention!r}: wanted one of {', '.join(CONVENTIONS)}")
    cut = Cut(tokens=seq_len, tp=1, sp=False, compute_bytes=2, accumulate_bytes=4)
    repeats = units_of(model)
    return 3 / seq_len * sum(repeats[k] * _forward_flops(model, k, cut, convention) for k in model.kinds)


def units_of(model: Model) -> Counter[str]:
    """How many units of each kind run."""
    return Counter(unit.block.kind for unit in model.units())


def _forward_flops(model: Model, kind: str, cut: Cut, convention: str) -> float:
    total = 0.0
    for work, op in zip(unit_work(model, kind, cut, cut.tokens), model.block(kind).ops, strict=True):
        products = sum(p.flops for p in work.products)
        core = work.core_flops
        if convention != "exact":
            products *= _padded_vocabulary(model, op) * (op.kind != "router")
            if op.kind == "attention":
                core *= _counted_keys(cut.tokens, op.window, convention) / mean_context(cut.tokens, op.window)
        total += products + core
    return total


def _counted_keys(seq_len: int, window: int | None, convention: str) -> float:
    keys = seq_len if window is None else min(window, seq_len)
    return float(keys) if convention == "narayanan" else keys - keys * keys / (2 * seq_len)


def _padded_vocabulary(model: Model, op: Op) -> float:
    rows = model.sizes["v"]
    return -(-rows // 128) * 128 / rows if any(p.dims == "vh" for p in op.parameters) else 1.0


def _past_the_lookup(model: Model) -> int:
    looked_up = 0 if model.tied else sum(model.size(p) for p in model.blocks[0].parameters if p.dims[0] in "vP")
    return model.active_parameters - looked_up


def _attention_width(model: Model) -> int:
    """Elements of a token's queries and attention outputs, over all layers: 2 L a d without MLA."""
    width = 0
    for kind in model.chain * model.loops:
        block = model.block(kind)
        values = values_of(block)
        width += sum(
            model.sizes[d.dims[1]]
            for op in block.ops
            if op.kind == "attention"
            for d in (values[op.inputs[0]], op.outputs[0])
        )
    return width


def describe(model: Model, seq_len: int) -> dict[str, Any]:
    """What is to be known of a model, as plain values: `shardwise models NAME --json`."""
    parameters, ends = model.parameters, (model.kinds[0], model.kinds[-1])
    embedding, head = (model.parameters_of(kind) for kind in ends)
    return {
        "name": model.name,
        "family": model.family,
        "parameters": parameters,
        "active_parameters": model.active_parameters,
        "mtp_parameters": model.tail_parameters,
        "buffers": model.buffers,
        "embedding_share": embedding / parameters,
        "head_share": head / parameters,
        "tied": model.tied,
        "layers": model.layers,
        "loops": model.loops,
        "kinds": {kind: {"units": model.count(kind), "parameters": model.parameters_of(kind)} for kind in model.kinds},
        "seq_len": seq_len,
        "flops_per_token": {name: flops_per_token(model, seq_len, name) for name in CONVENTIONS},
    }
