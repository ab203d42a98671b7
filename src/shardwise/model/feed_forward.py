"""Feed-forwards: dense ones, gated or not, and routed experts."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.model.blocks import A, Body, I, column, moment, replicated, row, tensor, weight
from shardwise.model.spec import Op, Parameter, TensorDesc

GATED = {"silu": "swiglu", "gelu": "geglu"}
"""Names of the gated products by their activation. Any gate times up is one kind of op, "swiglu"."""


def mlp(activation: str = "silu", gated: bool = True, bias: bool = False) -> Body:
    """gate, up -> activation(gate) * up -> down; or, not gated, up -> activation -> down."""

    def body(source: str, residual: str | None, output: str) -> tuple[Op, ...]:
        return dense("mlp", "f", (source, residual, output), (activation, gated, bias))

    return body


def dense(name: str, dim: str, values: tuple[str, str | None, str], form: tuple[str, bool, bool]) -> tuple[Op, ...]:
    """The three ops of a feed-forward as wide as `dim`; `form`: activation, gated, biases."""
    (source, residual, output), (activation, gated, bias) = values, form
    names = ("gate", "up") if gated else ("up",)
    wide = f"T{dim}"
    mark = "" if name == "mlp" else "s_"
    made = tuple(tensor(mark + n, wide) for n in names)
    parameters = tuple(p for n in names for p in weight(f"{name}.{n}", f"{dim}h", bias))
    return (
        column(f"{name}.{'_'.join(names)}", tensor(source, "th"), made, parameters),
        Op(
            name=f"{name}.{GATED[activation] if gated else activation}",
            kind="swiglu" if gated else "activation",
            inputs=tuple(d.name for d in made),
            outputs=(tensor(f"{mark}p", wide),),
            saves=tuple(d.name for d in made),
        ),
        row(f"{name}.down", f"{mark}p", residual, output, weight(f"{name}.down", f"h{dim}", bias)),
    )


@dataclass(frozen=True, slots=True)
class Experts:
    """What a family's routed experts have beside their sizes.

    `bias`: of the router and of the experts' products; `shared`: experts that see every token; `latent`: routed copies
    travel in a smaller width, between two products that tensor parallelism does not cut (Nemotron 3).
    """

    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    shared: bool = False
    latent: bool = False


def moe(spec: Experts) -> Body:
    """Router, copies to the ranks of their experts, grouped products, and back; dropless.

    A copy's weight travels with it and scales the activation, ahead of the down product: the router's gradient then
    needs no saved output of the experts (Megatron-LM does the same). Shared experts run ahead of the sum.
    """

    def body(source: str, residual: str | None, output: str) -> tuple[Op, ...]:
        width = "y" if spec.latent else "h"
        inner = "latent" if spec.latent else source
        form = (spec.activation, spec.gated, False)
        ops: list[Op] = [_router(source, spec.bias)]
        if spec.latent:
            down = weight("mlp.latent_down", "yh")
            ops.append(replicated("mlp.latent_down", (source,), (tensor(inner, "ty"),), down))
        ops += [_dispatch(inner, width), *_experts(width, spec)]
        if spec.shared:
            ops += dense("mlp.shared", "s", (source, residual, "shared"), form)
            residual = "shared"
        if not spec.latent:
            return (*ops, _combine(width, residual, output))
        up = weight("mlp.latent_up", "hy")
        back = replicated("mlp.latent_up", ("summed",), (tensor(output, "th"),), up, residual)
        return (*ops, _combine(width, None, "summed"), back)

    return body


def _router(source: str, bias: bool) -> Op:
    """Scores of every expert, the choice, and the weights of the chosen."""
    return Op(
        name="mlp.router",
        kind="router",
        inputs=(source,),
        outputs=(tensor("route", "c", A),),
        parameters=weight("mlp.router", "Eh", bias),
        saves=(source,),
        keeps=(tensor("probabilities", "tE", A), tensor("chosen", "c", I)),
        scratch_f=(moment(tensor("scores", "tE", A)),),
        scratch_b=(moment(tensor("dscores", "tE", A)),),
        scratch_w=(moment(tensor("dscores", "tE", A), tensor("dw", "Eh", when="cast")),),
    )


def _dispatch(source: str, width: str) -> Op:
    """Copies to the ranks of their experts; kept is where each came from, and its place among its expert's."""
    return Op(
        name="mlp.dispatch",
        kind="dispatch",
        inputs=(source, "route"),
        outputs=(tensor("copies", f"D{width}"), tensor("weights", "D", A)),
        keeps=(tensor("order", "c", I), tensor("place", "d", I)),
        scratch_f=(moment(tensor("sent", f"c{width}", when="ep"), tensor("arrived", f"d{width}", when="ep")),),
        scratch_b=(moment(tensor("arrived", f"d{width}", when="ep"), tensor("sent", f"c{width}", when="ep")),),
    )


def _experts(width: str, spec: Experts) -> tuple[Op, ...]:
    """Grouped products: each copy meets its own expert's weights."""
    names = ("gate", "up") if spec.gated else ("up",)
    made = tuple(tensor(f"e_{n}", "Dx") for n in names)
    into = tuple(p for n in names for p in weight(f"mlp.experts.{n}", f"X{width}", spec.bias))
    back = (Parameter("mlp.experts.down.weight", f"{width}X"),)
    if spec.bias:
        back = (*back, Parameter("mlp.experts.down.bias", f"e{width}"))
    inputs = (*(d.name for d in made), "weights")
    return (
        _grouped(f"mlp.experts.{'_'.join(names)}", "copies", made, into),
        Op(
            name=f"mlp.experts.{GATED[spec.activation] if spec.gated else spec.activation}",
            kind="swiglu" if spec.gated else "activation",
            inputs=inputs,
            outputs=(tensor("e_p", "Dx"),),
            saves=inputs,
        ),
        _grouped("mlp.experts.down", "e_p", (tensor("made", f"D{width}"),), back),
    )


def _grouped(name: str, source: str, outputs: tuple[TensorDesc, ...], parameters: tuple[Parameter, ...]) -> Op:
    return Op(
        name=name,
        kind="experts",
        inputs=(source,),
        outputs=outputs,
        parameters=parameters,
        saves=(source,),
        scratch_w=(moment(tensor("dw", parameters[0].dims, when="cast")),),
    )


def _combine(width: str, residual: str | None, output: str) -> Op:
    """The copies back to the ranks of their tokens, and summed."""
    return Op(
        name="mlp.combine",
        kind="combine",
        inputs=("made", residual) if residual else ("made",),
        outputs=(tensor(output, f"t{width}"),),
        residual=residual,
        scratch_f=(moment(tensor("sent", f"d{width}", when="ep"), tensor("returned", f"c{width}", when="ep")),),
        scratch_b=(moment(tensor("returned", f"c{width}", when="ep"), tensor("arrived", f"d{width}", when="ep")),),
    )
