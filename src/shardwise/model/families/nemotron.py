"""Nemotron-H and Nemotron 3: a chain of Mamba-2, attention, feed-forward and expert layers, one sublayer each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from shardwise.model.attention import Attention, attention
from shardwise.model.blocks import RMS, Body, further_prediction, single, sublayer
from shardwise.model.families.common import Heads, Trunk, assemble, heads_of, routed_sizes, top_k_of
from shardwise.model.families.deepseek import MAX_DEPTHS
from shardwise.model.families.moe import MOE
from shardwise.model.feed_forward import Experts, mlp, moe
from shardwise.model.mamba import mamba
from shardwise.model.read import MAX_LAYERS, Reader, as_list, short
from shardwise.model.spec import MTP, Model, Op

MAMBA, ATTENTION, MLP = "mamba", "attention", "mlp"
LETTERS: Final = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
WORDS: Final = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
SUBLAYERS: Final = {MAMBA: "mixer", ATTENTION: "attention", MLP: "mlp", MOE: "mlp"}


def nemotron_h(name: str, read: Reader) -> Model:
    """2504.03624; its experts are not gated, and their activation is relu squared."""
    pattern = _pattern(read, "hybrid_override_pattern", "layers_block_type", "")
    if read.config.get("num_hidden_layers") not in (None, len(pattern)):
        found = short(read.config["num_hidden_layers"])
        read.faults.append(f"num_hidden_layers: found {found}, but the pattern has {len(pattern)} layers")
    depths = read.integer("num_nextn_predict_layers", default=0, least=0, most=MAX_DEPTHS)
    further = _pattern(read, "mtp_hybrid_override_pattern", "mtp_layers_block_type", "*E") if depths else ""
    trunk = _trunk(read, len(pattern))
    bodies, more = _bodies(read, trunk, pattern + further)
    # Without attention, the heads that tensor parallelism shares out are Mamba's.
    fallback = Heads(more.get("ssm_heads", 1), more.get("ssm_heads", 1), {})
    trunk = replace(trunk, heads=more.pop("heads", fallback))
    blocks = [single(kind, SUBLAYERS[kind], body) for kind, body in bodies.items()]
    if depths:
        trunk.sizes["J"] = 2 * trunk.sizes["h"]
        blocks.append(further_prediction(_further(bodies, further)))
    chain = [LETTERS[c] for c in pattern]
    buffers = more.get("experts", 0) * chain.count(MOE)
    return assemble(name, read, trunk, blocks, chain, tail=(MTP,) * depths, buffers=buffers, rope_theta=0.0, **more)


def _trunk(read: Reader, layers: int) -> Trunk:
    hidden = read.integer("hidden_size")
    read.only("residual_in_fp32", False)
    read.only("tie_word_embeddings", False)
    read.choice("mlp_hidden_act", ("relu2",))
    read.choice("mamba_hidden_act", ("silu",))
    return Trunk(
        family="nemotron_h",
        sizes={"h": hidden, "v": read.integer("vocab_size")},
        heads=Heads(1, 1, {}),
        layers=layers,
        tied=False,
        norm_eps=read.number("layer_norm_epsilon", "rms_norm_eps", "norm_eps", default=1e-5),
    )


def _bodies(read: Reader, trunk: Trunk, pattern: str) -> tuple[dict[str, Body], dict[str, Any]]:
    """What every kind of layer in the pattern does; the model's other fields. Sizes are added to the trunk's."""
    bodies: dict[str, Body] = {}
    more: dict[str, Any] = {}
    # Every layer but the Mamba ones would have them.
    read.only("mlp_bias", False)
    read.only("attention_bias", False)
    if "M" in pattern:
        bodies[MAMBA], found = _mamba(read, trunk)
        more |= found
    if "*" in pattern:
        heads = heads_of(read, trunk.sizes["h"], rotary=False, head_dim=128)
        trunk.sizes.update(heads.sizes)
        more["heads"] = heads
        bodies[ATTENTION] = attention(Attention(rotary=False))
    if "-" in pattern:
        trunk.sizes["f"] = read.integer("intermediate_size")
        bodies[MLP] = mlp("relu2", gated=False)
    if "E" in pattern:
        bodies[MOE], found = _moe(read, trunk)
        more |= found
    else:
        read.pass_by("n_routed_experts", "n_shared_experts")
    return bodies, more


def _mamba(read: Reader, trunk: Trunk) -> tuple[Body, dict[str, Any]]:
    heads, width = read.integer("mamba_num_heads"), read.integer("mamba_head_dim")
    state = read.integer("ssm_state_size", "mamba_d_state", default=128)
    groups = read.integer("n_groups", "mamba_n_groups", default=8)
    chunk = read.integer("chunk_size", "mamba_chunk_size", default=128)
    if heads % groups:
        read.faults.append(f"n_groups: {groups} does not divide mamba_num_heads {heads}")
    inner = heads * width
    trunk.sizes.update(
        i=inner,
        m=inner + 2 * groups * state,
        n=heads,
        N=state,
        g=groups,
        W=read.integer("conv_kernel", "mamba_d_conv", default=4, most=64),
        C=chunk,
        G=max(1, inner * state // chunk),
    )
    body = mamba(read.flag("use_bias", False), read.flag("use_conv_bias", True))
    return body, {"ssm_heads": heads, "ssm_groups": groups}


def _moe(read: Reader, trunk: Trunk) -> tuple[Body, dict[str, Any]]:
    trunk.sizes.update(routed_sizes(read, ("n_routed_experts", "num_local_experts"), "moe_intermediate_size"))
    shared = read.integer("moe_shared_expert_intermediate_size", default=0, least=0)
    # The shared experts are one feed-forward of that width, however many they are said to be.
    read.pass_by("n_shared_experts")
    latent = read.integer("moe_latent_size") if read.raw("moe_latent_size") is not None else 0
    trunk.sizes.update({"s": shared} if shared else {}, **({"y": latent} if latent else {}))
    experts = trunk.sizes["E"]
    body = moe(Experts("relu2", gated=False, shared=shared > 0, latent=latent > 0))
    return body, {"experts": experts, "top_k": top_k_of(read, experts)}


def _further(bodies: dict[str, Body], pattern: str) -> tuple[Op, ...]:
    """The sublayers of a module of multi-token prediction, from "x0" to "y"."""
    ops: tuple[Op, ...] = ()
    for i, kind in enumerate(LETTERS[c] for c in pattern):
        stream = (f"x{i}", "y" if i == len(pattern) - 1 else f"x{i + 1}")
        ops += sublayer(i + 1, SUBLAYERS[kind], stream, bodies[kind], RMS)
    return ops


def _pattern(read: Reader, key: str, words_key: str, default: str) -> str:
    """A letter a layer; newer configs have words."""
    named = as_list(read.raw(words_key, *(("layer_types",) if words_key == "layers_block_type" else ())))
    text: object = read.raw(key)
    if named is not None and text is None:
        strange = next((w for w in named if not isinstance(w, str) or w not in WORDS), None)
        if strange is not None:
            read.faults.append(f"{words_key}: found {short(strange)}, wanted {', '.join(WORDS)}")
            return "*"
        text = "".join(WORDS[str(w)] for w in named)
    text = default if text is None else text
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_LAYERS or set(text) - set(LETTERS):
        read.faults.append(f"{key}: found {short(text)}, wanted a letter a layer: {' '.join(LETTERS)}")
        return "*"
    read.meant[key] = text
    return text
