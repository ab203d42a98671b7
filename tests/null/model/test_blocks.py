"""The declared blocks of every model of the catalogue: well formed, cut by tp, and as large as by hand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from shardwise.account.compute import unit_flops, values_of
from shardwise.account.units import unit_memory
from shardwise.model.hf import catalog, from_config, load_model, to_config
from shardwise.model.spec import EMBEDDING, Block, Cut, Model, TensorDesc

CATALOG = [*catalog(), "mlp:D=1024,F=4096,L=4", "mlp:D=1024,F=4096,L=4,G=1,V=512"]
SEQ = 4096
KINDS_OF_OPS = {
    *("norm", "linear", "attention", "swiglu", "activation", "embed", "cross_entropy", "router", "dispatch"),
    *("experts", "combine", "scan", "conv", "nothing"),
}


def cut(tp: int = 1, **more: Any) -> Cut:
    return Cut(SEQ, tp, tp > 1, 2, 4, **{"seq_len": SEQ, **more})


def blocks() -> list[Any]:
    return [pytest.param(m, b, id=f"{n}-{b.kind}") for n in CATALOG for m in [load_model(n)] for b in m.blocks]


def degrees(model: Model) -> list[int]:
    """Tensor-parallel degrees that cut the model's heads and groups exactly."""
    whole = [model.heads, *([model.ssm_groups] if model.ssm_groups else [])]
    return [tp for tp in (1, 2, 4, 8) if all(n % tp == 0 for n in whole)]


@pytest.mark.parametrize(("model", "block"), blocks())
def test_a_block_is_well_formed(model: Model, block: Block) -> None:
    """Every name is made before it is read, and made once; every letter has a size."""
    made = {d.name for d in block.inputs}
    for op in block.ops:
        assert op.kind in KINDS_OF_OPS
        assert set(op.inputs) <= made, op.name
        outputs = [d.name for d in op.outputs]
        assert made.isdisjoint(outputs), op.name
        made |= set(outputs)
        assert set(op.saves) <= {*op.inputs, *outputs}, op.name
        assert op.residual is None or op.residual in (*op.inputs, *outputs)
        assert not (op.gathers or op.reduces) or op.kind in ("linear", "embed")
    tensors = [d for op in block.ops for d in (*op.outputs, *op.keeps)]
    moments = [t for op in block.ops for m in (*op.scratch_f, *op.scratch_b, *op.scratch_w) for t in m.tensors]
    dims = {*"".join(d.dims for d in (*block.inputs, *tensors, *moments, *block.parameters))}
    assert dims <= {*model.sizes, *"TtcdD1"}
    assert not [n for n, times in Counter(op.name for op in block.ops).items() if times > 1]
    assert not [n for n, times in Counter(p.name for p in block.parameters).items() if times > 1]
    assert set(block.tied) <= {p.name for p in block.parameters}


@pytest.mark.parametrize(("model", "block"), blocks())
def test_products_fit_what_they_read_and_make(model: Model, block: Block) -> None:
    """A column product's weights have its outputs' rows and its input's width; a row product's the other way."""
    values = values_of(block)
    for op in block.ops:
        weights = [p for p in op.parameters if p.name.endswith(".weight") and len(p.dims) == 2]
        if op.kind != "linear" or op.name in ("join", "attention.kv_up"):
            continue
        width = values[op.inputs[0]].dims[-1]
        # The latent of kv carries the rotated key beside what the norm and the product see.
        assert {p.dims[1] for p in weights} == {width}, op.name
        assert [p.dims[0] for p in weights] == [d.dims[-1] for d in op.outputs], op.name


@pytest.mark.parametrize("name", CATALOG)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_is_positive_and_falls_with_tensor_parallelism(name: str, recompute: str) -> None:
    model = load_model(name)
    for kind in model.kinds:
        found = [unit_memory(model, kind, cut(tp), recompute) for tp in degrees(model)]
        for memory in found:
            assert min(memory.f_peak, memory.bw_peak, memory.b_peak) > 0
            assert memory.saved >= 0
            assert memory.f_peak >= memory.saved
        # The first cut gives the embedding a partial sum, whole, beside its part of the stream.
        for wide, narrow in pairwise(found[1:] if kind == EMBEDDING else found):
            assert narrow.saved < wide.saved or wide.saved == 0
            assert narrow.f_peak < wide.f_peak
            assert narrow.bw_peak < wide.bw_peak


@pytest.mark.parametrize("name", CATALOG)
def test_ranks_share_the_flops(name: str) -> None:
    """With sequence parallelism nothing is computed twice, but k and v where there are more ranks than kv heads."""
    model = load_model(name)
    for kind in model.kinds:
        whole = unit_flops(model, kind, cut(), SEQ)
        for tp in degrees(model):
            if tp > model.kv_heads or model.vocab % tp:
                continue
            for ep, etp in ((1, 1), (2, 1), (2, 2)):
                part = unit_flops(model, kind, cut(tp, ep=ep, etp=etp), SEQ)
                assert [[tp * x for x in op[1:]] for op in part] == [list(op[1:]) for op in whole]


