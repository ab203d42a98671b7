"""Stack: a software stack as data. Why the same layout needs other memory and time under other software.

Every figure names the stack it holds under. `stacks/*.toml` hold the known ones, each figure with its source; the
default is our own runtime. A model's blocks declare what our operations keep for the backward; `under` rewrites them to
what the operations of another stack keep, and the memory model walks them as it walks ours.
"""

# No `from __future__ import annotations` here: cattrs reads the Bounds off the fields, and drops them from texts.

import tomllib
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from shardwise.cluster.convert import structure
from shardwise.cluster.device import Bounds, ClusterError
from shardwise.files import FileError, read_small
from shardwise.model.spec import EMBEDDING, Block, Model, Op, Role, Scratch, TensorDesc

MAX_FILE_BYTES = 1 << 20

Share = Annotated[float, Bounds(0, 1, "")]
BytesPerParameter = Annotated[float, Bounds(0, 64, "bytes per parameter")]
Level = Annotated[int, Bounds(0, 3, "")]


class StackError(ValueError):
    """A stack that cannot be read: all faults at once, each with its place, what was found and what was wanted."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Saves:
    """What operations keep for their backward, beside what ours keep. Bytes are those of 16-bit training."""

    column_input: Literal["shard", "gathered"] = "shard"
    """input of a column product under sequence parallelism; shard: gathered again in the backward; gathered: kept whole
    on every rank"""
    norm: Literal["fused", "eager"] = "fused"
    """fused: its input; eager: an RMS norm's input in four bytes, and the normed one"""
    activation: Literal["fused", "eager"] = "fused"
    """fused: its inputs; eager: silu(gate) too"""
    attention: Literal["flash", "eager"] = "flash"
    """flash: q, k, v, output and the rows' sums; eager: the softmax of the scores instead of the rows' sums"""
    routed: Literal["early", "late"] = "early"
    """early: a routed copy's weight scales its activation; late: it scales what the experts made, which is kept, and so
    is what is then added up"""
    recomputed: Literal["until-saved", "whole"] = "until-saved"
    """of a layer that is recomputed; until-saved: all but the last product, whose result nobody reads; whole: the whole
    forward, with its communication"""
    loss: Literal["in-place", "float32", "eager"] = "in-place"
    """in-place: the gradient takes the logits' place; float32: the softmax is kept in four bytes, and becomes the
    gradient; eager: cross-entropy of a float32 copy, 4 bytes a logit kept and 12 at the peak"""
    dropout: bool = False
    """on the embedding, the sublayers' outputs and, where attention is eager, its scores: masks of one byte are kept,
    and of the scores the result"""


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of the model state."""

    gradients: Literal["accumulate", "compute"] = "accumulate"
    """dtype of gradient buffers and of their reduction"""
    optimizer_bytes_per_parameter: BytesPerParameter = 0.0
    """master weights and both moments under AdamW; 0: the precision's own"""
    step_bytes_per_parameter: BytesPerParameter = 0.0
    """what the optimizer's step allocates for a while, per parameter of this rank's part"""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which part of a communication hides behind computing where there is computing to hide it: 0 none, 1 all."""

    tp: Share = 0.0
    cp: Share = 1.0
    ep: Share = 0.0
    reduce: Share = 0.0
    """reduction of each micro-batch's gradients behind the backward"""
    final: Share = 1.0
    """reduction of a step's gradients, once, behind its last backward"""
    publish: Share = 0.0
    """ZeRO-1's gather of new parameters behind the next forward"""


@dataclass(frozen=True, slots=True)
class Stack:
    """One file: which ZeRO levels the software offers, what it keeps, what it hides.

    `efficiency` scales the device's rate of products, `fused` says whether chains of elementwise operations are one
    kernel. `allocator_margin` replaces the device's prior.
    """

    name: str = "shardwise"
    title: str = "shardwise's own runtime"
    source: str = "train/ops.py, train/unit.py"
    """where the figures were read that no comment beside them gives another source for"""
    zero: tuple[Level, ...] = (0, 1, 2, 3)
    saves: Saves = field(default_factory=Saves)
    state: State = field(default_factory=State)
    overlap: Overlap = field(default_factory=Overlap)
    fused: bool = True
    dispatcher: Literal["all-to-all", "deduplicated"] = "all-to-all"
    """how routed copies travel; deduplicated: a node is sent a token once, however many of its experts want it"""
    efficiency: Annotated[float, Bounds(0.01, 2, "")] = 1.0
    allocator_margin: Share | None = None


