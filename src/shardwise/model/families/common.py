"""What the families share: heads and their sizes, windows, experts, the finished model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.model.blocks import RMS, Norm, embedding, head
from shardwise.model.read import MAX_LAYERS, Reader
from shardwise.model.spec import Block, Model

FULL, SLIDING = "full_attention", "sliding_attention"
"""Words of Hugging Face's `layer_types`."""

LOCAL = "local"
"""Kind of a dense layer whose attention has a window."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention's sizes, as letters of `spec`."""

    heads: int
    kv_heads: int
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Trunk:
    """What every model has around its layers."""

    family: str
    sizes: dict[str, int]
    heads: Heads
    layers: int
    tied: bool
    norm_eps: float


def heads_of(read: Reader, hidden: int, rotary: bool = True, head_dim: int | None = None) -> Heads:
    """Query heads, kv heads and the head dim. Faults where they do not divide, or where a pair cannot be rotated."""
    heads = read.integer("num_attention_heads", "n_head")
    kv_heads = read.integer("num_key_value_heads", default=heads)
    if read.config.get("head_dim") is None and head_dim is None and hidden % heads:
        read.faults.append(f"num_attention_heads: {heads} heads do not divide hidden_size {hidden}; set head_dim")
    each = read.integer("head_dim", default=head_dim or max(1, hidden // heads))
    if heads % kv_heads:
        read.faults.append(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
    if rotary and each % 2:
        read.faults.append(f"head_dim: {each} is odd, rotary embeddings turn pairs")
    return Heads(heads, kv_heads, head_sizes(heads, kv_heads, each))


def head_sizes(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """The letters of plain attention."""
    q, k = heads * head_dim, kv_heads * head_dim
    return {"q": q, "k": k, "a": heads, "b": kv_heads, "r": q // 2, "H": head_dim}


def trunk_of(
    read: Reader, family: str, tied: bool = False, head_dim: int | None = None, norm_eps: float = 1e-6
) -> Trunk:
    """The keys that most families share. How q and k are turned changes no size, so it is not asked here."""
    hidden = read.integer("hidden_size")
    heads = heads_of(read, hidden, head_dim=head_dim)
    return Trunk(
        family=family,
        sizes={**heads.sizes, "h": hidden, "v": read.integer("vocab_size")},
        heads=heads,
        layers=read.integer("num_hidden_layers", most=MAX_LAYERS),
        tied=read.flag("tie_word_embeddings", tied),
        norm_eps=read.number("rms_norm_eps", default=norm_eps),
    )


def window_of(read: Reader, types: Sequence[str], default: int | None = None) -> int | None:
    """Keys that a query of the sliding layers sees, where there are such layers."""
    if SLIDING not in types:
        read.pass_by("sliding_window")
        return None
    return read.integer("sliding_window", default=default)


def qwen_types(read: Reader, layers: int) -> tuple[str, ...]:
    """`use_sliding_window` is off in all that was published; on, layers from `max_window_layers` have windows."""
    if not read.flag("use_sliding_window", False):
        read.pass_by("layer_types", "sliding_window", "max_window_layers")
        return (FULL,) * layers
    first = read.integer("max_window_layers", default=28, least=0, most=MAX_LAYERS)
    return read.words("layer_types", [SLIDING if i >= first else FULL for i in range(layers)], (FULL, SLIDING))


def routed_sizes(read: Reader, experts_keys: Sequence[str], width_key: str) -> dict[str, int]:
    """The letters of routed experts; `experts_keys`: the key of their number, and other names of it."""
    experts, width = read.integer(*experts_keys), read.integer(width_key)
    return {"E": experts, "e": experts, "x": width, "X": experts * width}


def top_k_of(read: Reader, experts: int, key: str = "num_experts_per_tok") -> int:
    """Experts of a token. A fault where there are fewer experts."""
    top_k = read.integer(key)
    if top_k > experts:
        read.faults.append(f"{key}: found {top_k}, more than the {experts} experts")
    return top_k


def assemble(
    name: str, read: Reader, trunk: Trunk, layers: Iterable[Block], chain: Sequence[str], **more: Any
) -> Model:
    """The finished model. `layers` has a block for every kind that the chain may have; `more`: other fields of Model,
    and the `style` of the final norm."""
    style: Norm = more.pop("style", RMS)
    ends = more.pop("ends", (embedding(), head(trunk.tied, style)))
    tail: tuple[str, ...] = more.get("tail", ())
    by_kind = {b.kind: b for b in layers}
    return Model(
        name=name,
        family=trunk.family,
        sizes=trunk.sizes,
        chain=tuple(chain),
        tied=trunk.tied,
        heads=trunk.heads.heads,
        kv_heads=trunk.heads.kv_heads,
        norm_eps=trunk.norm_eps,
        # Each kind once, in the order in which the chain begins them.
        blocks=(ends[0], *(by_kind[kind] for kind in dict.fromkeys([*chain, *tail])), ends[1]),
        config=read.text(),
        **more,
    )
