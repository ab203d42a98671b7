"""Llama and its closest relatives: dense layers with RMS or other norms and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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

SCALINGS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Rotations whose numbers are read, by Hugging Face's `rope_type`."""

MAX_LOOPS = 64


def llama(name: str, read: Reader) -> Model:
    """Pre-norm attention with grouped kv heads, and SwiGLU. `num_loops` (ours) runs the chain so many times over."""
    trunk = _dense(read, "llama")
    for key in ("attention_bias", "mlp_bias"):
        if read.flag(key, False):
            read.faults.append(f"{key}: true is not supported, these blocks have no biases")
    theta, scaling = rope_of(read, strict=True)
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
    """LayerNorm without parameters, its epsilon fixed (Groeneveld 2402.00838). Clipped q, k and v change no tensor."""
    if read.config.get("clip_qkv") is not None:
        read.number("clip_qkv", default=1.0)
    return _olmo(name, read, "olmo", Norm(centred=True, parameters=()), "")


def olmo2(name: str, read: Reader) -> Model:
    """Norms behind the sublayers, and over all of q and of k (2501.00656)."""
    return _olmo(name, read, "olmo2", Norm(before=False, after=True), "full")


def _olmo(name: str, read: Reader, family: str, style: Norm, qk_norm: str) -> Model:
    trunk = _dense(read, family, norm_eps=1e-5)
    bias = read.flag("attention_bias", False)
    spec = Attention(qkv_bias=bias, out_bias=bias, qk_norm=qk_norm)
    return _layers(name, read, trunk, (FULL,) * trunk.layers, spec, style)


def _dense(read: Reader, family: str, head_dim: int | None = None, norm_eps: float = 1e-6) -> Trunk:
    trunk = trunk_of(read, family, head_dim=head_dim, norm_eps=norm_eps)
    trunk.sizes["f"] = read.integer("intermediate_size")
    read.choice("hidden_act", ("silu",))
    return trunk


def _layers(name: str, read: Reader, trunk: Trunk, types: tuple[str, ...], spec: Attention, style: Norm = RMS) -> Model:
    """Layers that differ in their windows alone."""
    local = replace(spec, window=window_of(read, types))
    theta, scaling = rope_of(read)
    blocks = [layer(LAYER, attention(spec), mlp(), style), layer(LOCAL, attention(local), mlp(), style)]
    chain = [LOCAL if t == SLIDING else LAYER for t in types]
    return assemble(name, read, trunk, blocks, chain, style=style, rope_theta=theta, rope_scaling=scaling)


# -------------------------------------------------------------------------------------------------- rotary embedding


Scaling = tuple[tuple[str, float], ...]


def rope_of(read: Reader, theta: float = 10000.0, strict: bool = False) -> tuple[float, Scaling]:
    """The rotation's base, and what stretches its frequencies, if anything; from the keys of either version.

    Another scaling changes no size: it is remembered by its name, and a fault where `strict`.
    """
    key = "rope_scaling" if read.config.get("rope_parameters") is None else "rope_parameters"
    found = read.raw(key)
    if found is None:
        return read.number("rope_theta", default=theta), ()
    if not isinstance(found, Mapping):
        read.faults.append(f"{key}: found {short(found)}, wanted a table")
        return 1.0, ()
    table = cast("Mapping[str, Any]", found)
    inner = Reader(table)
    base = (inner if "rope_theta" in table else read).number("rope_theta", default=theta)
    kind, scaling = _scaling(inner, strict)
    read.faults += [f"{key}.{fault}" for fault in inner.faults]
    read.meant["rope_theta"] = base
    if kind != "default":
        read.meant["rope_scaling"] = {"rope_type": kind, **dict(scaling)}
    return base, scaling


def _scaling(inner: Reader, strict: bool) -> tuple[str, Scaling]:
    """The kind of scaling, and its numbers where they are read."""
    kind = inner.config.get("rope_type", inner.config.get("type"))
    if kind == "default" or (kind is None and not strict):
        return "default", ()
    if not isinstance(kind, str) or kind not in SCALINGS:
        if strict or not isinstance(kind, str):
            inner.faults.append(f"rope_type: found {short(kind)}, wanted {', '.join(map(repr, SCALINGS))} or 'default'")
            return "default", ()
        return kind[:40], ()
    inner.faults += [f"{key}: missing" for key in SCALINGS[kind] if key not in inner.config]
    values = {key: inner.number(key, default=1.0) for key in SCALINGS[kind]}
    low, high = (values.get(key) for key in ("low_freq_factor", "high_freq_factor"))
    if not inner.faults and low is not None and high is not None and low >= high:
        inner.faults.append(f"low_freq_factor: found {low:g}, wanted less than high_freq_factor, {high:g}")
    return kind, tuple(values.items())
