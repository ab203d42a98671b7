"""Bytes that a layer saves for its backward, against closed forms: Korthikanti et al. (2205.05198), section 4.

Their layer is GPT's (34 s b h, with attention scores unless recomputed); ours is Llama's with fused attention, fused
SwiGLU and an explicit save list, so that the terms are ours and how they fall with tensor parallelism is theirs. Rows
of the paper that need GPT's block or selective recomputation cannot be computed yet.
"""

from __future__ import annotations

import pytest

from shardwise.account.units import unit_memory
from shardwise.model.hf import from_config, load_model
from shardwise.model.spec import Cut, Model

pytestmark = pytest.mark.golden

TOKENS = 8192
SIZES = ["8b", "70b", "405b"]


def saved(model: Model, tp: int, sp: bool, recompute: bool = False, tokens: int = TOKENS) -> int:
    return unit_memory(model, "layer", Cut(tokens, tp, sp, compute_bytes=2, accumulate_bytes=4), recompute).saved


def per_token(model: Model) -> tuple[int, int]:
    """(stream, inside the block): two norms' inputs and outputs with their rstd; q k v o, LSE, gate, up and product."""
    h, f, a = model.hidden, model.ffn, model.heads
    q, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return 8 * h + 8, 4 * q + 4 * k + 4 * a + 6 * f


@pytest.mark.parametrize("size", SIZES)
def test_one_rank(size: str) -> None:
    """8h + 4ad + 4kd + 4a + 6f + 8 bytes a token."""
    model = load_model(f"llama-3.1-{size}")
    assert saved(model, 1, sp=False) == TOKENS * sum(per_token(model))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_sequence_parallelism_divides_all_of_it(size: str, tp: int) -> None:
    """Equations 2 and 4: tensor parallelism alone leaves the stream whole (10 of 34 parts), with it all fall by 1/t."""
    model = load_model(f"llama-3.1-{size}")
    stream, inside = per_token(model)
    assert saved(model, tp, sp=False) == TOKENS * (stream + inside // tp)
    assert saved(model, tp, sp=True) * tp == TOKENS * (stream + inside)


def test_a_layer_of_405b() -> None:
    """508 MiB at t = 8 and 8,192 tokens, where keeping gathered inputs (DTensor) would cost 448 MiB more."""
    assert saved(load_model("llama-3.1-405b"), 8, sp=True) / 2**20 == pytest.approx(508, abs=0.6)


@pytest.mark.parametrize("tp", [1, 8])
def test_full_recomputation_keeps_the_input(tp: int) -> None:
    """2 s b h (table 2): 50,331,648 bytes a layer of GPT-3, 2,048 tokens; a t-th where the stream is cut."""
    shape = {
        "model_type": "llama",
        "hidden_size": 12288,
        "intermediate_size": 32768,
        "num_hidden_layers": 96,
        "num_attention_heads": 96,
        "vocab_size": 51200,
    }
    model = from_config(shape, "gpt-3-sized")
    assert saved(model, tp, sp=False, recompute=True, tokens=2048) == 50_331_648
    assert saved(model, tp, sp=tp > 1, recompute=True, tokens=2048) * tp == 50_331_648
