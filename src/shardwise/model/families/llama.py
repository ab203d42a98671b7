"""Llama and its closest relatives: dense layers with RMS or other norms and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from shardwise.model.attention import Attention, attention
from shardwise.model.blocks import RMS, Norm, layer
from shardwise.model.families.common import (
    FULL,
    LOCAL,
    SLIDING,
    Trunk,
    assemble,
    qwen_types,
    trunk_of,
    window_of,
)
from shardwise.model.feed_forward import mlp
from shardwise.model.read import Reader, short
from shardwise.model.spec import LAYER, Model

ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

MAX_LOOPS = 64


def llama(name: str, read: Reader) -> Model:
    """Pre-norm attention with grouped kv heads, and SwiGLU. `num_loops` (ours) runs the chain so many times over."""
    trunk = _dense(read, "llama")
    for key in ("attention_bias", "mlp_bias"):
        if read.flag(key, False):
            read.faults.append(f"{key}: true is not supported, these blocks have no biases")
    theta, scaling = _rope(read)
    loops = read.integer("num_loops", default=1, most=MAX_LOOPS)
    block = layer(LAYER, attention(Attention()), mlp())
    chain = (LAYER,) * trunk.layers
    return assemble(name, read, trunk, [block], chain, rope_theta=theta, rope_scaling=scaling, loops=loops)


def mistral(name: str, read: Reader) -> Model:
    """Llama with a window on every layer, or none."""
    trunk = _dense(read, "mistral")
    windowed = read.config.get("sliding_window") is not None
    return _layers(name, read, trunk, (SLIDING if windowed else FULL,) * trunk.layers, Attention())


def qwen2(name: str, read: Reader) -> Model:
    """Llama with biases on q, k and v."""
    trunk = _dense(read, "qwen2")
    return _layers(name, read, trunk, qwen_types(read, trunk.layers), Attention(qkv_bias=True))


def qwen3(name: str, read: Reader) -> Model:
    """Llama with a norm on every head of q and k."""
    trunk = _dense(read, "qwen3", head_dim=128)
    bias = read.flag("attention_bias", False)
    types = qwen_types(read, trunk.layers)
    return _layers(name, read, trunk, types, Attention(qkv_bias=bias, out_bias=bias, qk_norm="head"))


def olmo(name: str, read: Reader) -> Model:
    """LayerNorm without parameters (Groeneveld 2402.00838). Clipping q, k and v changes no tensor."""
    read.pass_by("clip_qkv")
    return _olmo(name, read, "olmo", Norm(centred=True, parameters=()), "")


def olmo2(name: str, read: Reader) -> Model:
    """Norms behind the sublayers, and over all of q and of k (2501.00656)."""
    return _olmo(name, read, "olmo2", Norm(before=False, after=True), "full")


def _olmo(name: str, read: Reader, family: str, style: Norm, qk_norm: str) -> Model:
    trunk = _dense(read, family)
    bias = read.flag("attention_bias", False)
    spec = Attention(qkv_bias=bias, out_bias=bias, qk_norm=qk_norm)
    return _layers(name, read, trunk, (FULL,) * trunk.layers, spec, style)


def _dense(read: Reader, family: str, head_dim: int | None = None) -> Trunk:
    trunk = trunk_of(read, family, head_dim=head_dim)
    trunk.sizes["f"] = read.integer("intermediate_size")
    read.choice("hidden_act", ("silu",))
    return trunk


def _layers(name: str, read: Reader, trunk: Trunk, types: tuple[str, ...], spec: Attention, style: Norm = RMS) -> Model:
    """Layers that differ in their windows alone."""
    local = Attention(spec.qkv_bias, spec.out_bias, spec.qk_norm, window=window_of(read, types))
    blocks = [layer(LAYER, attention(spec), mlp(), style), layer(LOCAL, attention(local), mlp(), style)]
    chain = [LOCAL if t == SLIDING else LAYER for t in types]
    return assemble(name, read, trunk, blocks, chain, style=style)


# -------------------------------------------------------------------------------------------------- rotary embedding


def _rope(read: Reader) -> tuple[float, tuple[tuple[str, float], ...]]:
    """The rotation's base, and Llama 3.1's stretched frequencies or nothing; from the keys of either version."""
    key = "rope_scaling" if read.config.get("rope_parameters") is None else "rope_parameters"
    found = read.raw(key)
    if found is None:
        return read.number("rope_theta", default=10000.0), ()
    if not isinstance(found, Mapping):
        read.faults.append(f"{key}: found {short(found)}, wanted a table")
        return 1.0, ()
    table = cast("Mapping[str, Any]", found)
    inner = Reader(table)
    theta = (inner if "rope_theta" in table else read).number("rope_theta", default=10000.0)
    scaling = _scaling(inner)
    read.faults += [f"{key}.{fault}" for fault in inner.faults]
    read.meant["rope_theta"] = theta
    if scaling:
        read.meant["rope_scaling"] = {"rope_type": "llama3", **dict(scaling)}
    return theta, scaling


def _scaling(inner: Reader) -> tuple[tuple[str, float], ...]:
    kind = inner.config.get("rope_type", inner.config.get("type"))
    if kind == "default":
        return ()
    if kind != "llama3":
        inner.faults.append(f"rope_type: found {short(kind)}, wanted 'llama3' or 'default'")
        return ()
    inner.faults += [f"{key}: missing" for key in ROPE_KEYS if key not in inner.config]
    values = {key: inner.number(key, default=1.0) for key in ROPE_KEYS}
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    if not inner.faults and low >= high:
        inner.faults.append(f"low_freq_factor: found {low:g}, wanted less than high_freq_factor, {high:g}")
    return tuple(values.items())
