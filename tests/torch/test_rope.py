"""Rotary tables: Llama 3.1's stretched wavelengths, by the three cases of its published configuration; two bases; and
what is planned only."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.model.families.forms import planned_only
from shardwise.model.hf import from_config, load_model, to_config
from shardwise.train.nn import rope_tables


def stretched(frequency: float) -> float:
    """factor 8, low 1, high 4 over an original context of 8,192: long waves are stretched, short ones kept."""
    wavelength = 2 * math.pi / frequency
    if wavelength > 8192 / 1:
        return frequency / 8
    if wavelength < 8192 / 4:
        return frequency
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


def test_llama_31_frequencies() -> None:
    model = load_model("llama-3.1-8b")
    (cos,), (sin,) = rope_tables(model, 4, torch.float64)
    assert cos.shape == sin.shape == (4, 1, 64)
    wanted = [stretched(500000.0 ** (-2 * i / 128)) for i in range(64)]
    assert any(w != 500000.0 ** (-2 * i / 128) for i, w in enumerate(wanted))
    for position in range(4):
        angles = torch.tensor([position * w for w in wanted], dtype=torch.float64)
        assert torch.allclose(cos[position, 0], angles.cos(), rtol=0, atol=1e-12)
        assert torch.allclose(sin[position, 0], angles.sin(), rtol=0, atol=1e-12)


GEMMA_3 = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
}
BASES = {"rope_theta": 2e5, "rope_local_base_freq": 300.0}
NESTED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 2e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
}


@pytest.mark.parametrize(
    ("keys", "bases"), [({}, (1e6, 1e4)), (BASES, (2e5, 300.0)), (NESTED, (2e5, 300.0))], ids=["none", "old", "new"]
)
def test_gemma_3_turns_its_local_layers_by_a_base_of_their_own(
    keys: dict[str, object], bases: tuple[float, float]
) -> None:
    """In the keys of either version of Hugging Face's library; and read back from what is remembered."""
    model = from_config(GEMMA_3 | keys, "it")
    for it in (model, from_config(to_config(model), "it")):
        cos, _ = rope_tables(it, 3, torch.float64)
        wanted = [[math.cos(2 * base ** (-i / 4)) for i in range(4)] for base in bases]
        assert torch.allclose(cos[:, 2, 0], torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)
        assert not planned_only(it)


QWEN = {k: v for k, v in GEMMA_3.items() if k != "model_type"} | {"model_type": "qwen3"}
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (QWEN | {"rope_scaling": STRETCHED}, "'yarn'"),
        (QWEN | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (QWEN | {"rope_parameters": STRETCHED | {"rope_type": "longrope"}}, "'longrope'"),
        (GEMMA_3 | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "'yarn'"),
        (GEMMA_3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}}, "'linear'"),
        (QWEN | {"model_type": "olmo", "head_dim": None, "clip_qkv": 8.0}, "clip_qkv: 8"),
    ],
)
def test_what_is_planned_only_is_named_and_remembered(config: dict[str, object], said: str) -> None:
    model = from_config(config, "it")
    for it in (model, from_config(to_config(model), "it")):
        (found,) = planned_only(it)
        assert said in found


def test_what_runs_has_no_reason_against_it() -> None:
    assert not planned_only(from_config(QWEN, "it"))
    assert not planned_only(load_model("llama-3.1-8b"))
