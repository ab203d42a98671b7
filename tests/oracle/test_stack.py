"""What eager PyTorch keeps for the backward of a Hugging Face layer, against the stack that describes it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from shardwise.account.units import unit_memory
from shardwise.model.hf import from_config
from shardwise.model.spec import LAYER, Cut
from shardwise.plan.stack import load_stack, under

pytestmark = pytest.mark.oracle

SEQ = 128
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 1, "vocab_size": 128}


def kept_bytes(layer: torch.nn.Module, rope: LlamaRotaryEmbedding, dtype: torch.dtype) -> int:
    """Storages that autograd saves, without parameters and the rotation's tables."""
    x = torch.randn(1, SEQ, SIZES["hidden_size"], dtype=dtype, requires_grad=True)
    position = torch.arange(SEQ)[None]
    tables = rope(x, position)
    known = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *tables)}
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        alive.append(t)
        sizes[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x, attention_mask=None, position_embeddings=tables, position_ids=position)
    return sum(size for where, size in sizes.items() if where not in known)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_llama_layer_of_transformers(kv_heads: int, dtype: torch.dtype) -> None:
    """To the byte: norms of 6 h, an eager SwiGLU of 8 f, flash attention with its rows' sums."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    config = LlamaConfig(**SIZES, **heads, attn_implementation="sdpa")  # type: ignore[arg-type]
    layer, rope = LlamaDecoderLayer(config, 0).to(dtype), LlamaRotaryEmbedding(config)
    model = under(from_config({"model_type": "llama", **SIZES, **heads}, "it"), load_stack("fsdp2"))
    cut = Cut(SEQ, 1, False, dtype.itemsize, 4, seq_len=SEQ)
    assert kept_bytes(layer, rope, dtype) == unit_memory(model, LAYER, cut, "none").saved
