"""The blocks of the llama family: ops, what each saves, its edges and its working memory.

`train/nn.py` writes the same blocks once by hand and asks for its edges by op name; a registry test compares the two,
op by op. Working memory (`scratch`) describes `train/ops.py`; the proof holds it to the measured peak.
"""

from __future__ import annotations

from shardwise.model.spec import Block, Op, Parameter, Role, Scratch, TensorDesc

A, I = Role.ACCUMULATE, Role.INDEX


def _t(name: str, dims: str, role: str = Role.COMPUTE, when: str = "") -> TensorDesc:
    return TensorDesc(name, dims, role, when)


def _moment(*tensors: TensorDesc, outputs: bool = True) -> Scratch:
    return Scratch(tensors, outputs)


def _norm(name: str, source: str, output: str, residual: str | None) -> Op:
    """RMS norm of the stream; it hands its input on as the residual, so that no gradient is summed outside an op."""
    outputs = (_t(output, "th"),) + ((_t(residual, "th"),) if residual else ())
    rows = (_t("weight", "h", A, "cast"), _t("dw", "h", A), _t("mean", "t", A))
    return Op(
        name=name,
        kind="norm",
        inputs=(source,),
        outputs=outputs,
        parameters=(Parameter(f"{name}.weight", "h"),),
        saves=(source,),
        keeps=(_t("rstd", "t1", A),),
        residual=residual,
        scratch_f=(_moment(_t("y", "th", A, "cast")),),
        scratch_b=(
            _moment(_t("normed", "th", A), _t("g", "th", A), *rows, outputs=False),
            _moment(_t("g", "th", A, "cast"), *rows),
        ),
    )


def _column(name: str, source: str, outputs: tuple[TensorDesc, ...], parameters: tuple[Parameter, ...]) -> Op:
    """Products of one gathered input; the shard is saved and gathered again for the weight gradients."""
    widest = max(parameters, key=lambda p: "1kqfv".index(p.dims[0]))
    return Op(
        name=name,
        kind="linear",
        inputs=(source,),
        outputs=outputs,
        parameters=parameters,
        saves=(source,),
        gathers=True,
        scratch_f=(_moment(_t("x", "Th", when="sp")),),
        scratch_b=(_moment(_t("dx", "Th", when="sp")),),
        scratch_w=(_moment(_t("x", "Th", when="sp"), _t("dw", widest.dims)),),
    )


def _row(name: str, source: str, residual: str, output: str, parameter: Parameter) -> Op:
    """A product whose partial sums are reduced into the stream, and the residual added."""
    return Op(
        name=name,
        kind="linear",
        inputs=(source, residual),
        outputs=(_t(output, "th"),),
        parameters=(parameter,),
        saves=(source,),
        reduces=True,
        residual=residual,
        scratch_f=(_moment(_t("partial", "Th", when="sp")),),
        scratch_b=(_moment(_t("dy", "Th", when="sp")),),
        scratch_w=(_moment(_t("dy", "Th", when="sp"), _t("dw", parameter.dims)),),
    )


def embedding() -> Block:
    """Vocabulary-parallel embedding: each rank looks up its rows, partial sums are reduced into the stream."""
    rows = (_t("local", "T", I, "tp"), _t("outside", "T", Role.MASK, "tp"))
    op = Op(
        name="",
        kind="embed",
        inputs=("ids",),
        outputs=(_t("x", "th"),),
        parameters=(Parameter("weight", "vh"),),
        saves=("ids",),
        reduces=True,
        scratch_f=(_moment(_t("partial", "Th", when="sp"), *rows),),
        scratch_w=(
            _moment(_t("dy", "Th", when="sp"), _t("dy", "Th", A), _t("row", "T", I), _t("shard", "T", I), *rows),
        ),
    )
    return Block("embedding", (_t("ids", "T", I),), (op,))


def layer() -> Block:
    """Pre-norm attention with grouped kv heads, and SwiGLU."""
    attention = Op(
        name="attention.core",
        kind="attention",
        inputs=("q", "k", "v"),
        outputs=(_t("o", "Tq"),),
        saves=("q", "k", "v", "o"),
        keeps=(_t("lse", "Ta", A),),
        scratch_f=(_moment(_t("half", "Tr"), outputs=False),),
        scratch_b=(_moment(_t("half", "Tr")),),
    )
    swiglu = Op(
        name="mlp.swiglu",
        kind="swiglu",
        inputs=("gate", "up"),
        outputs=(_t("p", "Tf"),),
        saves=("gate", "up"),
    )
    ops = (
        _norm("attention_norm", "x", "n1", "r1"),
        _column(
            "attention.qkv",
            "n1",
            (_t("q", "Tq"), _t("k", "Tk"), _t("v", "Tk")),
            tuple(Parameter(f"attention.{n}.weight", d) for n, d in (("q", "qh"), ("k", "kh"), ("v", "kh"))),
        ),
        attention,
        _row("attention.out", "o", "r1", "x2", Parameter("attention.out.weight", "hq")),
        _norm("mlp_norm", "x2", "n2", "r2"),
        _column(
            "mlp.gate_up",
            "n2",
            (_t("gate", "Tf"), _t("up", "Tf")),
            tuple(Parameter(f"mlp.{n}.weight", "fh") for n in ("gate", "up")),
        ),
        swiglu,
        _row("mlp.down", "p", "r2", "y", Parameter("mlp.down.weight", "hf")),
    )
    return Block("layer", (_t("x", "th"),), ops, recomputable=True)


def head(tied: bool) -> Block:
    """Final norm, output product, vocabulary-parallel cross-entropy, which leaves its gradient in the logits' place."""
    names = ("top", "picked", "total", "weight", "negative")
    rows = (
        *(_t(name, "T", A) for name in names),
        _t("local", "T", I),
        _t("own", "T", A, "tp"),
        _t("outside", "T", Role.MASK, "tp"),
    )
    loss = Op(
        name="loss",
        kind="cross_entropy",
        inputs=("logits",),
        outputs=(_t("loss", "1", A),),
        saves=("logits",),
        scratch_f=(_moment(_t("z", "Tv", A, "cast"), *rows),),
    )
    ops = (
        _norm("norm", "x", "n", None),
        _column("output", "n", (_t("logits", "Tv"),), (Parameter("output.weight", "vh"),)),
        loss,
    )
    return Block("head", (_t("x", "th"),), ops, tied=("output.weight",) if tied else ())
