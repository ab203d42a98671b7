"""What a model is made of: dims, blocks, ops and tensors. Declared once; planner, proof and runtime read it.

Named dims, one letter each. Tokens are those of one micro-batch on one rank, after context parallelism:

    T  tokens, whole                 t  the same tokens, cut along the stream under sequence parallelism
    S  keys of a sequence            c  routed copies that leave the rank (t * top-k)
    d  routed copies that arrive     D  the same, gathered over expert-tp
    h  hidden      q  query heads * head dim      k  kv heads * head dim      a  query heads      r  half of q
    b  kv heads    H  head dim    f  feed-forward    v  vocabulary    P  positions    J  2h, joined    1  one
    MLA: Q  query rank     L  kv rank       K  kv rank + rotary dim
         u  heads * (nope + rotary dim)     w  heads * (nope + value dim)     o  heads * value dim
    MoE: E  experts (the router's outputs)  x  feed-forward of one expert     X  experts * x (rows of all experts)
         e  experts (those that are held)
         s  shared experts' feed-forward    y  latent
    SSM: i  inner          m  convolved channels        n  heads        N  state      g  groups
         W  taps of the convolution    C  tokens of a chunk of the scan    G  i * N / C, states a token
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, Final

Count = Any
"""A whole number, or a column of them: NumPy's arithmetic is the same."""

EMBEDDING, LAYER, MTP, HEAD = ("embedding", "layer", "mtp", "head")
"""Kinds of units that have a name of their own. A family may name the kinds of its layers as it likes; `layer` is the
dense one."""

TP_DIMS: Final = frozenset("qkbfvaruwosimngG")
"""Dims that tensor parallelism cuts. `t` is cut as well, under sequence parallelism alone."""

KV_DIMS: Final = frozenset("kb")
"""Of these the dims of kv heads, which are copied where tp is larger than their number."""

EXPERT_DIMS: Final = frozenset("xXe")
"""Dims of routed experts: expert-tp cuts x and X, expert parallelism X and e."""

OP_RECOMPUTE: Final = {"norm": "norm", "swiglu": "act", "activation": "act", "attention": "core", "scan": "core"}
"""What each kind of op is called where it may be recomputed by itself."""

TOKEN_DIMS: Final = frozenset("TtcdD")


