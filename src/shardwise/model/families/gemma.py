"""Gemma 2 and 3: norms on both sides of every sublayer, GeGLU, local and global layers in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from shardwise.model.attention import Attention, attention
from shardwise.model.blocks import Norm, layer
from shardwise.model.families.common import FULL, LOCAL, SLIDING, assemble, trunk_of, window_of
from shardwise.model.feed_forward import mlp
from shardwise.model.read import Reader, short
from shardwise.model.spec import LAYER, Model

BOTH = Norm(after=True)


def gemma2(name: str, read: Reader) -> Model:
    """Every other layer is local, from the first on (2408.00118)."""
    return _gemma(name, read, "gemma2", 2, "")


def gemma3_text(name: str, read: Reader) -> Model:
    """Five local layers to a global one, and a norm on every head of q and k (2503.19786)."""
    period = read.integer("sliding_window_pattern", "_sliding_window_pattern", default=6, least=2, most=64)
    return _gemma(name, read, "gemma3_text", period, "head")


def gemma3(name: str, read: Reader) -> Model:
    """The language model of a config that has it in `text_config`. One with a vision tower is refused."""
    found = read.raw("text_config")
    if not isinstance(found, Mapping):
        read.faults.append(f"text_config: found {short(found)}, wanted a table; or set model_type to 'gemma3_text'")
        found = {}
    if read.raw("vision_config") is not None:
        read.faults.append(
            "vision_config: a vision tower is not supported; to plan the language model alone, "
            "make a config of text_config with model_type 'gemma3_text'"
        )
    outer = {k: read.config[k] for k in ("tie_word_embeddings",) if k in read.config}
    inner = Reader({**outer, **cast("Mapping[str, Any]", found)})
    inner.meant["model_type"] = "gemma3_text"
    model = gemma3_text(name, inner)
    inner.unread()
    read.faults += [f"text_config.{fault}" for fault in inner.faults]
    return model


def _gemma(name: str, read: Reader, family: str, period: int, qk_norm: str) -> Model:
    trunk = trunk_of(read, family, tied=True, head_dim=256)
    trunk.sizes["f"] = read.integer("intermediate_size")
    # Soft caps and the scale of the scores live inside kernels: they change no tensor and no count.
    read.pass_by("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    read.choice("hidden_activation", ("gelu_pytorch_tanh", "gelu"), "hidden_act")
    read.only("use_bidirectional_attention", False)
    bias = read.flag("attention_bias", False)
    default = [FULL if (i + 1) % period == 0 else SLIDING for i in range(trunk.layers)]
    types = read.words("layer_types", default, (FULL, SLIDING))
    window = window_of(read, types, default=4096)
    blocks = [
        layer(kind, attention(Attention(bias, bias, qk_norm, window=w)), mlp("gelu"), BOTH)
        for kind, w in ((LAYER, None), (LOCAL, window))
    ]
    chain = [LOCAL if t == SLIDING else LAYER for t in types]
    return assemble(name, read, trunk, blocks, chain, style=BOTH)
