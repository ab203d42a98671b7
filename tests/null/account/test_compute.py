"""FLOPs and bytes moved, by hand on small sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from shardwise.account.compute import (
    CONVENTIONS,
    Product,
    describe,
    flops_per_token,
    mean_context,
    unit_flops,
    unit_work,
)
from shardwise.model.hf import catalog, from_config, load_model, to_config
from shardwise.model.spec import Cut
from tests.support.models import tiny

MODEL = tiny()  # h 32, 8 heads of 4, ffn 48, vocab 40
SEQ = 16


def cut(tp: int = 1, sp: bool = False, mb: int = 1) -> Cut:
    return Cut(tokens=mb * SEQ, tp=tp, sp=sp, compute_bytes=2, accumulate_bytes=4)


def test_a_layer_by_hand() -> None:
    by_name = {op.name: op for op in unit_flops(MODEL, "layer", cut(), SEQ)}
    tokens, h, q, f = SEQ, 32, 32, 48
    qkv, core = 2 * tokens * h * 3 * q, 4 * tokens * q * (SEQ + 1) / 2
    assert (by_name["attention.qkv"].f, by_name["attention.qkv"].b, by_name["attention.qkv"].w) == (qkv, qkv, qkv)
    assert (by_name["attention.core"].f, by_name["attention.core"].b, by_name["attention.core"].w) == (
        core,
        2.5 * core,
        0,
    )
    assert by_name["mlp.gate_up"].f == 2 * tokens * h * 2 * f
    assert by_name["mlp.down"].w == 2 * tokens * f * h
    assert sum(by_name["mlp.swiglu"][1:]) == sum(by_name["mlp_norm"][1:]) == 0


def test_model_flops_of_a_token() -> None:
    h, f, v = 32, 48, 40
    products = MODEL.layers * (4 * h * h + 3 * h * f) + h * v
    attention = MODEL.layers * 4 * h * (SEQ + 1) / 2
    assert flops_per_token(MODEL, SEQ) == 6 * products + 3 * attention
    assert mean_context(1) == 1


@pytest.mark.parametrize("kind", MODEL.kinds)
@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallel_ranks_share_the_products(kind: str, sp: bool) -> None:
    whole, quarter = (unit_flops(MODEL, kind, c, SEQ) for c in (cut(), cut(tp=4, sp=sp)))
    assert [op[1:] for op in whole] == [tuple(4 * x for x in op[1:]) for op in quarter]


def test_bytes_of_the_memory_bound_kernels() -> None:
    """bf16, per token: a norm reads and writes 4 h, and 6 h backward, with 2 h for the residual's gradient."""
    by_name = {op.name: op.moved for op in unit_work(MODEL, "layer", cut(), SEQ)}
    tokens, h, q, f = SEQ, 32, 32, 48
    assert [m.bytes for m in by_name["mlp_norm"]] == [4 * h * tokens, 8 * h * tokens, 0]
    assert [m.bytes for m in by_name["mlp.swiglu"]] == [6 * f * tokens, 10 * f * tokens, 0]
    assert [m.bytes for m in by_name["attention.core"]] == [8 * q * tokens, 8 * q * tokens, 0]
    assert [m.bytes for m in by_name["mlp.down"]] == [6 * h * tokens, 0, 10 * f * h]
    head = {op.name: op.moved for op in unit_work(MODEL, "head", cut(), SEQ)}
    assert [m.bytes for m in head["norm"]][:2] == [4 * h * tokens, 6 * h * tokens]
    assert [m.bytes for m in head["loss"]] == [34 * 40 * tokens, 4 * 40 * tokens, 0]


def test_sequence_parallelism_cuts_the_norms() -> None:
    norm, cut_norm = (unit_work(MODEL, "layer", cut(tp=4, sp=sp), SEQ)[0].moved for sp in (False, True))
    assert norm[0].bytes == 4 * cut_norm[0].bytes


