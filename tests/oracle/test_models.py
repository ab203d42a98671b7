"""Parameter counts of random small models against those of transformers' own classes, to the unit.

The classes are built on the meta device: shapes without memory. One generator a family, seeded.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.account.compute import CONVENTIONS, flops_per_token
from shardwise.model.families import FAMILIES
from shardwise.model.hf import catalog, from_config, load_model, to_config

pytestmark = pytest.mark.oracle

transformers = pytest.importorskip("transformers")

ROUNDS = 12
BIAS = "e_score_correction_bias"
"""What balances a router's load without a loss: a buffer, no parameter."""
Draw = random.Random
Config = dict[str, Any]


def plain(draw: Draw, head_dim: bool = True) -> Config:
    """Sizes that most families share."""
    kv_heads = draw.choice([1, 2, 3])
    heads = kv_heads * draw.choice([1, 2, 4])
    dim = draw.choice([4, 8, 16])
    return {
        "hidden_size": heads * dim * draw.choice([1, 2, 3]) if head_dim else heads * dim,
        "intermediate_size": draw.choice([24, 40, 72]),
        "num_hidden_layers": draw.randint(1, 7),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": draw.randint(30, 120),
        "tie_word_embeddings": draw.random() < 0.5,
    } | ({"head_dim": dim} if head_dim else {})


def llama(draw: Draw) -> Config:
    return plain(draw)


def mistral(draw: Draw) -> Config:
    return plain(draw) | {"sliding_window": draw.choice([None, 8])}


def qwen2(draw: Draw) -> Config:
    windows = {"use_sliding_window": draw.random() < 0.5, "sliding_window": 8, "max_window_layers": draw.randint(0, 4)}
    return plain(draw, head_dim=False) | windows


def qwen3(draw: Draw) -> Config:
    return plain(draw) | {"attention_bias": draw.random() < 0.5}


def olmo(draw: Draw) -> Config:
    return plain(draw, head_dim=False) | {"attention_bias": draw.random() < 0.5, "clip_qkv": draw.choice([None, 8.0])}


def olmo2(draw: Draw) -> Config:
    return plain(draw, head_dim=False) | {"attention_bias": draw.random() < 0.5}


def gemma2(draw: Draw) -> Config:
    config = plain(draw)
    types = draw.choices(["full_attention", "sliding_attention"], k=config["num_hidden_layers"])
    more = {"sliding_window": 8, "attention_bias": draw.random() < 0.5}
    return config | more | ({"layer_types": types} if draw.random() < 0.5 else {})


