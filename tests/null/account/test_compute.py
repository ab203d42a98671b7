"""FLOPs and bytes moved, by hand on small sizes."""

from __future__ import annotations

import pytest

from shardwise.account.compute import KINDS, flops_per_token, mean_context, unit_flops, unit_work
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


@pytest.mark.parametrize("kind", KINDS)
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
