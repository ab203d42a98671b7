"""The pieces that every family's blocks are made of: norms, products with their edges, and the model's two ends.

`train/nn.py` writes the llama family's blocks once by hand and asks for its edges by op name; a registry test compares
the two, op by op. Working memory (`scratch`) describes `train/ops.py`; the proof holds it to the measured peak. What no
runtime of ours runs yet follows the same conventions: autograd functions with an explicit list of what they save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwise.model.spec import EMBEDDING, HEAD, MTP, Block, Op, Parameter, Role, Scratch, TensorDesc

A, I = Role.ACCUMULATE, Role.INDEX

Body = Callable[[str, str | None, str], tuple[Op, ...]]
"""Ops between two values of the stream: (name of the input, of the residual to add or None, of the output)."""


@dataclass(frozen=True, slots=True)
class Norm:
    """How a family normalises. `centred`: LayerNorm, which keeps the mean too; `parameters`: of "weight", "bias".

    `before` and `after` say where a sublayer is normalised: its input, its output (ahead of the addition), or both.
    `offset`: it multiplies by 1 + weight.
    """

    centred: bool = False
    parameters: tuple[str, ...] = ("weight",)
    before: bool = True
    after: bool = False
    offset: bool = False


RMS = Norm()
LAYER_NORM = Norm(centred=True, parameters=("weight", "bias"))


def tensor(name: str, dims: str, role: str = Role.COMPUTE, when: str = "") -> TensorDesc:
    return TensorDesc(name, dims, role, when)


def moment(*tensors: TensorDesc, outputs: bool = True) -> Scratch:
    return Scratch(tensors, outputs)


def norm(name: str, source: str, output: str, residual: str | None = None, style: Norm = RMS) -> Op:
    """Norm of the stream; it hands its input on as the residual, so that no gradient is summed outside an op."""
    outputs = (tensor(output, "th"),) + ((tensor(residual, "th"),) if residual else ())
    return _norm(name, (source,), outputs, residual, style)


def norm_after(name: str, source: str, residual: str, output: str, style: Norm) -> Op:
    """Norm of what a sublayer made, added to the residual."""
    return _norm(name, (source, residual), (tensor(output, "th"),), residual, style)


def inner_norm(name: str, source: str, output: TensorDesc, weight: Parameter, rstd: str, style: Norm = RMS) -> Op:
    """RMS norm inside a sublayer, over the dims of `weight`; `rstd` are the dims of what is kept beside the input."""
    rows = _rows(weight.dims, rstd, style)
    return Op(
        name=name,
        kind="norm",
        inputs=(source,),
        outputs=(output,),
        parameters=(weight,),
        saves=(source,),
        keeps=(tensor("rstd", rstd, A),),
        scratch_f=(moment(tensor("y", output.dims, A, "cast")),),
        scratch_b=(
            moment(tensor("normed", output.dims, A), tensor("g", output.dims, A), *rows, outputs=False),
            moment(tensor("g", output.dims, A, "cast"), *rows),
        ),
    )


def _rows(weight: str, mean: str, style: Norm) -> tuple[TensorDesc, ...]:
    """Vectors of a norm's backward: what it multiplies by, the weight's gradient, and sums over its features."""
    if not style.parameters:
        return (tensor("mean", mean, A),)
    return (
        tensor("weight", weight, A, "" if style.offset else "cast"),
        tensor("dw", weight, A),
        tensor("mean", mean, A),
    )


def _norm(name: str, inputs: tuple[str, ...], outputs: tuple[TensorDesc, ...], residual: str | None, style: Norm) -> Op:
    rows = _rows("h", "t", style)
    centre = (tensor("centre", "t", A),) if style.centred else ()
    return Op(
        name=name,
        kind="norm",
        inputs=inputs,
        outputs=outputs,
        parameters=tuple(Parameter(f"{name}.{p}", "h") for p in style.parameters),
        saves=(inputs[0],),
        keeps=((tensor("mean", "t1", A),) if style.centred else ()) + (tensor("rstd", "t1", A),),
        residual=residual,
        scratch_f=(moment(tensor("y", "th", A, "cast")),),
        scratch_b=(
            moment(tensor("normed", "th", A), tensor("g", "th", A), *rows, *centre, outputs=False),
            moment(tensor("g", "th", A, "cast"), *rows),
        ),
    )


WIDTHS = "1bngkqawuoimsfv"
"""Dims of rows, from the commonly smallest: the widest product's weight gradient sets the peak."""