class Role:
    """What a tensor's dtype follows."""

    COMPUTE = "compute"
    ACCUMULATE = "accumulate"
    INDEX = "int64"
    MASK = "bool"


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """A tensor by its named dims, for example `x_th` = ("x", "th"). `role` decides the dtype.

    `when` says under which cut it exists: always, "sp", "tp" (tp > 1; "cp", "ep", "etp" alike), or "cast" (sums are
    wider than products).
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
    """A weight by its named dims; rows (dim 0) are what ZeRO cuts. `name` is relative to the unit.

    `partial`: every tensor-parallel rank holds but a part of its gradient, sequence parallelism or not (a norm over the
    head dim, of which each rank meets its own heads).
    """

    name: str
    dims: str
    partial: bool = False

    @property
    def tp_dim(self) -> int | None:
        """The dim that tensor parallelism cuts, or None: the weight is whole on every rank of the group."""
        return next((i for i, d in enumerate(self.dims) if d in TP_DIMS), None)

    @property
    def expert(self) -> bool:
        """Whether it belongs to routed experts, which have axes of their own."""
        return any(d in EXPERT_DIMS for d in self.dims)


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
    window: int | None = None
    """keys that a query of this attention sees at most"""
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
    """Names of parameters that are the embedding's, under tied weights (or, of a tail's unit, the head's)."""
    recomputable: bool = False
    """Whether full recompute keeps the unit's input alone; what leaves the model's ends is not worth a second run."""
    reruns_tail: bool = False
    """Whether full recompute runs the last op again too, though nobody reads its result."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(p for op in self.ops for p in op.parameters)

    @property
    def output(self) -> TensorDesc:
        return self.ops[-1].outputs[0]

    def again(self, recompute: str) -> tuple[Op, ...]:
        """Ops whose forward runs again in the backward. Under `full` of the last one only the node is made, unless the
        block reruns its tail; otherwise `recompute` names some of OP_RECOMPUTE's groups."""
        if recompute == "full":
            return (self.ops if self.reruns_tail else self.ops[:-1]) if self.recomputable else ()
        wanted = recompute.split(",")
        return tuple(op for op in self.ops if self.recomputable and OP_RECOMPUTE.get(op.kind) in wanted)

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
    """A decoder-only language model: embedding, `chain` (the kind of each layer, in order), `tail`, head.

    Two models are equal if their names, configs and stacks are: all else follows from these. `sizes` maps the letters
    of this module to whole sizes (no token dims). `blocks` has one block a kind, in the order in which the chain begins
    them. `tail` are units behind the last layer that always lie on the head's stage (multi-token prediction).
    `loops`: the chain is run so many times over, with one set of parameters.
    """

    name: str
    config: str
    """canonical JSON of the Hugging Face keys that were read: `hf.from_config` makes the same model of it"""
    family: str = field(compare=False)
    sizes: Mapping[str, int] = field(compare=False)
    blocks: tuple[Block, ...] = field(compare=False)
    chain: tuple[str, ...] = field(compare=False)
    tied: bool = field(compare=False, default=False)
    heads: int = field(compare=False, default=1)
    kv_heads: int = field(compare=False, default=1)
    experts: int = field(compare=False, default=0)
    top_k: int = field(compare=False, default=0)
    ssm_heads: int = field(compare=False, default=0)
    ssm_groups: int = field(compare=False, default=0)
    norm_eps: float = field(compare=False, default=1e-5)
    rope_theta: float = field(compare=False, default=10000.0)
    rope_scaling: tuple[tuple[str, float], ...] = field(compare=False, default=())
    tail: tuple[str, ...] = field(compare=False, default=())
    loops: int = field(compare=False, default=1)
    buffers: int = field(compare=False, default=0)
    """numbers that are kept beside the parameters and not trained (a router's bias)"""
    stack: str = ""
    """the software stack whose operations the blocks describe; empty: ours"""

    @property
    def layers(self) -> int:
        """Layers that run, in the order of the pipeline."""
        return len(self.chain) * self.loops

    @property
    def hidden(self) -> int:
        return self.sizes["h"]

    @property
    def ffn(self) -> int:
        """Feed-forward size of the dense layers; 0 without any."""
        return self.sizes.get("f", 0)

    @property
    def vocab(self) -> int:
        return self.sizes["v"]

    @property
    def head_dim(self) -> int:
        return self.sizes.get("H", 0)

    @property
    def dims(self) -> Mapping[str, int]:
        """`sizes`, and the one."""
        return MappingProxyType({**self.sizes, "1": 1})

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of units, in the order in which the chain begins them."""
        return tuple(b.kind for b in self.blocks)

    def block(self, kind: str) -> Block:
        """The block of one kind."""
        return next(b for b in self.blocks if b.kind == kind)

    def units(self) -> Iterator[Unit]:
        """The chain, in order. Of a looped model every run of a layer is a unit: `layers.3` has `layers.1`'s weights
        where the chain has two."""
        by_kind = {b.kind: b for b in self.blocks}
        yield Unit(EMBEDDING, by_kind[EMBEDDING])
        for i, kind in enumerate(self.chain * self.loops):
            yield Unit(f"layers.{i}", by_kind[kind])
        for i, kind in enumerate(self.tail):
            yield Unit(f"{kind}.{i}", by_kind[kind])
        yield Unit(HEAD, by_kind[HEAD])

    def size(self, parameter: Parameter) -> int:
        """Elements of the whole parameter."""
        dims = self.dims
        return prod(dims[d] for d in parameter.dims)

    def count(self, kind: str) -> int:
        """Units of one kind that hold parameters of their own."""
        return {EMBEDDING: 1, HEAD: 1}.get(kind, self.chain.count(kind) + self.tail.count(kind))

    def parameters_of(self, kind: str) -> int:
        """Logical parameters of one unit: a tied weight counts with the embedding."""
        block = self.block(kind)
        return sum(self.size(p) for p in block.parameters if p.name not in block.tied)

    @property
    def parameters(self) -> int:
        """Logical parameters without the tail's, as Hugging Face's classes count: a tied weight counts once."""
        return sum(self.parameters_of(k) * self.count(k) for k in self.kinds if k not in self.tail)

    @property
    def tail_parameters(self) -> int:
        """Parameters of the units behind the last layer, shared ones apart."""
        return sum(self.parameters_of(k) * self.count(k) for k in self.kinds if k in self.tail)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of the routed experts the top-k."""
        if not self.experts:
            return self.parameters
        routed = sum(
            self.size(p) * self.count(b.kind)
            for b in self.blocks
            if b.kind not in self.tail
            for p in b.parameters
            if p.expert
        )
        return self.parameters - routed + routed * self.top_k // self.experts


