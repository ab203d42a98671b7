"""A tiny model of every family that runs, as transformers' own class has it, and the runtime with the same weights."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from shardwise.collective import Labels
from shardwise.model.hf import from_config
from shardwise.model.spec import Model
from shardwise.plan import runs
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.train.comm import Comm
from shardwise.train.hf_weights import Source, sources
from shardwise.train.rank import Rank, build_rank
from tests.support.models import job

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

SEQ_LEN, BATCH = 24, 4

_PLAIN: Config = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 8.0}
_LOCAL = {"rope_type": "default", "rope_theta": 30.0}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7, "tie_word_embeddings": True}
_ODD = {"num_key_value_heads": 1, "vocab_size": 41}
"""What tensor parallelism copies, and pads."""

_GPT2: Config = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 8,
    "n_positions": 32,
    "vocab_size": 40,
    "tie_word_embeddings": True,
}

CONFIGS: dict[str, Config] = {
    "llama": {"model_type": "llama", **_PLAIN},
    "llama, stretched": {"model_type": "llama", **_PLAIN, "rope_parameters": _LLAMA3},
    "mistral": {"model_type": "mistral", **_PLAIN, "sliding_window": None, "head_dim": 16},
    "mistral, windows": {"model_type": "mistral", **_PLAIN, "sliding_window": 6, "rope_theta": 500.0},
    "qwen2": {"model_type": "qwen2", **_PLAIN, "tie_word_embeddings": True},
    "qwen2, windows": {
        "model_type": "qwen2",
        **_PLAIN,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **_PLAIN, "head_dim": 16},
    "qwen3, biases": {"model_type": "qwen3", **_PLAIN, "head_dim": 8, "attention_bias": True},
    "olmo": {"model_type": "olmo", **{k: v for k, v in _PLAIN.items() if k != "rms_norm_eps"}},
    "olmo2": {"model_type": "olmo2", **_PLAIN},
    "gemma2": {"model_type": "gemma2", **_PLAIN, **_GEMMA},
    "gemma2, low caps": {
        "model_type": "gemma2",
        **_PLAIN,
        **_GEMMA,
        "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 0.5,
    },
    "gemma3_text": {"model_type": "gemma3_text", **_PLAIN, **_GEMMA, "sliding_window_pattern": 2},
    "gemma3_text, stretched": {
        "model_type": "gemma3_text",
        **_PLAIN,
        **_GEMMA,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _LOCAL},
    },
    "qwen2, one kv head": {"model_type": "qwen2", **_PLAIN, **_ODD, "tie_word_embeddings": True},
    "qwen3, biases, one kv head": {"model_type": "qwen3", **_PLAIN, **_ODD, "head_dim": 8, "attention_bias": True},
    "olmo2, one kv head": {"model_type": "olmo2", **_PLAIN, **_ODD},
    "gemma2, low caps, one kv head": {
        "model_type": "gemma2",
        **_PLAIN,
        **_ODD,
        **_GEMMA,
        "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 0.5,
    },
    "gpt2, odd vocabulary": {**_GPT2, "vocab_size": 41},
    "gpt2": _GPT2,
    "gpt2, untied, exact GELU": {**_GPT2, "tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 80},
}


def named() -> list[Any]:
    """Every config as a test's parameter; one whose family is planned only is skipped, by the rule's own list."""

    def param(name: str) -> Any:
        planned = CONFIGS[name]["model_type"] not in runs.FAMILIES
        return pytest.param(name, marks=[pytest.mark.skip(reason="planned only")] if planned else [])

    return [param(name) for name in CONFIGS]


class Exact(TorchFunctionMode):
    """transformers' classes take norms, softmax and rotations in float32 whatever the model's dtype; inside this mode
    in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        swap = {torch.float32: torch.float64}
        args = tuple(swap.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: swap.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def reference(config: Config, dtype: torch.dtype, seed: int = 3) -> Any:
    """transformers' model with random weights, norms and biases among them, of a size that makes all of them matter."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A padding token's embedding would get no gradient.
        given = {**{k: v for k, v in config.items() if k != "model_type"}, "pad_token_id": None}
        parsed = transformers.AutoConfig.for_model(config["model_type"], **given, attn_implementation="eager")
        made = transformers.AutoModelForCausalLM.from_config(parsed, attn_implementation="eager")
    gemma = config["model_type"].startswith("gemma")  # its norms multiply by 1 + weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.15
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * spread + (parameter.ndim == 1 and not gemma))
    return made.to(dtype).eval()


def model_of(config: Config) -> Model:
    return from_config(config, "it")


def value_of(source: Source, state: Tensors) -> torch.Tensor:
    """A logical parameter out of a state dict (or a dict of gradients) in Hugging Face's layout."""
    stored = state[source.key]
    whole = stored.t() if source.transposed else stored
    return whole.chunk(source.parts)[source.part].contiguous()


def job_of(config: Config, layout: Layout, precision: str) -> Job:
    return job(model_of(config), f"{layout.world_size}xcpu", seq_len=SEQ_LEN, batch=BATCH, precision=precision)


def runtime(work: Job, layout: Layout, comm: Comm, state: Tensors) -> Rank:
    """A rank of the runtime that holds these weights."""
    rank = build_rank(work, layout, comm, Labels(), seed=None)
    table, index = sources(work.model), rank.world.index("tp")
    for held in rank.states.values():
        values = {r.name: value_of(table[r.name], state)[r.box(index)] for r in held.storage.records}
        held.load({name: value.to(held.wide) for name, value in values.items()})
    return rank


def tokens(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, targets) [b, s]; some targets count for nothing."""
    drawn = torch.randint(vocab, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(11))
    targets = drawn[:, 1:].clone()
    targets[0, 5:9] = -100
    return drawn[:, :-1].contiguous(), targets