SHARDWISE: Final = Stack()


# ---------------------------------------------------------------------------------------------------------- files


@cache
def known_stacks() -> tuple[str, ...]:
    """Names of the stacks that come with the package, in alphabetical order."""
    return tuple(sorted(file.name[:-5] for file in _FOLDER.iterdir() if file.name.endswith(".toml")))


def load_stack(spec: str) -> Stack:
    """A known stack by its name, or one from a TOML file. Raises StackError with all faults, OSError as the system.

    A file may say `like = "megatron"`: it then holds only what differs from that one.
    """
    if spec in known_stacks():
        return _known(spec)
    path = Path(spec)
    if path.suffix != ".toml" and not path.exists():
        close = get_close_matches(spec, known_stacks(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        known = ", ".join(known_stacks())
        raise StackError([f"no stack is named {spec[:60]!r}{hint} (known: {known}, or a .toml file)"])
    if not path.exists():
        raise StackError([f"{str(path)[:200]}: no such file"])
    try:
        return _read(read_small(path, "a stack, as a TOML file", MAX_FILE_BYTES), str(path))
    except FileError as error:
        raise StackError([f"{path}: {error}"]) from None


@cache
def _known(name: str) -> Stack:
    return _read((_FOLDER / f"{name}.toml").read_text("utf-8"), name)


_FOLDER: Final = resources.files("shardwise.plan") / "stacks"


def _read(content: str, where: str) -> Stack:
    try:
        tables = tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        raise StackError([f"{where}: not TOML that can be read: {error}"]) from None
    faults = [f"{key}: missing; wanted text" for key in ("name", "title", "source") if key not in tables]
    like = tables.pop("like", None)
    if like in known_stacks():
        tables = _over(_tables(like), tables)
    elif like is not None:
        faults.append(f"like: found {str(like)[:60]!r}, wanted one of {', '.join(known_stacks())}")
    if tables.get("zero") == []:
        faults.append("zero: found no level; wanted some of 0, 1, 2, 3")
    try:
        found = structure(tables, Stack)
    except ClusterError as error:
        raise StackError([f"{where}: {fault}" for fault in (*faults, *error.faults)]) from None
    if faults:
        raise StackError([f"{where}: {fault}" for fault in faults])
    return found


def _tables(name: str) -> dict[str, Any]:
    """The file of a known stack, laid over the one that it is like."""
    tables = tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))
    like = tables.pop("like", None)
    return _over(_tables(like), tables) if like else tables


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; all else is replaced."""
    both = [key for key in below.keys() & above if isinstance(below[key], dict) and isinstance(above[key], dict)]
    return below | above | {key: below[key] | above[key] for key in both}


# ------------------------------------------------------------------------------------------ what the blocks keep

GATHERED: Final = "gathered"
"""Name of a column product's input as a stack keeps it that does not gather again in the backward."""


def under(model: Model, stack: Stack) -> Model:
    """The model whose blocks keep for their backward what the operations of this stack keep.

    The very model under our own; `model.stack` says what differs, so that equal models have equal blocks. Raises
    ValueError for a model that was already rewritten for other software.
    """
    ours = Saves()
    changed = {f.name: getattr(stack.saves, f.name) for f in fields(Saves)}
    mark = " ".join(f"{name}={value}" for name, value in changed.items() if value != getattr(ours, name))
    if model.stack == mark:
        return model
    if model.stack:
        raise ValueError(f"{model.name} is described for other software already ({model.stack})")
    return replace(model, blocks=tuple(_block(b, stack.saves) for b in model.blocks), stack=mark)


def _block(block: Block, saves: Saves) -> Block:
    ops = [_op(op, block, saves) for op in block.ops]
    if saves.dropout and block.kind == EMBEDDING and ops[-1].parameters:
        ops[-1] = _keep(ops[-1], _MASK)
    return replace(block, ops=tuple(ops), reruns_tail=saves.recomputed == "whole")