@dataclass(frozen=True, slots=True)
class Cut:
    """How one micro-batch is cut on one rank: what turns named dims into local sizes and roles into bytes.

    `tokens` are the rank's own, after context parallelism. `imbalance` is the largest number of routed copies on any
    rank over the mean.
    """

    tokens: Count
    tp: Count
    sp: Count
    compute_bytes: int
    accumulate_bytes: int
    cp: Count = 1
    ep: Count = 1
    etp: Count = 1
    seq_len: int = 0
    imbalance: float = 1.0
    cp_kind: Count = 0
    """0 ring, 1 heads exchanged for tokens (Ulysses), 2 K and V gathered"""

    def elements(self, model: Model, dims: str) -> Count:
        """Local elements of a tensor with these dims. Rules make the cuts exact beforehand."""
        total: Count = 1
        for d in dims:
            total = total * (self.rows(model, d) if d in TOKEN_DIMS or d == "S" else self.local(model, d))
        return total

    def local(self, model: Model, dim: str) -> Count:
        """Local size of a dim that is no token dim. The vocabulary is padded to a multiple of tp."""
        if dim == "1":
            return 1
        size = model.sizes[dim]
        if dim in KV_DIMS:
            return size // self.kv_parts(model)
        if dim == "v":
            return -(-size // self.tp)
        if dim in TP_DIMS:
            return size // self.tp
        return size // {"x": self.etp, "X": self.ep * self.etp, "e": self.ep}.get(dim, 1)

    def kv_parts(self, model: Model) -> Count:
        """Parts into which tensor parallelism cuts kv heads: where tp is larger than their number each is one, copied
        over neighbouring ranks."""
        return self.tp - (self.tp > model.kv_heads) * (self.tp - model.kv_heads)

    def rows(self, model: Model, dim: str) -> Count:
        """Local size of a token dim, or the keys of a sequence."""
        stream = self.tokens // (1 + self.sp * (self.tp - 1))
        if dim in "Tt":
            return self.tokens if dim == "T" else stream
        if dim == "S":
            return self.seq_len
        routed = stream * model.top_k
        if dim == "c":
            return routed
        # Thousandths: whole numbers stay whole.
        arrived = -(-routed * round(1000 * self.imbalance) // 1000)
        return arrived * (self.etp if dim == "D" else 1)

    def bytes(self, model: Model, tensor: TensorDesc) -> Count:
        """Local bytes of a tensor; 0 where it does not exist under this cut."""
        exists = {
            "": True,
            "sp": self.sp,
            "tp": self.tp > 1,
            "cp": self.cp > 1,
            "ep": self.ep > 1,
            "etp": self.etp > 1,
            "cast": self.accumulate_bytes != self.compute_bytes,
        }[tensor.when]
        return self.elements(model, tensor.dims) * self.width(tensor.role) * exists

    def width(self, role: str) -> int:
        """Bytes of one element."""
        return {
            Role.COMPUTE: self.compute_bytes,
            Role.ACCUMULATE: self.accumulate_bytes,
            Role.INDEX: 8,
            Role.MASK: 1,
        }[role]
