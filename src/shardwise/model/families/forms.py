"""The mathematics of a family that changes no tensor and no count: scales, caps, the norms' offset, rotations.

The planner needs none of it, the runtime all; it is read back from the model's config. `planned_only` says what a
config asks for and our runtime has no forward of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from shardwise.model.families.common import SLIDING
from shardwise.model.families.llama import SCALINGS
from shardwise.model.spec import Model

ACTIVATIONS: Final[Mapping[str, str]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Hugging Face's words: three of them are one function."""

GEMMAS: Final = ("gemma2", "gemma3_text")

ROTATIONS: Final = ("default", *SCALINGS)
"""Rotary embeddings that run, by Hugging Face's `rope_type`."""


@dataclass(frozen=True, slots=True)
class Form:
    """`score_scale` None is 1 / sqrt(head dim). `local_theta`: base of the windowed layers' rotation, where it differs.

    `norm_offset`: norms multiply by 1 + weight.
    """

    activation: str = "silu"
    norm_offset: bool = False
    embedding_scale: float = 1.0
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    local_theta: float | None = None


@lru_cache(maxsize=256)
def form_of(model: Model) -> Form:
    """The form of one model, from the keys that its family read."""
    config: dict[str, Any] = json.loads(model.config)
    word = next((config[k] for k in ("activation_function", "hidden_activation", "hidden_act") if k in config), "silu")
    gemma = model.family in GEMMAS
    return Form(
        activation=ACTIVATIONS.get(word, word),
        norm_offset=gemma,
        embedding_scale=model.hidden**0.5 if gemma else 1.0,
        score_scale=config["query_pre_attn_scalar"] ** -0.5 if gemma else None,
        score_cap=config.get("attn_logit_softcapping"),
        logit_cap=config.get("final_logit_softcapping"),
        local_theta=config.get("rope_parameters", {}).get(SLIDING, {}).get("rope_theta"),
    )


def planned_only(model: Model) -> tuple[str, ...]:
    """What of the model's config our runtime does not compute: it must not run, or it would compute something else."""
    config: dict[str, Any] = json.loads(model.config)
    tables = {"rope_scaling": config.get("rope_scaling", {}), **config.get("rope_parameters", {})}
    found: list[str] = []
    for name, table in tables.items():
        kind, run = table.get("rope_type", "default"), ("default",) if name == SLIDING else ROTATIONS
        if kind not in run:
            found.append(f"{name}: rotary embeddings of the type {kind!r}; {', '.join(run)} run")
    if config.get("clip_qkv") is not None:
        found.append(f"clip_qkv: {config['clip_qkv']:g}; queries, keys and values are not clipped")
    return tuple(found)
