"""Every family's config: read back, refused with all its faults, and its features found in the blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shardwise.model.families import FAMILIES
from shardwise.model.hf import KEYS, ModelError, catalog, from_config, load_model, to_config
from shardwise.model.read import Reader
from shardwise.model.spec import Model, Op

CATALOG = catalog()


def changed(name: str, **changes: Any) -> Model:
    return from_config({**to_config(load_model(name)), **changes}, "it")


def faults(name: str, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        changed(name, **changes)
    return "\n".join(caught.value.faults)


def op(model: Model, kind: str, name: str) -> Op:
    return next(o for o in model.block(kind).ops if o.name == name)


@pytest.mark.parametrize("name", CATALOG)
def test_a_model_of_the_catalogue_survives_its_config(name: str) -> None:
    model = load_model(name)
    config = to_config(model)
    assert set(config) <= set(KEYS)
    assert from_config(config, name) == model
    assert from_config(config, "another") != model
    assert hash(from_config(config, name)) == hash(model)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_key_that_is_asked_for_is_known(family: str) -> None:
    """A plan file may hold any of them."""
    own = [to_config(load_model(n)) for n in CATALOG if load_model(n).family == family]
    for config in ({}, *own, {"num_nextn_predict_layers": 1, "use_sliding_window": True}):
        read = Reader(config)
        FAMILIES[family]("it", read)
        assert read.seen <= set(KEYS)


def test_the_catalogue_has_every_family_that_has_sizes_of_its_own() -> None:
    models = {load_model(name).family for name in CATALOG}
    assert models >= set(FAMILIES) - {"mlp", "gemma3", "gemma3_text", "mistral", "qwen2", "olmo2"}


GEMMA_3 = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "sliding_window": 1024,
}


def test_windows_make_kinds() -> None:
    gemma2, gemma3, oss = load_model("gemma-2-2b"), from_config(GEMMA_3, "it"), load_model("gpt-oss-20b")
    assert gemma2.chain[:3] == ("local", "layer", "local")
    assert (op(gemma2, "local", "attention.core").window, op(gemma2, "layer", "attention.core").window) == (4096, None)
    assert Counter(gemma3.chain) == {"local": 29, "layer": 5}
    assert gemma3.chain[:6] == ("local",) * 5 + ("layer",)
    assert oss.chain[:2] == ("local_moe", "moe")
    assert op(oss, "local_moe", "attention.core").window == 128
    mistral = {**to_config(load_model("llama-3.1-8b")), "model_type": "mistral", "sliding_window": 4096}
    assert from_config(mistral, "it").kinds == ("embedding", "local", "head")
    assert from_config({**mistral, "sliding_window": None}, "it").kinds == ("embedding", "layer", "head")
    qwen = {**to_config(load_model("qwen3-0.6b")), "sliding_window": 64, "max_window_layers": 20}
    assert set(from_config(qwen, "it").chain) == {"layer"}
    assert from_config({**qwen, "use_sliding_window": True}, "it").chain == ("layer",) * 20 + ("local",) * 8


def test_layer_types_override_the_pattern() -> None:
    types = ["full_attention"] * 25 + ["sliding_attention"]
    model = changed("gemma-2-2b", layer_types=types)
    assert model.chain == ("layer",) * 25 + ("local",)
    assert model.kinds == ("embedding", "layer", "local", "head")
    assert from_config(to_config(model), "it") == model
    # What says the default says nothing.
    default = ["sliding_attention", "full_attention"] * 13
    assert changed("gemma-2-2b", layer_types=default) == changed("gemma-2-2b")


def test_norms_lie_where_the_family_has_them() -> None:
    names = {
        "llama-3.1-8b": ("attention_norm", "mlp_norm"),
        "gemma-2-2b": ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
    }
    for name, norms in names.items():
        block = load_model(name).blocks[1]
        assert tuple(o.name for o in block.ops if o.kind == "norm") == norms
    olmo2 = from_config({**to_config(load_model("olmo-7b")), "model_type": "olmo2"}, "it")
    norms = [o.name for o in olmo2.block("layer").ops if o.kind == "norm"]
    assert norms == ["attention.q_norm", "attention.k_norm", "attention_post_norm", "mlp_post_norm"]


def test_deepseek_begins_dense_and_ends_with_another_prediction() -> None:
    model = load_model("deepseek-v3")
    assert Counter(model.chain) == {"layer": 3, "moe": 58}
    assert [u.name for u in model.units()][-2:] == ["mtp.0", "head"]
    assert set(model.block("mtp").tied) == {"embedding.weight", "output.weight"}
    without = changed("deepseek-v3", q_lora_rank=None, num_nextn_predict_layers=0, n_shared_experts=0)
    assert "attention.q" in [o.name for o in without.block("moe").ops]
    assert "mtp" not in without.kinds
    assert "s" not in without.sizes
    assert from_config(to_config(without), "it") == without


def test_nemotron_is_read_from_letters_or_from_words() -> None:
    config = to_config(load_model("nemotron-3-nano"))
    pattern = config.pop("hybrid_override_pattern")
    words = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    from_words = from_config({**config, "layers_block_type": [words[c] for c in pattern]}, "it")
    assert from_words == changed("nemotron-3-nano")
    assert "the pattern has 52 layers" in faults("nemotron-3-nano", num_hidden_layers=51)
    assert "a letter a layer" in faults("nemotron-3-nano", hybrid_override_pattern="MX")
    assert "found 'x'" in faults("nemotron-3-nano", hybrid_override_pattern=None, layers_block_type=["x"])


def test_nemotron_predicts_further_tokens_with_its_own_pattern() -> None:
    model = load_model("nemotron-3-super")
    kinds = [o.kind for o in model.block("mtp").ops]
    assert kinds.count("attention") == 1
    assert kinds.count("router") == 1
    assert model.block("mtp").output.dims == "th"


def test_a_looped_model_has_its_parameters_once() -> None:
    once, thrice = changed("llama-3.1-8b"), changed("llama-3.1-8b", num_loops=3)
    assert thrice.parameters == once.parameters
    assert (thrice.layers, len(thrice.chain)) == (96, 32)
    assert sum(u.name.startswith("layers.") for u in thrice.units()) == 96
    assert from_config(to_config(thrice), "it") == thrice
    assert "num_loops: found 0" in faults("llama-3.1-8b", num_loops=0)
    assert "num_loops: found 2, which these blocks do not have" in faults("qwen3-8b", num_loops=2)


def test_gemma_3_is_read_out_of_its_outer_config() -> None:
    outer = {"model_type": "gemma3", "text_config": GEMMA_3}
    assert from_config(outer, "it") == from_config(GEMMA_3, "it")
    with pytest.raises(ModelError, match="vision tower is not supported"):
        from_config({**outer, "vision_config": {"depth": 2}}, "it")
    with pytest.raises(ModelError, match=r"text_config\.vocab_size: found 0"):
        from_config({"model_type": "gemma3", "text_config": {**GEMMA_3, "vocab_size": 0}}, "it")
    with pytest.raises(ModelError, match="text_config: found 3, wanted a table"):
        from_config({"model_type": "gemma3", "text_config": 3}, "it")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok: found 9, more than the 8 experts"),
        ("mixtral-8x7b", {"num_local_experts": 0}, "num_local_experts: found 0"),
        ("mixtral-8x7b", {"n_shared_experts": 2}, "n_shared_experts: found 2, which these blocks do not have"),
        ("mixtral-8x7b", {"attention_bias": True}, "attention_bias: found True"),
        ("qwen3-8b", {"num_experts": 8}, "num_experts: found 8"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [True]}, "mlp_only_layers: found [True]"),
        ("qwen3-30b-a3b", {"mlp_only_layers": 3}, "mlp_only_layers: found 3"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 0}, "decoder_sparse_step: found 0"),
        (
            "gpt-oss-20b",
            {"layer_types": ["full_attention"]},
            "layer_types: found ['full_attention'], wanted a list of 24",
        ),
        ("gpt-oss-20b", {"layer_types": ["x"] * 24}, "layer_types: found 'x', wanted 'full_attention' or"),
        ("gpt-oss-20b", {"num_experts": 5}, "num_experts: found 5, but num_local_experts says 32"),
        ("gpt-oss-20b", {"sliding_window": 0}, "sliding_window: found 0"),
        ("gemma-2-2b", {"hidden_activation": "silu"}, "hidden_activation: found 'silu'"),
        ("gemma-2-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention: found True"),
        ("deepseek-v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim: 63 is odd"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq: found 2, wanted 1"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias: found True"),
        ("deepseek-v3", {"num_nextn_predict_layers": 99}, "num_nextn_predict_layers: found 99"),
        ("nemotron-3-nano", {"n_groups": 7}, "n_groups: 7 does not divide mamba_num_heads 64"),
        ("nemotron-3-nano", {"mlp_bias": True}, "mlp_bias: found True, wanted False"),
        ("nemotron-3-nano", {"mlp_hidden_act": "silu"}, "mlp_hidden_act: found 'silu'"),
        ("gpt2", {"n_head": 7}, "n_head: 7 heads do not divide the hidden size 768"),
        ("gpt2", {"activation_function": "relu"}, "activation_function: found 'relu'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: found True"),
        ("gpt2", {"hidden_size": 700}, "hidden_size: found 700, but n_embd says 768"),
        ("bloom-176b", {"apply_residual_connection_post_layernorm": True}, "found True, wanted False"),
    ],
)
def test_what_cannot_be_is_refused(name: str, changes: dict[str, Any], said: str) -> None:
    assert said in faults(name, **changes)


PUBLISHED: dict[str, dict[str, Any]] = {
    "bloom-176b": {"n_embed": 14336, "num_attention_heads": 112, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "deepseek-v3": {
        "attention_bias": False,
        "moe_layer_freq": 1,
        "num_key_value_heads": 128,
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rope_scaling": {"type": "yarn", "factor": 40},
        "topk_method": "noaux_tc",
    },
    "gemma-2-9b": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attention_dropout": 0.0,
    },
    "gpt-oss-20b": {
        "experts_per_token": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "quantization_config": {"quant_method": "mxfp4"},
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
        "swiglu_limit": 7.0,
    },
    "gpt2": {"n_ctx": 1024, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "architectures": ["GPT2LMHeadModel"]},
    "llama-2-7b": {"pretraining_tp": 1, "rope_scaling": None, "torch_dtype": "float16"},
    "mixtral-8x7b": {"sliding_window": None, "router_aux_loss_coef": 0.02, "output_router_logits": False},
    "nemotron-3-nano": {
        "expand": 2,
        "mlp_bias": False,
        "n_shared_experts": 1,
        "norm_eps": 1e-5,
        "num_hidden_layers": 52,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
    },
    "olmo-7b": {"clip_qkv": None, "attention_bias": False},
    "qwen3-8b": {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False},
    "qwen3-30b-a3b": {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "sliding_window": None},
}
"""What the publishers' files say beside the sizes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_else_the_published_files_say_makes_no_other_model(name: str) -> None:
    assert changed(name, **PUBLISHED[name]) == changed(name)


