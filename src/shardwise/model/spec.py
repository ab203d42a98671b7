"""What a model is made of: dims, blocks, ops and tensors. Declared once; planner, proof and runtime read it.

Named dims (one letter each, the field's):

    T  tokens of a micro-batch (b * s), whole        t  the same tokens, cut along the stream under sequence parallelism
    h  hidden      q  query heads * head dim         k  kv heads * head dim
    f  feed-forward      v  vocabulary      a  query heads      r  half of q: rotary pairs      1  one
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

KINDS = EMBEDDING, LAYER, HEAD = ("embedding", "layer", "head")
"""Kinds of units, in the order in which the chain begins them."""

TP_DIMS = frozenset("qkfvar")
"""Dims that tensor parallelism cuts. `t` is cut as well, under sequence parallelism alone."""


class Role:
    """What a tensor's dtype follows."""

    COMPUTE = "compute"
    ACCUMULATE = "accumulate"
    INDEX = "int64"
    MASK = "bool"


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """A tensor by its named dims, for example `x_th` = ("x", "th"). `role` decides the dtype.

    `when` says under which cut it exists: always, "sp", "tp" (tp > 1), or "cast" (sums are wider than products).
    """

    name: str
    dims: str
    role: str = Role.COMPUTE
    when: str = ""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Tensors that live together at one moment inside an op, beside its inputs and what it saved.

    `outputs` tells whether the op's results (in B: the gradients of its inputs) exist already at that moment.
    """

    tensors: tuple[TensorDesc, ...]
    outputs: bool = True


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight by its named dims; rows (dim 0) are what ZeRO cuts. `name` is relative to the unit."""

    name: str
    dims: str

    @property
    def tp_dim(self) -> int | None:
        """The dim that tensor parallelism cuts, or None: the weight is whole on every rank of the group."""
        return next((i for i, d in enumerate(self.dims) if d in TP_DIMS), None)


@dataclass(frozen=True, slots=True)
class Op:
    """One differentiable operation of a block.

    `gathers`: its input takes the edge stream -> R before the products (and the shard is what is saved).
    `reduces`: its product takes the edge P -> stream.
    `saves`: values kept for the backward, inputs or outputs of this op; `keeps` are saved tensors of its own.
    `residual` names the value that passes through unchanged: an output of a norm, an input of a row product.
    `scratch_*` lists the moments of F, of the input gradient B and of the weight gradient W that may set the peak.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[TensorDesc, ...]
    parameters: tuple[Parameter, ...] = ()
    saves: tuple[str, ...] = ()
    keeps: tuple[TensorDesc, ...] = ()
    gathers: bool = False
    reduces: bool = False
    residual: str | None = None
    scratch_f: tuple[Scratch, ...] = ()
    scratch_b: tuple[Scratch, ...] = ()
    scratch_w: tuple[Scratch, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """The ops of one kind of unit, in order; `inputs` are the unit's own inputs."""

    kind: str
    inputs: tuple[TensorDesc, ...]
    ops: tuple[Op, ...]
    tied: tuple[str, ...] = ()
    """Names of parameters that are the embedding's, under tied weights."""
    recomputable: bool = False
    """Whether full recompute keeps the unit's input alone; what leaves the model's ends is not worth a second run."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(p for op in self.ops for p in op.parameters)

    @property
    def output(self) -> TensorDesc:
        return self.ops[-1].outputs[0]

    @property
    def recomputed(self) -> tuple[Op, ...]:
        """Ops whose forward runs again under full recompute: of the last one only the node is made, nobody reads its
        result."""
        return self.ops[:-1] if self.recomputable else ()

    @property
    def backward_reads(self) -> bool:
        """Whether the input gradient needs the parameters: an embedding has no input gradient."""
        return any(op.parameters and op.kind != "embed" for op in self.ops)


@dataclass(frozen=True, slots=True)
class Unit:
    """One step of the model's chain: the embedding, a layer, or the head with the loss."""

    name: str
    block: Block = field(compare=False)


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer. `dims` maps the letters of this module (without T and t) to sizes."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, float], ...]
    blocks: tuple[Block, Block, Block] = field(compare=False)
    """embedding, layer, head: they follow from the family and `tied`"""

    @property
    def dims(self) -> dict[str, int]:
        return {
            "h": self.hidden,
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "f": self.ffn,
            "v": self.vocab,
            "a": self.heads,
            "r": self.heads * self.head_dim // 2,
            "1": 1,
        }

    def units(self) -> Iterator[Unit]:
        """The chain, in order."""
        embedding, layer, head = self.blocks
        yield Unit("embedding", embedding)
        for i in range(self.layers):
            yield Unit(f"layers.{i}", layer)
        yield Unit("head", head)

    def size(self, parameter: Parameter) -> int:
        """Elements of the whole parameter."""
        dims = self.dims
        return prod(dims[d] for d in parameter.dims)

    @property
    def parameters(self) -> int:
        """Logical parameters: a tied weight counts once."""
        embedding, layer, head = (sum(self.size(p) for p in b.parameters if p.name not in b.tied) for b in self.blocks)
        return embedding + self.layers * layer + head


@dataclass(frozen=True, slots=True)
class Cut:
    """How one micro-batch is cut on one rank: what turns named dims into local sizes and roles into bytes."""

    tokens: int
    tp: int
    sp: bool
    compute_bytes: int
    accumulate_bytes: int

    def elements(self, model: Model, dims: str) -> int:
        """Local elements of a tensor with these dims. Rules make the cuts exact beforehand."""
        sizes = model.dims
        total = 1
        for d in dims:
            if d == "T":
                total *= self.tokens
            elif d == "t":
                total *= self.tokens // (self.tp if self.sp else 1)
            else:
                total *= sizes[d] // (self.tp if d in TP_DIMS else 1)
        return total

    def bytes(self, model: Model, tensor: TensorDesc) -> int:
        """Local bytes of a tensor; 0 where it does not exist under this cut."""
        exists = {
            "": True,
            "sp": self.sp,
            "tp": self.tp > 1,
            "cast": self.accumulate_bytes != self.compute_bytes,
        }[tensor.when]
        if not exists:
            return 0
        width = {
            Role.COMPUTE: self.compute_bytes,
            Role.ACCUMULATE: self.accumulate_bytes,
            Role.INDEX: 8,
            Role.MASK: 1,
        }[tensor.role]
        return self.elements(model, tensor.dims) * width