def test_experts_by_hand() -> None:
    """Of 8 experts each rank of 4 holds 2; its copies are those of its own tokens, wherever they come from."""
    model = load_model("mixtral-8x7b")
    h, x, tokens = 4096, 14336, SEQ
    by_name = {op.name: op for op in unit_work(model, "moe", replace(cut(), ep=4), SEQ)}
    assert by_name["mlp.router"].products == (Product(tokens, 8, h),)
    assert by_name["mlp.experts.gate_up"].products == (Product(2 * tokens, x, h, 2),) * 2
    assert by_name["mlp.experts.down"].products == (Product(2 * tokens, h, x, 2),)
    # Gathered over expert-tp: twice the copies, half the width.
    cut_twice = {op.name: op for op in unit_work(model, "moe", replace(cut(), ep=4, etp=2), SEQ)}
    assert cut_twice["mlp.experts.down"].products == (Product(4 * tokens, h, x // 2, 2),)
    slow = {op.name: op for op in unit_work(model, "moe", replace(cut(), ep=4, imbalance=1.25), SEQ)}
    assert slow["mlp.experts.down"].products[0].tokens == 2.5 * tokens


def test_a_latent_attention_by_hand() -> None:
    """2 [h r_q + r_q a (d_n + d_r) + h (r + d_r) + r a (d_n + d_v) + a d_v h], core 2 a (d_n + d_r + d_v) a key."""
    model = load_model("deepseek-v3")
    h, r_q, r, a, nope, rotary, value = 7168, 1536, 512, 128, 128, 64, 128
    by_name = {op.name: op.f / SEQ for op in unit_flops(model, "layer", cut(), SEQ)}
    products = h * r_q + r_q * a * (nope + rotary) + h * (r + rotary) + r * a * (nope + value) + a * value * h
    attention = {n: f for n, f in by_name.items() if n.startswith("attention.")}
    core = attention.pop("attention.core")
    assert sum(attention.values()) == 2 * products
    assert core == 2 * a * (nope + rotary + value) * mean_context(SEQ)


def test_latents_are_gathered_ahead_of_the_up_products() -> None:
    """Under sequence parallelism the down products see a part of the tokens, the up products a part of the heads."""
    work = {op.name: op for op in unit_work(load_model("deepseek-v3"), "layer", cut(tp=4, sp=True), SEQ)}
    assert work["attention.down"].products[0] == Product(SEQ // 4, 1536, 7168)
    assert work["attention.q_up"].products[0] == Product(SEQ, 128 * 192 // 4, 1536)
    alone = {op.name: op for op in unit_work(load_model("deepseek-v3"), "layer", cut(tp=4), SEQ)}
    assert alone["attention.down"].products[0].tokens == SEQ


def test_a_scan_has_no_weight_gradient() -> None:
    """And twice its forward in the backward; attention two and a half times."""
    for kind, name, factor in (
        ("mamba", "mixer.scan", 2),
        ("mamba", "mixer.conv", 2),
        ("attention", "attention.core", 2.5),
    ):
        op = next(op for op in unit_flops(load_model("nemotron-3-nano"), kind, cut(), SEQ) if op.name == name)
        assert (op.b, op.w) == (factor * op.f, 0)


def test_biases_are_no_products() -> None:
    names = {op.name: len(op.products) for op in unit_work(load_model("gpt-oss-20b"), "moe", cut(), SEQ)}
    assert (names["attention.qkv"], names["mlp.router"], names["mlp.experts.gate_up"]) == (3, 1, 2)


def test_without_rotation_attention_carries_nothing() -> None:
    core = {op.name: op for op in unit_work(load_model("gpt2"), "layer", cut(), SEQ)}["attention.core"]
    assert [m.bytes for m in core.moved] == [0, 0, 0]


def test_a_loop_runs_its_chain_again() -> None:
    looped = from_config({**to_config(MODEL), "num_loops": 3}, "it")
    head = 6 * 32 * 40
    assert flops_per_token(looped, SEQ) - head == 3 * (flops_per_token(MODEL, SEQ) - head)


@pytest.mark.parametrize("name", catalog())
def test_columns_are_the_numbers_one_by_one(name: str) -> None:
    """A cut of columns gives, place by place, what the single cuts give."""
    model = load_model(name)
    degrees = [(1, 0, 1, 1), (2, 0, 1, 1), (2, 1, 2, 1), (2, 1, 2, 2)]
    tp, sp, ep, etp = (np.array(column) for column in zip(*degrees, strict=True))
    columns = Cut(SEQ, tp, sp, 2, 4, ep=ep, etp=etp, imbalance=1.2)
    for kind in model.kinds:
        together = unit_work(model, kind, columns, SEQ)
        for i, (t, s, e, x) in enumerate(degrees):
            alone = unit_work(model, kind, Cut(SEQ, t, bool(s), 2, 4, ep=e, etp=x, imbalance=1.2), SEQ)
            for many, one in zip(together, alone, strict=True):
                assert [at(p.flops, i) for p in many.products] == [p.flops for p in one.products]
                assert at(many.core_b_flops, i) == one.core_b_flops
                assert [at(m.bytes, i) for m in many.moved] == [m.bytes for m in one.moved]


def at(value: object, i: int) -> object:
    return value[i] if isinstance(value, np.ndarray) else value


def test_a_description_is_plain() -> None:
    found = describe(load_model("nemotron-3-super"), SEQ)
    assert json.loads(json.dumps(found)) == found
    assert set(found["flops_per_token"]) == set(CONVENTIONS)
    units = sum(kind["units"] * kind["parameters"] for kind in found["kinds"].values())
    assert units == found["parameters"] + found["mtp_parameters"]


def test_a_convention_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="wanted one of exact, megatron"):
        flops_per_token(MODEL, SEQ, "mine")