def test_a_missing_query_rank_is_asked_for() -> None:
    config = to_config(load_model("deepseek-v2"))
    del config["q_lora_rank"]
    with pytest.raises(ModelError, match="q_lora_rank: missing"):
        from_config(config, "it")


def test_all_faults_of_a_family_come_at_once() -> None:
    said = faults("deepseek-v3", vocab_size=-1, num_experts_per_tok=10**6, qk_rope_head_dim=1.5, hidden_act="gelu")
    for key in ("vocab_size", "num_experts_per_tok", "qk_rope_head_dim", "hidden_act"):
        assert f"{key}: " in said


def test_matrices_for_the_whiteboard() -> None:
    plain, gated = load_model("mlp:D=16384,F=53248,L=126"), load_model("mlp:D=64,F=256,L=2,G=1,V=100")
    assert plain.parameters == 126 * 2 * 16384 * 53248
    assert gated.parameters == 2 * 3 * 64 * 256 + 2 * 100 * 64 + 64
    assert [o.kind for o in plain.block("layer").ops] == ["linear", "linear"]
    assert plain.parameters_of("embedding") == plain.parameters_of("head") == 0
    assert from_config(to_config(gated), gated.name) == gated
    assert load_model("gpt: L=2, h=64, a=4").parameters == load_model("gpt:L=2,h=64,a=4").parameters


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mlp:", "'': wanted letter=size, with a letter of D, F, L, G, V"),
        ("mlp:D=-1,F=2,L=3", "D: found -1, wanted a whole number from 1 to 16,777,216"),
        ("mlp:D=1,F=nan,L=3", "F: found 'nan', wanted a whole number"),
        ("mlp:D=1,F=1e3,L=3", "F: found '1e3'"),
        ("mlp:D=1,F=2,L=99999", "L: found 99999, wanted a whole number from 1 to 4,096"),
        ("mlp:D=1,F=2,L=3,G=2", "G: found 2, wanted a whole number from 0 to 1"),
        ("mlp:D=1,F=2,L=3,W=4", "'W=4': wanted letter=size"),
        ("mlp:D=1,D=1,F=2,L=3", "D: is there more than once"),
        ("mlp:D=" + "9" * 5000, "D: found '9999"),
        ("mlp:" + "D=1," * 5000, "D: is there more than once"),
        ("gpt:L=2,h=65,a=4", "a: 4 heads do not divide the hidden size 65"),
        ("gpt:L=2,h=64", "a: found nothing"),
    ],
)
def test_sizes_that_cannot_be(spec: str, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(spec)
    assert said in "\n".join(caught.value.faults)


def test_the_faults_of_a_whiteboard_model_come_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        load_model("mlp:D=0,F=x,Q=1")
    assert len(caught.value.faults) == 4  # D, F, Q and the missing L
