"""Parameter counts against those of the models' Hugging Face classes."""

from __future__ import annotations

import pytest

from shardwise.model.hf import from_config, load_model

pytestmark = pytest.mark.golden


@pytest.mark.parametrize(
    ("size", "parameters"), [("8b", 8_030_261_248), ("70b", 70_553_706_496), ("405b", 405_853_388_800)]
)
def test_llama_3(size: str, parameters: int) -> None:
    assert load_model(f"llama-3.1-{size}").parameters == parameters


def test_llama_2() -> None:
    shape = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
    assert from_config(shape, "llama-2-7b").parameters == 6_738_415_616
