"""The Mamba-2 mixer (Dao and Gu 2405.21060), as Nemotron-H has it: groups of heads share B and C."""

from __future__ import annotations

from shardwise.model.blocks import A, Body, column, moment, row, tensor, weight
from shardwise.model.spec import Op, Parameter


def mamba(bias: bool = False, conv_bias: bool = True) -> Body:
    """in -> convolution -> scan -> gated norm -> out. `bias`: of the in and out products.

    Heads, and the groups with them, are cut by tensor parallelism; the norm is one over each group, so no sum crosses
    ranks. The states at the ends of the chunks are made again in the backward, as the published kernels do.
    """

    def body(source: str, residual: str | None, output: str) -> tuple[Op, ...]:
        into = tuple(p for n, d in (("gate", "ih"), ("xbc", "mh"), ("dt", "nh")) for p in weight(f"mixer.{n}", d, bias))
        return (
            column(
                "mixer.in", tensor(source, "th"), (tensor("z", "Ti"), tensor("xbc", "Tm"), tensor("dt", "Tn")), into
            ),
            Op(
                name="mixer.conv",
                kind="conv",
                inputs=("xbc",),
                outputs=(tensor("u", "Tm"),),
                parameters=weight("mixer.conv", "mW", conv_bias),
                saves=("xbc",),
            ),
            _scan(),
            _gated_norm(),
            row("mixer.out", "g", residual, output, weight("mixer.out", "hi", bias)),
        )

    return body


def _scan() -> Op:
    """Saves what goes in and what comes out, and the running sums of dt A."""
    states = moment(tensor("states", "TG", A))
    return Op(
        name="mixer.scan",
        kind="scan",
        inputs=("u", "dt"),
        outputs=(tensor("s", "Ti"),),
        parameters=tuple(Parameter(f"mixer.{name}", "n") for name in ("dt_bias", "a_log", "d")),
        saves=("u", "dt", "s"),
        keeps=(tensor("da", "Tn", A),),
        scratch_f=(states,),
        scratch_b=(moment(tensor("states", "TG", A), tensor("dstates", "TG", A)),),
    )


def _gated_norm() -> Op:
    """RMS norm of s * silu(z) in each group."""
    return Op(
        name="mixer.norm",
        kind="norm",
        inputs=("s", "z"),
        outputs=(tensor("g", "Ti"),),
        parameters=weight("mixer.norm", "i"),
        saves=("s", "z"),
        keeps=(tensor("rstd", "Tg", A),),
        scratch_f=(moment(tensor("y", "Ti", A, "cast")),),
        scratch_b=(moment(tensor("normed", "Ti", A), tensor("g", "Ti", A), outputs=False),),
    )