def saved(model: Model, kind: str, cut: Cut) -> dict[str, int]:
    """Bytes a token that each op keeps: what it saves of its own, each value once."""
    block = model.block(kind)
    values: dict[str, TensorDesc] = values_of(block)
    owners = {op.residual: op.inputs[0] for op in block.ops if op.residual in [d.name for d in op.outputs]}
    seen: set[str] = set()
    found: dict[str, int] = {}
    for op in block.ops:
        names = {owners.get(n, n) for n in op.saves} - seen
        seen |= names
        size = sum(cut.bytes(model, values[n]) for n in names) + sum(cut.bytes(model, k) for k in op.keeps)
        found[op.name] = size // cut.tokens
    return found


def test_what_a_gpt_layer_saves() -> None:
    """32 s b h of Korthikanti et al. (2205.05198, eq. 1) without dropout: 11 h + 19 h + 4 h less three masks; and the
    fp32 statistics of the norms and of attention, which is fused."""
    model = load_model("gpt-3-175b")
    h, a = model.hidden, model.heads
    kept = saved(model, "layer", cut())
    assert sum(kept.values()) == 32 * h + 4 * a + 2 * 8


def test_what_a_latent_attention_saves() -> None:
    """q, k and v as expanded, 2 a (2 (d_n + d_r) + d_v), and the output; the latents and their norms beside."""
    kept = saved(load_model("deepseek-v3"), "moe", cut())
    a, nope, rotary, value = 128, 128, 64, 128
    assert kept["attention.core"] == 2 * a * (2 * (nope + rotary) + 2 * value) + 4 * a
    assert kept["attention.down"] == 2 * 7168
    assert kept["attention.q_norm"] == 2 * 1536 + 4
    assert kept["attention.kv_norm"] == 2 * 576 + 4
    assert kept["attention.q_up"] == 2 * 1536
    assert kept["attention.out"] == 0


def test_what_routed_experts_save() -> None:
    """Mixtral, a token: the copies 2 h K, gate, up and product 6 f K, no output of the experts (its weight is applied
    ahead of the down product), the router's probabilities and the copies' places."""
    kept = saved(load_model("mixtral-8x7b"), "moe", cut())
    h, f, K, E = 4096, 14336, 2, 8
    assert kept["mlp.router"] == 2 * h + 4 * E + 8 * K
    assert kept["mlp.dispatch"] == (8 + 8) * K
    assert kept["mlp.experts.gate_up"] == 2 * h * K
    assert kept["mlp.experts.swiglu"] == (4 * f + 4) * K
    assert kept["mlp.experts.down"] == 2 * f * K
    assert kept["mlp.combine"] == 0


def test_imbalance_multiplies_what_arrives() -> None:
    model = load_model("mixtral-8x7b")
    even, uneven = (saved(model, "moe", cut(ep=8, imbalance=i)) for i in (1.0, 1.5))
    assert uneven["mlp.experts.gate_up"] == 1.5 * even["mlp.experts.gate_up"]
    assert uneven["mlp.router"] == even["mlp.router"]


def test_what_a_mamba_layer_saves() -> None:
    """Per token: the convolution's input and output, dt, the gate and what the scan and the norm make."""
    kept = saved(load_model("nemotron-3-nano"), "mamba", cut())
    inner, groups, state, heads = 4096, 8, 128, 64
    wide = inner + 2 * groups * state
    assert kept["mixer.conv"] == 2 * wide
    assert kept["mixer.scan"] == 2 * (wide + heads + inner) + 4 * heads
    assert kept["mixer.norm"] == 2 * inner + 4 * groups
    assert kept["mixer.out"] == 2 * inner


def test_weights_without_a_cut_dim_are_those_that_every_rank_keeps() -> None:
    """Norms, router, latents and MLA's down products are whole on each rank (Megatron-LM keeps them so)."""
    whole = {p.name for p in load_model("deepseek-v3").block("moe").parameters if p.tp_dim is None and not p.expert}
    assert whole == {
        "attention_norm.weight",
        "mlp_norm.weight",
        "attention.q_down.weight",
        "attention.kv_down.weight",
        "attention.q_norm.weight",
        "attention.kv_norm.weight",
        "mlp.router.weight",
    }
    latent = {p.name for p in load_model("nemotron-3-super").block("moe").parameters if p.tp_dim is None}
    assert {"mlp.latent_down.weight", "mlp.latent_up.weight"} <= latent


def test_norms_of_single_heads_have_a_part_of_their_gradient_on_every_rank() -> None:
    qwen = load_model("qwen3-8b").block("layer")
    olmo2 = from_config({**to_config(load_model("olmo-7b")), "model_type": "olmo2"}, "it").block("layer")
    partial = {p.name for p in qwen.parameters if p.partial}
    assert partial == {"attention.q_norm.weight", "attention.k_norm.weight"}
    assert not [p for p in olmo2.parameters if p.partial]
    assert {p.dims for p in olmo2.parameters if p.name.endswith(("q_norm.weight", "k_norm.weight"))} == {"q", "k"}
