"""GPT: LayerNorm, learned positions or none, a feed-forward without a gate, biases everywhere.

`gpt2` with sizes of its own stands for GPT-3, MT-NLG and the models of Narayanan et al. (2104.04473): a Hugging Face
class holds the same parameters. Dropout belongs to a training, not to the model: it is planned as 0.
"""

from __future__ import annotations

from shardwise.model.attention import Attention, attention
from shardwise.model.blocks import LAYER_NORM, Norm, embedding, head, layer
from shardwise.model.families.common import Heads, Trunk, assemble, head_sizes
from shardwise.model.feed_forward import mlp
from shardwise.model.read import MAX_LAYERS, Reader
from shardwise.model.spec import LAYER, Model

GELUS = ("gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh")
"""One cost, whichever approximation."""


def gpt2(name: str, read: Reader) -> Model:
    """Learned positions."""
    hidden = read.integer("n_embd", "hidden_size")
    trunk = _trunk(read, "gpt2", hidden)
    trunk.sizes["f"] = read.integer("n_inner", default=4 * hidden)
    trunk.sizes["P"] = read.integer("n_positions", "n_ctx", "max_position_embeddings", default=1024)
    read.choice("activation_function", GELUS)
    return _finish(name, read, trunk, positions=True, behind=None)


def bloom(name: str, read: Reader) -> Model:
    """ALiBi, which is added inside the attention, and a norm behind the embedding (2211.05100)."""
    hidden = read.integer("hidden_size", "n_embed")
    trunk = _trunk(read, "bloom", hidden)
    trunk.sizes["f"] = 4 * hidden
    read.only("apply_residual_connection_post_layernorm", False)
    read.pass_by("alibi")
    return _finish(name, read, trunk, positions=False, behind=LAYER_NORM)


def _trunk(read: Reader, family: str, hidden: int) -> Trunk:
    heads = read.integer("n_head", "num_attention_heads")
    if hidden % heads:
        read.faults.append(f"n_head: {heads} heads do not divide the hidden size {hidden}")
    return Trunk(
        family=family,
        sizes={**head_sizes(heads, heads, hidden // heads), "h": hidden, "v": read.integer("vocab_size")},
        heads=Heads(heads, heads, {}),
        layers=read.integer("n_layer", "num_hidden_layers", most=MAX_LAYERS),
        tied=read.flag("tie_word_embeddings", True),
        norm_eps=read.number("layer_norm_epsilon", default=1e-5),
    )


def _finish(name: str, read: Reader, trunk: Trunk, positions: bool, behind: Norm | None) -> Model:
    spec = Attention(qkv_bias=True, out_bias=True, rotary=False)
    block = layer(LAYER, attention(spec), mlp("gelu", gated=False, bias=True), LAYER_NORM)
    ends = (embedding(positions, behind), head(trunk.tied, LAYER_NORM))
    return assemble(name, read, trunk, [block], [LAYER] * trunk.layers, ends=ends, rope_theta=0.0)
