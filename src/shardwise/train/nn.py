"""The model, written once: one hand-written forward a block kind. It asks for edges and weights by op name.

Families differ in which ops a block has (`model/families`) and in mathematics that changes no tensor (`Form`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from shardwise.model.families.forms import form_of
from shardwise.model.spec import Model, Op, Unit
from shardwise.placement import stream_edges
from shardwise.train import attention, ends, ops
from shardwise.train.again import Again, Remake
from shardwise.train.ops import Affine, NormForm, Place
from shardwise.train.weights import Slot, WeightQueue
from shardwise.train.world import World


@dataclass(frozen=True, slots=True)
class Context:
    """What the forwards of one rank share. `wide` is the accumulation dtype; `rope` as of `rope_tables`; `recompute`
    names groups of ops that are computed again by themselves (whole layers are the executor's business)."""

    model: Model
    world: World
    queue: WeightQueue
    sp: bool
    wide: torch.dtype
    rope: tuple[torch.Tensor, torch.Tensor]
    recompute: str = "none"


class UnitModule:
    """The forward of one unit over the slots of its parameters (names relative to the unit)."""

    def __init__(self, unit: Unit, slots: dict[str, Slot], context: Context) -> None:
        self.unit, self.slots, self.context = unit, slots, context
        self.form = form_of(context.model)
        into, out = stream_edges(context.sp)
        self.places = {
            op.name: Place(f"{unit.name}.{op.name}" if op.name else unit.name, context.world, context.queue, into, out)
            for op in unit.block.ops
        }
        partly = context.recompute not in ("none", "full")
        kinds = {op.kind for op in unit.block.again(context.recompute)} if partly else set[str]()
        self.again = Again(kinds, context.world.labels)
        self.norms = {op.name: self._norm_form(op) for op in unit.block.ops if op.kind == "norm"}
        self.scores, self.rope = self._attention_form()

    def _norm_form(self, op: Op) -> NormForm:
        return NormForm(
            eps=self.context.model.norm_eps,
            wide=self.context.wide,
            centred=any(k.name == "mean" for k in op.keeps),
            offset=self.form.norm_offset,
            spread=any(p.tp_dim is not None for p in op.parameters),
        )

    def _attention_form(self) -> tuple[attention.Scores, attention.Rope | None]:
        """How this unit's attention scores, and the rotation of its queries and keys."""
        model, form, (cos, sin) = self.context.model, self.form, self.context.rope
        window = next((op.window for op in self.unit.block.ops if op.kind == "attention"), None)
        scores = attention.Scores(cos.shape[1], model.head_dim, form.score_scale, window, form.score_cap)
        table = 1 if window is not None and form.local_theta is not None else 0
        return scores, (cos[table], sin[table]) if model.rope_theta else None

    def affine(self, name: str) -> Affine:
        return Affine(self.slots.get(f"{name}.weight"), self.slots.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.norm(x, self.affine(name), self.norms[name], self.places[name])

    def norm_inside(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Of q or k. Attention rotates the result in its place; so does a second run."""
        norm = partial(ops.norm_inside, own=self.affine(name), form=self.norms[name], place=self.places[name])

        def second(x: torch.Tensor) -> torch.Tensor:
            return attention.turned_(norm(x).detach(), self.rope, self.scores)

        return self.again.run("norm", Remake(norm, second, kept=1), x)

    def column(self, name: str, x: torch.Tensor, *weights: str, hand: bool = False) -> tuple[torch.Tensor, ...]:
        return ops.column_linear(x, tuple(self.affine(w) for w in weights), self.places[name], hand)

    def opened(self, sublayer: str, product: str, x: torch.Tensor, *weights: str) -> tuple[torch.Tensor, ...]:
        """The sublayer's first products, behind a norm where the family has one there; and the residual."""
        name = f"{sublayer}_norm"
        if name not in self.places:
            return self.column(product, x, *weights, hand=True)

        norm = partial(self.norm, name)
        normed, residual = self.again.run("norm", Remake(norm, norm, kept=1), x)
        return *self.column(product, normed, *weights), residual

    def closed(
        self, sublayer: str, product: str, inner: list[torch.Tensor], residual: torch.Tensor, dead: bool
    ) -> torch.Tensor:
        """The sublayer's last product of `inner` (one tensor, taken out), normed where the family does, plus the
        residual."""
        own, place, name = self.affine(product), self.places[product], f"{sublayer}_post_norm"
        if name not in self.places:
            return ops.row_linear(inner.pop(), own, residual, place, dead)
        made = ops.row_linear(inner.pop(), own, None, place)
        norm = partial(ops.norm_after, own=self.affine(name), form=self.norms[name], place=self.places[name])
        if sublayer == "attention":
            return self.again.run("norm", Remake(norm, norm, kept=1), made, residual)
        # The unit's own output is read by nobody in its backward: a second run needs no residual.
        last = Remake(partial(norm, residual=residual, dead=dead), lambda z: norm(z, z, dead=True), kept=1, read=False)
        return self.again.run("norm", last, made)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] -> x [t, h]"""
        leaves = tuple(self.slots.values())
        x = ends.embed(ids, self.slots["weight"], self.places[""], leaves, self.form.embedding_scale)
        if "positions" not in self.places:
            return x
        return ends.positions(x, self.slots["positions.weight"], self.scores.seq_len, self.places["positions"])

    def layer(self, x: torch.Tensor, dead: bool = False) -> torch.Tensor:
        """x [t, h] -> [t, h]. `dead`: the output itself is not wanted (recomputation)."""
        with self.again.forward():
            return self.mlp(self.attention(x), dead)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, residual = self.opened("attention", "attention.qkv", x, "attention.q", "attention.k", "attention.v")
        if "attention.q_norm" in self.places:
            q = self.norm_inside("attention.q_norm", q)
            k = self.norm_inside("attention.k_norm", k)
        rotated = partial(attention.attention, rope=None, scores=self.scores)
        # Of q, k, v, the output and its log-sum-exp the last one is made again, from q and k as they were rotated.
        core = Remake(partial(rotated, rope=self.rope), rotated, kept=4, read=False)
        inner = [self.again.run("attention", core, q, k, v)]
        del q, k, v
        return self.closed("attention", "attention.out", inner, residual, dead=False)

    def mlp(self, x: torch.Tensor, dead: bool) -> torch.Tensor:
        name = self.form.activation
        if "mlp.gate_up" in self.places:
            gate, up, residual = self.opened("mlp", "mlp.gate_up", x, "mlp.gate", "mlp.up")
            gated = partial(ops.gated, name=name)
            inner = [self.again.run("swiglu", Remake(gated, gated, kept=2), gate, up)]
            del gate, up
        else:
            up, residual = self.opened("mlp", "mlp.up", x, "mlp.up")
            active = partial(ops.activation, name=name)
            inner = [self.again.run("activation", Remake(active, active, kept=1), up)]
            del up
        return self.closed("mlp", "mlp.down", inner, residual, dead)

    def head(self, x: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """x [t, h], targets [T] -> this micro-batch's part of the loss."""
        normed, _ = self.norm("norm", x)
        (logits,) = self.column("output", normed, "output")
        del normed
        cap = self.form.logit_cap
        capped = None if cap is None else ends.Cap(cap, self.context.model.head_dim)
        made = ends.Output(self.slots["output.weight"], capped)
        return ends.cross_entropy(logits, targets, scale, self.places["loss"], made)


def rope_tables(model: Model, seq_len: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [bases, s, 1, d / 2] of the rotary angles, computed in float64 and rounded once.

    One base, or two where windowed layers turn by another one. A linear scaling stretches all wavelengths by `factor`
    (Chen et al. 2306.15595), Llama 3.1's the long ones, and blends in between (its published `rope_scaling`:
    low_freq_factor, high_freq_factor, original_max_position_embeddings).
    """
    half = model.head_dim // 2
    local = form_of(model).local_theta
    powers = -torch.arange(half, dtype=torch.float64) / half
    frequencies = [_stretched(model, (model.rope_theta or 1.0) ** powers)]
    if local is not None:
        frequencies.append(local**powers)
    turns = torch.outer(torch.arange(seq_len, dtype=torch.float64), torch.cat(frequencies))
    angle = turns.view(seq_len, -1, half).transpose(0, 1)[:, :, None].contiguous()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _stretched(model: Model, frequency: torch.Tensor) -> torch.Tensor:
    if not model.rope_scaling:
        return frequency
    scaling = dict(model.rope_scaling)
    if scaling.keys() == {"factor"}:
        return frequency / scaling["factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling["factor"])
