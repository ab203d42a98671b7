"""The model, written once: one hand-written forward a block kind. It asks for edges and weights by op name."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shardwise.model.spec import Model, Unit
from shardwise.placement import stream_edges
from shardwise.train import ops
from shardwise.train.ops import Place
from shardwise.train.weights import Slot, WeightQueue
from shardwise.train.world import World


@dataclass(frozen=True, slots=True)
class Context:
    """What the forwards of one rank share. `wide` is the accumulation dtype; `rope` (cos, sin) [s, 1, d / 2]."""

    model: Model
    world: World
    queue: WeightQueue
    sp: bool
    wide: torch.dtype
    rope: tuple[torch.Tensor, torch.Tensor]


class UnitModule:
    """The forward of one unit over the slots of its parameters (names relative to the unit)."""

    def __init__(self, unit: Unit, slots: dict[str, Slot], context: Context) -> None:
        self.unit, self.slots, self.context = unit, slots, context
        into, out = stream_edges(context.sp)
        self.places = {
            op.name: Place(f"{unit.name}.{op.name}" if op.name else unit.name, context.world, context.queue, into, out)
            for op in unit.block.ops
        }

    def norm(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        context = self.context
        return ops.rms_norm(x, self.slots[f"{name}.weight"], context.model.norm_eps, context.wide, self.places[name])

    def column(self, name: str, x: torch.Tensor, *weights: str) -> tuple[torch.Tensor, ...]:
        return ops.column_linear(x, tuple(self.slots[f"{w}.weight"] for w in weights), self.places[name])

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] -> x [t, h]"""
        return ops.embed(ids, self.slots["weight"], self.places[""])

    def layer(self, x: torch.Tensor, dead: bool = False) -> torch.Tensor:
        """x [t, h] -> [t, h]. `dead`: the output itself is not wanted (recomputation)."""
        context = self.context
        normed, residual = self.norm("attention_norm", x)
        q, k, v = self.column("attention.qkv", normed, "attention.q", "attention.k", "attention.v")
        del normed
        o = ops.attention(q, k, v, context.rope, context.model.head_dim)
        del q, k, v
        x = ops.row_linear(o, self.slots["attention.out.weight"], residual, self.places["attention.out"])
        del o, residual
        normed, residual = self.norm("mlp_norm", x)
        del x
        gate, up = self.column("mlp.gate_up", normed, "mlp.gate", "mlp.up")
        del normed
        product = ops.swiglu(gate, up)
        del gate, up
        return ops.row_linear(product, self.slots["mlp.down.weight"], residual, self.places["mlp.down"], dead)

    def head(self, x: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """x [t, h], targets [T] -> this micro-batch's part of the loss."""
        normed, _ = self.norm("norm", x)
        (logits,) = self.column("output", normed, "output")
        del normed
        return ops.cross_entropy(logits, targets, scale, self.places["loss"])


def rope_tables(model: Model, seq_len: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [s, 1, d / 2] of the rotary angles, computed in float64 and rounded once.

    Llama 3.1's scaling stretches long wavelengths by `factor` and blends in between (its published
    `rope_scaling`: low_freq_factor, high_freq_factor, original_max_position_embeddings).
    """
    half = model.head_dim // 2
    frequency = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if model.rope_scaling:
        scaling = dict(model.rope_scaling)
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / scaling["factor"])
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequency)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)
