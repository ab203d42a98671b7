"""Tiny models and jobs that the tests share."""

from __future__ import annotations

from shardwise.cluster import Cluster, parse_cluster
from shardwise.model.hf import from_config
from shardwise.model.spec import Model
from shardwise.plan.job import PRECISIONS, Job


def tiny(
    layers: int = 4,
    tied: bool = False,
    hidden: int = 32,
    ffn: int = 48,
    vocab: int = 40,
    kv_heads: int = 8,
    loops: int = 1,
) -> Model:
    """8 heads of 4, 8 kv heads: every tp up to 8 is legal. Rows do not divide evenly into every number of shards."""
    return from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": kv_heads,
            "head_dim": 4,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
            "rms_norm_eps": 1e-5,
            "num_loops": loops,
        },
        "tiny",
    )


def job(model: Model, cluster: Cluster | str, seq_len: int = 16, batch: int = 8, precision: str = "fp64") -> Job:
    place = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    return Job(model, place, seq_len, batch, PRECISIONS[precision])
