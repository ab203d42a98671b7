"""DeepSeek-V2 and V3: attention through latents, fine-grained experts beside shared ones, multi-token prediction."""

from __future__ import annotations

from shardwise.model.attention import latent_attention
from shardwise.model.blocks import RMS, further_prediction, layer, layer_ops
from shardwise.model.families.common import Heads, Trunk, assemble, routed_sizes, top_k_of
from shardwise.model.families.moe import MOE
from shardwise.model.feed_forward import Experts, mlp, moe
from shardwise.model.read import MAX_LAYERS, Reader
from shardwise.model.spec import LAYER, MTP, Model

MAX_DEPTHS = 16


def deepseek_v2(name: str, read: Reader) -> Model:
    """2405.04434."""
    return _deepseek(name, read, "deepseek_v2", first_dense=0)


def deepseek_v3(name: str, read: Reader) -> Model:
    """2412.19437. The router's bias, by which its load is balanced, is kept beside the parameters."""
    return _deepseek(name, read, "deepseek_v3", first_dense=3)


def _deepseek(name: str, read: Reader, family: str, first_dense: int) -> Model:
    trunk = _trunk(read, family)
    query_rank = "Q" in trunk.sizes
    first = read.integer("first_k_dense_replace", default=first_dense, least=0, most=MAX_LAYERS)
    read.only("moe_layer_freq", 1)
    # How the published weights are stored is not the model, and MLA has no kv heads.
    read.pass_by("quantization_config", "num_key_value_heads", "head_dim")
    dense = min(first, trunk.layers)
    chain = [LAYER] * dense + [MOE] * (trunk.layers - dense)
    shared = read.integer("n_shared_experts", default=1, least=0)
    width = read.integer("moe_intermediate_size")
    trunk.sizes.update(routed_sizes(read, ("n_routed_experts", "num_experts"), "moe_intermediate_size"))
    if shared:
        trunk.sizes["s"] = shared * width
    depths = read.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0, most=MAX_DEPTHS)
    mixer, feed = latent_attention(query_rank), moe(Experts(shared=shared > 0))
    blocks = [
        layer(LAYER, mixer, mlp()),
        layer(MOE, mixer, feed),
        further_prediction(layer_ops("x0", mixer, feed, RMS)),
    ]
    experts = trunk.sizes["E"]
    buffers = experts * chain.count(MOE) if family == "deepseek_v3" else 0
    more = {"experts": experts, "top_k": top_k_of(read, experts), "tail": (MTP,) * depths, "buffers": buffers}
    return assemble(name, read, trunk, blocks, chain, **more)


def _trunk(read: Reader, family: str) -> Trunk:
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    rank, kv_rank = _query_rank(read), read.integer("kv_lora_rank")
    nope, rotary, value = (read.integer(k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if rotary % 2:
        read.faults.append(f"qk_rope_head_dim: {rotary} is odd, rotary embeddings turn pairs")
    read.choice("hidden_act", ("silu",))
    sizes = {
        "h": hidden,
        "v": read.integer("vocab_size"),
        "f": read.integer("intermediate_size"),
        "a": heads,
        "L": kv_rank,
        "K": kv_rank + rotary,
        "u": heads * (nope + rotary),
        "w": heads * (nope + value),
        "o": heads * value,
        "r": heads * rotary // 2,
        "H": rotary,
        "J": 2 * hidden,
    }
    return Trunk(
        family=family,
        sizes=sizes | ({"Q": rank} if rank else {}),
        heads=Heads(heads, heads, {}),
        layers=read.integer("num_hidden_layers", most=MAX_LAYERS),
        tied=read.flag("tie_word_embeddings", False),
        norm_eps=read.number("rms_norm_eps", default=1e-6),
    )


def _query_rank(read: Reader) -> int:
    """0 where q has no latent: `null` in published configs, 0 in ours (TOML has no null)."""
    if "q_lora_rank" not in read.config:
        read.faults.append("q_lora_rank: missing; wanted a whole number, or null where q has no latent")
    return read.integer("q_lora_rank", default=0, least=0)