def column(name: str, source: TensorDesc, outputs: tuple[TensorDesc, ...], parameters: tuple[Parameter, ...]) -> Op:
    """Products of one gathered input; the shard is saved and gathered again for the weight gradients."""
    widest = max((p for p in parameters if len(p.dims) > 1), key=lambda p: WIDTHS.index(p.dims[0]))
    whole = source.dims.replace("t", "T")
    return Op(
        name=name,
        kind="linear",
        inputs=(source.name,),
        outputs=outputs,
        parameters=parameters,
        saves=(source.name,),
        gathers=True,
        scratch_f=(moment(tensor("x", whole, when="sp")),),
        scratch_b=(moment(tensor("dx", whole, when="sp")),),
        scratch_w=(moment(tensor("x", whole, when="sp"), tensor("dw", widest.dims, when="cast")),),
    )


def row(name: str, source: str, residual: str | None, output: str, parameters: tuple[Parameter, ...]) -> Op:
    """A product whose partial sums are reduced into the stream, and the residual (and a bias) added."""
    return Op(
        name=name,
        kind="linear",
        inputs=(source, residual) if residual else (source,),
        outputs=(tensor(output, "th"),),
        parameters=parameters,
        saves=(source,),
        reduces=True,
        residual=residual,
        scratch_f=(moment(tensor("partial", "Th", when="sp")),),
        scratch_b=(moment(tensor("dy", "Th", when="sp")),),
        scratch_w=(moment(tensor("dy", "Th", when="sp"), tensor("dw", parameters[0].dims, when="cast")),),
    )


def replicated(
    name: str,
    sources: tuple[str, ...],
    outputs: tuple[TensorDesc, ...],
    parameters: tuple[Parameter, ...],
    residual: str | None = None,
) -> Op:
    """Products of stream tokens with weights that are whole on every tensor-parallel rank: no edges."""
    return Op(
        name=name,
        kind="linear",
        inputs=(*sources, residual) if residual else sources,
        outputs=outputs,
        parameters=parameters,
        saves=sources,
        residual=residual,
        scratch_w=(moment(tensor("dw", parameters[0].dims, when="cast")),),
    )


def weight(name: str, dims: str, bias: bool = False) -> tuple[Parameter, ...]:
    """A product's weight, and its bias."""
    found = (Parameter(f"{name}.weight", dims),)
    return (*found, Parameter(f"{name}.bias", dims[0])) if bias else found


def sublayer(index: int, name: str, stream: tuple[str, str], body: Body, style: Norm) -> tuple[Op, ...]:
    """Ops from one value of the stream to the next, with the norms where the family has them."""
    source, output = stream
    residual = f"r{index}"
    if not style.before:
        first, *rest = body(source, None, f"z{index}")
        ops = (_handing(first, residual), *rest)
    else:
        inner = f"n{index}"
        ops = (norm(f"{name}_norm", source, inner, residual, style),)
        if not style.after:
            return (*ops, *body(inner, residual, output))
        ops = (*ops, *body(inner, None, f"z{index}"))
    return (*ops, norm_after(f"{name}_post_norm", f"z{index}", residual, output, style))


def _handing(op: Op, residual: str) -> Op:
    """A product that hands its input on as the residual, as a norm does where there is one ahead of it."""
    return replace(op, outputs=(*op.outputs, tensor(residual, "th")), residual=residual)


def layer(kind: str, attention: Body, feed_forward: Body, style: Norm = RMS) -> Block:
    """A layer of the usual form: a mixer of tokens, then a feed-forward."""
    return Block(kind, (tensor("x", "th"),), layer_ops("x", attention, feed_forward, style), recomputable=True)


def layer_ops(source: str, attention: Body, feed_forward: Body, style: Norm) -> tuple[Op, ...]:
    """The ops of such a layer, from the value `source` to "y"."""
    return (
        *sublayer(1, "attention", (source, "x2"), attention, style),
        *sublayer(2, "mlp", ("x2", "y"), feed_forward, style),
    )


def single(kind: str, name: str, body: Body, style: Norm = RMS) -> Block:
    """A layer of one sublayer alone."""
    return Block(kind, (tensor("x", "th"),), sublayer(1, name, ("x", "y"), body, style), recomputable=True)


