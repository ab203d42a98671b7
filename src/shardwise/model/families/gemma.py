"""Gemma 2 and 3: norms on both sides of every sublayer, GeGLU, local and global layers in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from shardwise.model.attention import Attention, attention
from shardwise.model.blocks import Norm, embedding, head, layer
from shardwise.model.families.common import FULL, LOCAL, SLIDING, assemble, trunk_of, window_of
from shardwise.model.families.llama import Scaling, rope_of
from shardwise.model.feed_forward import mlp
from shardwise.model.read import Reader, short
from shardwise.model.spec import LAYER, Model

BOTH = Norm(after=True, offset=True)


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
    read.integer("query_pre_attn_scalar", default=256)
    score_cap = _cap(read, "attn_logit_softcapping", 50.0 if family == "gemma2" else None)
    logit_cap = _cap(read, "final_logit_softcapping", 30.0 if family == "gemma2" else None)
    theta, scaling = _rotations(read) if family == "gemma3_text" else rope_of(read)
    read.choice("hidden_activation", ("gelu_pytorch_tanh", "gelu"), "hidden_act")
    read.only("use_bidirectional_attention", False)
    bias = read.flag("attention_bias", False)
    default = [FULL if (i + 1) % period == 0 else SLIDING for i in range(trunk.layers)]
    types = read.words("layer_types", default, (FULL, SLIDING))
    window = window_of(read, types, default=4096)
    spec = Attention(bias, bias, qk_norm, capped=score_cap, qk_style=BOTH)
    blocks = [
        layer(kind, attention(replace(spec, window=w)), mlp("gelu"), BOTH)
        for kind, w in ((LAYER, None), (LOCAL, window))
    ]
    chain = [LOCAL if t == SLIDING else LAYER for t in types]
    ends = (embedding(), head(trunk.tied, BOTH, capped=logit_cap))
    return assemble(name, read, trunk, blocks, chain, ends=ends, rope_theta=theta, rope_scaling=scaling)


def _cap(read: Reader, key: str, default: float | None) -> bool:
    """Whether there is a soft cap; its value stays in the config, for the runtime. An explicit null takes it away."""
    if key in read.config and read.config[key] is None:
        read.pass_by(key)
        read.meant[key] = None
        return False
    if key not in read.config and default is None:
        return False
    read.number(key, default=default or 1.0)
    return True


def _rotations(read: Reader) -> tuple[float, Scaling]:
    """Global layers turn by another base than local ones; from the keys of either version, remembered in the newer."""
    both = read.config.get("rope_parameters")
    if isinstance(both, Mapping) and not {FULL, SLIDING}.isdisjoint(cast("Mapping[str, Any]", both)):
        read.pass_by("rope_parameters", "rope_theta", "rope_scaling")
        tables = cast("Mapping[str, Any]", both)
        full, local = (Reader({"rope_parameters": tables.get(t)}) for t in (FULL, SLIDING))
    else:
        old = {k: read.raw(k) for k in ("rope_theta", "rope_scaling", "rope_parameters")}
        base = read.config.get("rope_local_base_freq")
        full = Reader({k: value for k, value in old.items() if value is not None})
        local = Reader({} if base is None else {"rope_theta": base})
    theta, scaling = rope_of(full, theta=1e6)
    rope_of(local, theta=1e4)
    read.faults += [*full.faults, *local.faults]
    pairs = ((FULL, full), (SLIDING, local))
    read.meant["rope_parameters"] = {
        name: {"rope_type": "default", "rope_theta": r.meant.get("rope_theta", 1.0), **r.meant.get("rope_scaling", {})}
        for name, r in pairs
    }
    return theta, scaling
