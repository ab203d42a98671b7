"""The model of the comparison, for both sides: a small Llama, its weights and its tokens.

The peer's is a plain module as torchtitan writes it (norms, products and attention are torch's functions). Its
parameters have our names, so that one set of values serves both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.cluster import parse_cluster
from shardwise.collective import Labels
from shardwise.mesh import DATA
from shardwise.model.hf import from_config
from shardwise.model.spec import Model
from shardwise.plan.job import PRECISIONS, Job
from shardwise.plan.layout import Layout, parse
from shardwise.train.comm import Comm
from shardwise.train.rank import build_rank
from shardwise.train.threads import run_threads

LAYERS, HEADS, KV_HEADS = 8, 8, 4


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model, and of the step: `batch` sequences of `seq_len` tokens."""

    hidden: int
    vocab: int
    seq_len: int
    batch: int

    @property
    def model(self) -> Model:
        return from_config(
            {
                "model_type": "llama",
                "hidden_size": self.hidden,
                "intermediate_size": self.hidden * 11 // 4,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "vocab_size": self.vocab,
            },
            f"llama-{self.hidden}",
        )

    def job(self, ranks: int) -> Job:
        return Job(self.model, parse_cluster(f"{ranks}xcpu"), self.seq_len, self.batch, PRECISIONS["fp32"])

    def tokens(self) -> torch.Tensor:
        """[batch, seq_len + 1], the same in every step."""
        return torch.randint(self.vocab, (self.batch, self.seq_len + 1), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank of a layout computes: ids and targets [micro-batches, mb, s] of its data-parallel place."""

    size: Size
    layout: Layout
    rank: int
    ids: torch.Tensor
    targets: torch.Tensor

    @property
    def job(self) -> Job:
        return self.size.job(self.layout.world_size)

    @staticmethod
    def of(size: Size, layout: Layout, rank: int) -> Share:
        tokens = size.tokens().view(-1, layout.dp, layout.mb, size.seq_len + 1)
        mine = tokens[:, layout.mesh.group(rank, DATA).index(rank)]
        return Share(size, layout, rank, mine[..., :-1].contiguous(), mine[..., 1:].contiguous())


class Attention(nn.Module):
    def __init__(self, model: Model, rope: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        h, d = model.hidden, model.head_dim
        self.head_dim, self.cos, self.sin = d, *rope  # no buffers: those would be sent to all ranks in each forward
        self.q = nn.Linear(h, HEADS * d, bias=False)
        self.k, self.v = (nn.Linear(h, KV_HEADS * d, bias=False) for _ in range(2))
        self.out = nn.Linear(HEADS * d, h, bias=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (product(x).view(b, s, -1, self.head_dim).transpose(1, 2) for product in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        return self.out(o.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        h, f = model.hidden, model.sizes["f"]
        self.gate, self.up, self.down = (nn.Linear(*io, bias=False) for io in ((h, f), (h, f), (f, h)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, model: Model, rope: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(model.hidden, model.norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(model, rope), FeedForward(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden, model.norm_eps)
        self.output = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(x))


class Llama(nn.Module):
    """The units of the model that are named, all or those of one stage: ids or x -> x or logits."""

    def __init__(self, size: Size, units: tuple[str, ...] | None = None) -> None:
        super().__init__()
        model = size.model
        names = tuple(u.name for u in model.units()) if units is None else units
        rope = rope_tables(model, size.seq_len)
        self.embedding = nn.Embedding(model.vocab, model.hidden) if "embedding" in names else None
        numbers = [name.removeprefix("layers.") for name in names if name.startswith("layers.")]
        self.layers = nn.ModuleDict({n: Layer(model, rope) for n in numbers})
        self.head = Head(model) if "head" in names else None
        self.load_state_dict({k: w for k, w in whole_weights(size).items() if k.startswith(tuple(names))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def whole_weights(size: Size) -> dict[str, torch.Tensor]:
    """What one rank of ours begins with, by our names."""

    def found(comm: Comm) -> dict[str, torch.Tensor]:
        rank = build_rank(size.job(1), parse(f"mb={size.batch}"), comm, Labels())
        slots = [slot for state in rank.states.values() for slot in state.slots.values()]
        return {slot.record.name: slot.weight for slot in slots}

    return run_threads(1, found)[0]


def rope_tables(model: Model, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [s, d / 2]"""
    half = model.head_dim // 2
    frequency = (model.rope_theta or 1.0) ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
