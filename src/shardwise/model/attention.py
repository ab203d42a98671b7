"""Attention: with as many or fewer kv heads, and with latents (MLA)."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.model.blocks import RMS, A, Body, Norm, column, inner_norm, moment, replicated, row, tensor, weight
from shardwise.model.spec import Op, Parameter, TensorDesc


@dataclass(frozen=True, slots=True)
class Attention:
    """What a family's attention has beside its sizes.

    `qkv_bias`, `out_bias`: of the products; `qk_norm`: "head" (one weight for every head) or "full" (over all heads),
    of the kind `qk_style`;
    `sinks`: one learned logit a head; `window`: keys that a query sees at most; `rotary`: q and k are rotated in place.
    `capped`: a soft cap on the scores, inside the kernel.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str = ""
    sinks: bool = False
    window: int | None = None
    rotary: bool = True
    capped: bool = False
    qk_style: Norm = RMS


def attention(spec: Attention) -> Body:
    """Multi-head attention, with as many or fewer kv heads."""

    def body(source: str, residual: str | None, output: str) -> tuple[Op, ...]:
        qkv = tuple(
            p for n, d in (("q", "qh"), ("k", "kh"), ("v", "kh")) for p in weight(f"attention.{n}", d, spec.qkv_bias)
        )
        outputs = (tensor("q", "Tq"), tensor("k", "Tk"), tensor("v", "Tk"))
        norms = _qk_norms(spec.qk_norm, spec.qk_style)
        q, k = (op.outputs[0].name for op in norms) if norms else ("q", "k")
        return (
            column("attention.qkv", tensor(source, "th"), outputs, qkv),
            *norms,
            core((q, k, "v"), "Tq", spec),
            row("attention.out", "o", residual, output, weight("attention.out", "hq", spec.out_bias)),
        )

    return body


def core(inputs: tuple[str, str, str], output: str, spec: Attention) -> Op:
    """Rotation and causal attention; saves q, k, v as rotated, the output and its log-sum-exp."""
    half = (moment(tensor("half", "Tr"), outputs=False),) if spec.rotary else ()
    forward, backward = BLOCKED if spec.window is not None or spec.capped else ((), ())
    return Op(
        name="attention.core",
        kind="attention",
        inputs=inputs,
        outputs=(tensor("o", output),),
        parameters=(Parameter("attention.sinks", "a"),) if spec.sinks else (),
        saves=(*inputs, "o"),
        keeps=(tensor("lse", "Ta", A),),
        window=spec.window,
        scratch_f=(*half, *forward),
        scratch_b=(*((moment(tensor("half", "Tr")),) if spec.rotary else ()), *backward),
    )


def _wide(*names: str) -> tuple[TensorDesc, ...]:
    """Tensors as large as q, or as k where the name begins with k or v."""
    return tuple(tensor(name, "Tk" if name[0] in "kv" else "Tq", A) for name in names)


BLOCKED = (
    (moment(*_wide("q", "k", "v", "scores"), tensor("lse", "Ta", A), outputs=False), moment(*_wide("q"))),
    (moment(*_wide("q", "g", "dq", "k", "v", "kd", "vd", "p", "ds"), tensor("delta", "Ta", A), outputs=False),),
)
"""Working memory of a kernel over blocks of head-dim queries, in forward and backward: wide copies by heads, and scores
of a block, which take as many elements as q (its mask, a byte a score of one head, is left out). Attention with a
window or a cap runs so; else torch's kernel has none."""


def _qk_norms(form: str, style: Norm) -> tuple[Op, ...]:
    """Norms of q and k ahead of the rotation. Over all heads, tensor-parallel ranks must sum their squares."""
    if not form:
        return ()
    found: list[Op] = []
    for name, heads in (("q", "a"), ("k", "b")):
        whole = {"q": "q", "k": "k"}[name]
        parameter = Parameter(f"attention.{name}_norm.weight", "H" if form == "head" else whole, form == "head")
        rstd = f"T{heads}" if form == "head" else "T1"
        normed = tensor(f"{name}n", f"T{whole}")
        found.append(inner_norm(f"attention.{name}_norm", name, normed, parameter, rstd, style))
    return tuple(found)


def latent_attention(query_rank: bool) -> Body:
    """MLA (DeepSeek-V2, 2405.04434, section 2.1): q and kv through latents that tensor parallelism does not cut.

    The latents are gathered ahead of the up products, which are cut by heads; saved are q, k and v as expanded, the
    rotated key of all heads copied into k. `query_rank`: q has a latent of its own.
    """

    def body(source: str, residual: str | None, output: str) -> tuple[Op, ...]:
        k_and_v = (tensor("k", "Tu"), tensor("v", "To"))
        return (
            *_queries(source, query_rank),
            inner_norm("attention.kv_norm", "kl", tensor("kn", "tK"), Parameter("attention.kv_norm.weight", "L"), "t1"),
            column("attention.kv_up", tensor("kn", "tK"), k_and_v, weight("attention.kv_up", "wL")),
            core(("q", "k", "v"), "To", Attention()),
            row("attention.out", "o", residual, output, weight("attention.out", "ho")),
        )

    return body


def _queries(source: str, query_rank: bool) -> tuple[Op, ...]:
    """Both latents, and the queries."""
    q, kl, kv_down = tensor("q", "Tu"), tensor("kl", "tK"), weight("attention.kv_down", "Kh")
    if not query_rank:
        return (
            replicated("attention.down", (source,), (kl,), kv_down),
            column("attention.q", tensor(source, "th"), (q,), weight("attention.q", "uh")),
        )
    down = (*weight("attention.q_down", "Qh"), *kv_down)
    return (
        replicated("attention.down", (source,), (tensor("ql", "tQ"), kl), down),
        inner_norm("attention.q_norm", "ql", tensor("qn", "tQ"), Parameter("attention.q_norm.weight", "Q"), "t1"),
        column("attention.q_up", tensor("qn", "tQ"), (q,), weight("attention.q_up", "uQ")),
    )
