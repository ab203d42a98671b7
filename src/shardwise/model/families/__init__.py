"""One small function a family of models: the keys of its Hugging Face config -> a Model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from shardwise.model.families import abstract, deepseek, gemma, gpt, llama, moe, nemotron
from shardwise.model.read import Reader
from shardwise.model.spec import Model

FAMILIES: Final[Mapping[str, Callable[[str, Reader], Model]]] = {
    "bloom": gpt.bloom,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "gemma2": gemma.gemma2,
    "gemma3": gemma.gemma3,
    "gemma3_text": gemma.gemma3_text,
    "gpt2": gpt.gpt2,
    "gpt_oss": moe.gpt_oss,
    "llama": llama.llama,
    "mistral": llama.mistral,
    "mixtral": moe.mixtral,
    "mlp": abstract.matrices,
    "nemotron_h": nemotron.nemotron_h,
    "olmo": llama.olmo,
    "olmo2": llama.olmo2,
    "qwen2": llama.qwen2,
    "qwen3": llama.qwen3,
    "qwen3_moe": moe.qwen3_moe,
}
"""By `model_type`; "mlp" is ours, for the whiteboard."""
