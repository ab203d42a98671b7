"""Models whose every layer, or nearly, has routed experts: Mixtral, Qwen3 MoE, gpt-oss."""

from __future__ import annotations

from shardwise.model.attention import Attention, attention
from shardwise.model.blocks import layer
from shardwise.model.families.common import (
    FULL,
    LOCAL,
    SLIDING,
    Trunk,
    assemble,
    routed_sizes,
    top_k_of,
    trunk_of,
    window_of,
)
from shardwise.model.feed_forward import Experts, mlp, moe
from shardwise.model.read import MAX_LAYERS, Reader, as_list, short
from shardwise.model.spec import LAYER, Model

MOE, LOCAL_MOE = "moe", "local_moe"
"""Kinds of layers with routed experts; the second with a window."""


def mixtral(name: str, read: Reader) -> Model:
    """2401.04088: experts in every layer, each as wide as a dense feed-forward."""
    trunk = _routed(read, "mixtral", "num_local_experts", "intermediate_size")
    windowed = read.config.get("sliding_window") is not None
    return _finish(name, read, trunk, (SLIDING if windowed else FULL,) * trunk.layers, (Attention(), Experts()))


def qwen3_moe(name: str, read: Reader) -> Model:
    """2505.09388: Qwen3 with experts in every `decoder_sparse_step`th layer that `mlp_only_layers` does not name."""
    trunk = _routed(read, "qwen3_moe", "num_experts", "moe_intermediate_size", "num_local_experts")
    bias = read.flag("attention_bias", False)
    spec = Attention(qkv_bias=bias, out_bias=bias, qk_norm="head")
    windowed = read.flag("use_sliding_window", False)
    types = (SLIDING if windowed else FULL,) * trunk.layers
    step = read.integer("decoder_sparse_step", default=1, most=MAX_LAYERS)
    dense = {i for i in range(trunk.layers) if (i + 1) % step} | _dense_layers(read)
    if dense:
        trunk.sizes["f"] = read.integer("intermediate_size")
    return _finish(name, read, trunk, types, (spec, Experts()), frozenset(dense))


def gpt_oss(name: str, read: Reader) -> Model:
    """2508.10925: biases everywhere, a learned sink in every head, every other layer local from the first on.

    The clamp of its SwiGLU costs nothing of its own; how the published weights are packed is not the model.
    """
    trunk = _routed(read, "gpt_oss", "num_local_experts", "intermediate_size", "num_experts")
    read.pass_by("quantization_config", "swiglu_limit", "swiglu_alpha", "experts_per_token")
    bias = read.flag("attention_bias", True)
    default = [FULL if i % 2 else SLIDING for i in range(trunk.layers)]
    types = read.words("layer_types", default, (FULL, SLIDING))
    spec = Attention(qkv_bias=bias, out_bias=bias, sinks=True)
    return _finish(name, read, trunk, types, (spec, Experts(bias=True)))


def _routed(read: Reader, family: str, experts: str, width: str, *also: str) -> Trunk:
    trunk = trunk_of(read, family)
    read.choice("hidden_act", ("silu",))
    trunk.sizes.update(routed_sizes(read, (experts, *also), width))
    return trunk


def _dense_layers(read: Reader) -> set[int]:
    """`mlp_only_layers`: indices of layers."""
    raw: object = read.raw("mlp_only_layers")
    values = as_list(raw)
    indices = {v for v in values or () if isinstance(v, int) and not isinstance(v, bool)}
    if raw is not None and (values is None or len(indices) < len(values)):
        read.faults.append(f"mlp_only_layers: found {short(raw)}, wanted a list of layers' indices, each once")
    elif indices:
        read.meant["mlp_only_layers"] = sorted(indices)
    return indices


def _finish(
    name: str,
    read: Reader,
    trunk: Trunk,
    types: tuple[str, ...],
    forms: tuple[Attention, Experts],
    dense: frozenset[int] = frozenset(),
) -> Model:
    spec, experts = forms
    top_k = top_k_of(read, trunk.sizes["E"])
    window = window_of(read, types, default=128 if trunk.family == "gpt_oss" else None)
    local = Attention(spec.qkv_bias, spec.out_bias, spec.qk_norm, spec.sinks, window)
    blocks = [
        layer(kind, attention(a), feed)
        for kind, a, feed in (
            (LAYER, spec, mlp()),
            (LOCAL, local, mlp()),
            (MOE, spec, moe(experts)),
            (LOCAL_MOE, local, moe(experts)),
        )
    ]
    kinds = {(FULL, True): LAYER, (SLIDING, True): LOCAL, (FULL, False): MOE, (SLIDING, False): LOCAL_MOE}
    chain = [kinds[t, i in dense] for i, t in enumerate(types)]
    return assemble(name, read, trunk, blocks, chain, experts=trunk.sizes["E"], top_k=top_k)