def gpt2(draw: Draw) -> Config:
    heads = draw.choice([1, 2, 5])
    return {
        "n_embd": heads * draw.choice([4, 8]),
        "n_layer": draw.randint(1, 5),
        "n_head": heads,
        "n_positions": draw.randint(8, 50),
        "n_inner": draw.choice([None, 24]),
        "vocab_size": draw.randint(30, 120),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def bloom(draw: Draw) -> Config:
    heads = draw.choice([1, 2, 5])
    sizes = {"hidden_size": heads * draw.choice([4, 8]), "n_layer": draw.randint(1, 5), "n_head": heads}
    return sizes | {"vocab_size": draw.randint(30, 120), "tie_word_embeddings": draw.random() < 0.5}


def routed(draw: Draw) -> Config:
    experts = draw.choice([2, 4, 6])
    return {"num_experts_per_tok": draw.randint(1, experts), "num_local_experts": experts}


def mixtral(draw: Draw) -> Config:
    return plain(draw) | routed(draw) | {"sliding_window": draw.choice([None, 8])}


def qwen3_moe(draw: Draw) -> Config:
    config = plain(draw) | routed(draw)
    config["num_experts"] = config.pop("num_local_experts")
    return config | {
        "moe_intermediate_size": draw.choice([6, 10]),
        "decoder_sparse_step": draw.choice([1, 2, 3]),
        "mlp_only_layers": draw.choice([None, [0], [0, 2]]),
        "attention_bias": draw.random() < 0.5,
    }


def gpt_oss(draw: Draw) -> Config:
    return plain(draw) | routed(draw) | {"attention_bias": draw.random() < 0.8, "sliding_window": 8}


def deepseek(draw: Draw) -> Config:
    config = plain(draw, head_dim=False) | routed(draw)
    del config["num_key_value_heads"]
    config["n_routed_experts"] = config.pop("num_local_experts")
    return config | {
        "moe_intermediate_size": draw.choice([6, 10]),
        "n_shared_experts": draw.choice([1, 2]),
        "first_k_dense_replace": draw.randint(0, 4),
        "q_lora_rank": draw.choice([None, 12]),
        "kv_lora_rank": draw.choice([8, 10]),
        "qk_nope_head_dim": draw.choice([4, 6]),
        "qk_rope_head_dim": draw.choice([2, 4]),
        "v_head_dim": draw.choice([4, 10]),
        # The router chooses groups first, in V3.
        "n_group": 1,
        "topk_group": 1,
    }


def nemotron_h(draw: Draw) -> Config:
    config = plain(draw) | routed(draw)
    config["n_routed_experts"] = config.pop("num_local_experts")
    del config["num_hidden_layers"], config["tie_word_embeddings"]
    groups = draw.choice([1, 2])
    return config | {
        "hybrid_override_pattern": "".join(draw.choices("M*-E", k=draw.randint(1, 8))),
        "mamba_num_heads": groups * draw.choice([2, 3]),
        "mamba_head_dim": draw.choice([4, 6]),
        "ssm_state_size": draw.choice([4, 8]),
        "n_groups": groups,
        "conv_kernel": draw.choice([2, 4]),
        "use_bias": draw.random() < 0.5,
        "use_conv_bias": draw.random() < 0.5,
        "moe_intermediate_size": draw.choice([6, 10]),
        "moe_shared_expert_intermediate_size": draw.choice([8, 12]),
        "moe_latent_size": draw.choice([None, 4]),
    }


GENERATORS: dict[str, Callable[[Draw], Config]] = {
    "bloom": bloom,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gemma2": gemma2,
    "gemma3_text": gemma2,
    "gpt2": gpt2,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "nemotron_h": nemotron_h,
    "olmo": olmo,
    "olmo2": olmo2,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def theirs(config: Config) -> torch.nn.Module:
    """transformers' model, on the meta device."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        values = {k: v for k, v in config.items() if k != "model_type"}
        found = transformers.AutoConfig.for_model(config["model_type"], **values)
        return transformers.AutoModelForCausalLM.from_config(found)


def count(model: torch.nn.Module) -> int:
    """Parameters; those that are tied are one object, and come once."""
    return sum(p.numel() for p in model.parameters())


def test_every_family_has_a_generator() -> None:
    """ "mlp" is ours; gemma3 is gemma3_text inside another table."""
    assert set(GENERATORS) == set(FAMILIES) - {"mlp", "gemma3"}


@pytest.mark.parametrize("family", sorted(GENERATORS))
def test_random_models_have_as_many_parameters(family: str) -> None:
    draw = Draw(family)
    for _ in range(ROUNDS):
        config = {"model_type": family, **GENERATORS[family](draw)}
        model, found = from_config(config, "it"), theirs(config)
        assert model.parameters == count(found), config
        assert model.buffers == sum(b.numel() for n, b in found.named_buffers() if n.endswith(BIAS)), config
        assert from_config(to_config(model), "it") == model
        assert all(flops_per_token(model, 16, c) > 0 for c in CONVENTIONS)


@pytest.mark.parametrize("name", catalog())
def test_models_of_the_catalogue_have_as_many_parameters(name: str) -> None:
    model = load_model(name)
    assert model.parameters == count(theirs(to_config(model)))