def lookup(name: str, output: str) -> Op:
    """Vocabulary-parallel lookup: each rank looks up its rows, partial sums are reduced into the stream."""
    rows = (tensor("local", "T", I, "tp"), tensor("outside", "T", Role.MASK, "tp"))
    return Op(
        name=name,
        kind="embed",
        inputs=("ids",),
        outputs=(tensor(output, "th"),),
        parameters=(Parameter(f"{name}.weight" if name else "weight", "vh"),),
        saves=("ids",),
        reduces=True,
        scratch_f=(moment(tensor("partial", "Th", when="sp"), *rows),),
        scratch_w=(
            moment(
                tensor("dy", "Th", when="sp"),
                tensor("dy", "Th", A),
                tensor("row", "T", I),
                tensor("shard", "T", I),
                *rows,
            ),
        ),
    )


def embedding(positions: bool = False, style: Norm | None = None) -> Block:
    """The embedding; `positions`: learned ones are added; `style`: of a norm behind it (BLOOM)."""
    ops = (lookup("", "x"),)
    if positions:
        added = Op(
            name="positions",
            kind="embed",
            inputs=("x",),
            outputs=(tensor("xp", "th"),),
            parameters=(Parameter("positions.weight", "Ph"),),
            residual="x",
            scratch_f=(moment(tensor("row", "t", I)),),
            scratch_w=(
                moment(tensor("dy", "th", A), tensor("row", "t", I), tensor("at", "t", I), tensor("shard", "t", I)),
            ),
        )
        ops = (*ops, added)
    if style:
        ops = (*ops, norm("norm", ops[-1].outputs[0].name, "xn", None, style))
    return Block(EMBEDDING, (tensor("ids", "T", I),), ops)


def prediction(source: str, style: Norm = RMS, carried: str | None = None, capped: bool = False) -> tuple[Op, ...]:
    """Final norm, output product, vocabulary-parallel cross-entropy, which leaves its gradient in the logits' place.

    A soft cap is applied in place, inside the loss; its slope is made a piece of the vocabulary at a time. `carried`
    names the stream that a unit before the head hands on beside its own loss.
    """
    names = ("top", "picked", "total", "weight", "negative")
    rows = (
        *(tensor(name, "T", A) for name in names),
        tensor("local", "T", I),
        tensor("own", "T", A, "tp"),
        tensor("outside", "T", Role.MASK, "tp"),
    )
    loss = Op(
        name="loss",
        kind="cross_entropy",
        inputs=("logits", carried) if carried else ("logits",),
        outputs=(tensor("carried", "th"),) if carried else (tensor("loss", "1", A),),
        saves=("logits",),
        residual=carried,
        scratch_f=(moment(tensor("z", "Tv", A, "cast"), *rows, *((tensor("piece", "TH", A),) if capped else ())),),
    )
    return (
        norm("norm", source, "n", None, style),
        column("output", tensor("n", "th"), (tensor("logits", "Tv"),), (Parameter("output.weight", "vh"),)),
        loss,
    )


def head(tied: bool, style: Norm = RMS, capped: bool = False) -> Block:
    """The last unit. Its parameters' norm is of the family's kind, always ahead of the product."""
    ops = prediction("x", style, capped=capped)
    return Block(HEAD, (tensor("x", "th"),), ops, tied=("output.weight",) if tied else ())


def further_prediction(ops: tuple[Op, ...], style: Norm = RMS) -> Block:
    """Multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2): the hidden states and the next token's embedding,
    both normed, joined by one product into a layer, `ops` from "x0" to "y", and the shared output product.

    The hidden states are handed on for the head. Embedding and output product are the model's own.
    """
    joined = replicated("join", ("en", "xn"), (tensor("x0", "th"),), weight("join", "hJ"))
    before = (
        lookup("embedding", "e"),
        norm("embedding_norm", "e", "en", None, style),
        norm("hidden_norm", "x", "xn", None, style),
        joined,
    )
    inputs = (tensor("x", "th"), tensor("ids", "T", I))
    return Block(
        MTP,
        inputs,
        (*before, *ops, *prediction("y", style, carried="x")),
        tied=("embedding.weight", "output.weight"),
        recomputable=False,
    )