def _op(op: Op, block: Block, saves: Saves) -> Op:
    """One op of a block as the stack runs it."""
    match op.kind:
        case "linear" if op.gathers and saves.column_input == "gathered":
            return _gathered(op, alone=sum(op.inputs[0] in other.saves for other in block.ops) == 1)
        case "linear" if op.reduces and op.residual and saves.dropout:
            return _keep(op, _MASK)
        case "norm" if saves.norm == "eager":
            return _eager_norm(op, held=op.inputs[0] in (d.name for d in block.inputs))
        case "swiglu" if saves.activation == "eager":
            return _eager_gate(op, weighted=saves.routed == "early" and len(op.inputs) > 2)
        case "attention" if saves.attention == "eager":
            return _eager_attention(op, saves.dropout)
        case "combine" if saves.routed == "late":
            width = op.outputs[0].dims[1]
            return _keep(op, TensorDesc("returned", f"c{width}"), TensorDesc("weighted", f"c{width}"))
        case "cross_entropy" if saves.loss != "in-place":
            return _wide_loss(op, saves.loss == "eager")
        case _:
            return op


_MASK: Final = TensorDesc("dropped", "th", Role.MASK)


def _keep(op: Op, *tensors: TensorDesc) -> Op:
    return replace(op, keeps=(*op.keeps, *tensors))


def _gathered(op: Op, alone: bool) -> Op:
    """The gathered input is kept. Where this op alone would keep the shard, nobody does; where another does, the whole
    input is a tensor beside it under sequence parallelism alone."""
    whole = op.scratch_f[0].tensors[0].dims
    return replace(
        _keep(op, TensorDesc(GATHERED, whole, when="" if alone else "sp")),
        saves=() if alone else op.saves,
        scratch_f=(),
        scratch_w=tuple(Scratch(tuple(t for t in m.tensors if t.name != "x"), m.outputs) for m in op.scratch_w),
    )


def _eager_norm(op: Op, held: bool) -> Op:
    """Upcast, scaled, cast back and multiplied by the weight, one operation at a time: 6 bytes an element instead of 2.
    A unit's own input is `held` in any case, and counts as half of its wide copy. LayerNorm is one kernel in every
    stack, and the gated norm of a mixer is our own everywhere."""
    if op.saves != op.inputs[:1] or any(k.name == "mean" for k in op.keeps):
        return op
    dims = op.outputs[0].dims
    wide = TensorDesc("wide", dims, when="cast") if held else TensorDesc("wide", dims, Role.ACCUMULATE)
    return replace(_keep(op, wide, TensorDesc("normed", dims)), saves=())


def _eager_gate(op: Op, weighted: bool) -> Op:
    """silu(gate) is kept for the product; and an expert's product, where the copy's weight then scales it."""
    dims = op.outputs[0].dims
    return _keep(op, TensorDesc("act", dims), *((TensorDesc("unweighted", dims),) if weighted else ()))


def _eager_attention(op: Op, dropout: bool) -> Op:
    """Korthikanti et al. (2205.05198), section 4.1: 2 a s bytes a token of softmax, with dropout 5 a s."""
    scores = "TaS"
    kept = [TensorDesc("softmax", scores)]
    if dropout:
        kept += [TensorDesc("mask", scores, Role.MASK), TensorDesc("dropped", scores)]
    backward = Scratch((TensorDesc("dsoftmax", scores), TensorDesc("dscores", scores)))
    return replace(
        op,
        saves=op.inputs,
        keeps=tuple(kept),
        scratch_f=(*op.scratch_f, Scratch((TensorDesc("scores", scores),))),
        scratch_b=(*op.scratch_b, backward),
    )


def _wide_loss(op: Op, eager: bool) -> Op:
    """The logits die with the forward. float32: their wide copy becomes the softmax and then the gradient; eager: two
    more live beside it in the backward (14 bytes a logit in all where Python still holds the narrow ones)."""
    wide = TensorDesc("softmax", "Tv", Role.ACCUMULATE)
    if eager:
        backward = (TensorDesc("dsoftmax", "Tv", Role.ACCUMULATE), TensorDesc("dwide", "Tv", Role.ACCUMULATE))
        forward = op.scratch_f
    else:
        backward = (TensorDesc("dlogits", "Tv", when="cast"),)
        forward = tuple(Scratch(tuple(t for t in m.tensors if t.name != "z"), m.outputs) for m in op.scratch_f)
    return replace(_keep(op, wide), saves=(), scratch_f=forward, scratch_b=(Scratch(backward),))
