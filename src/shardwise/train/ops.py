"""The differentiable operations of the blocks, each with an explicit list of what it saves.

Activations are [tokens, features], tokens = sequences * length, so that sequence parallelism cuts rows and no
collective needs a transpose. Sums run in the accumulation dtype. `model/blocks.py` declares what is saved here and
what lives meanwhile; a registry test and the memory proof hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.placement import Edge
from shardwise.train.redistribute import move
from shardwise.train.weights import Slot, WeightQueue
from shardwise.train.world import World

TP = ("tp",)
IGNORE = -100
"""A target that counts for nothing, as in torch's cross-entropy."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an op runs: its module name, its rank's world, its stream edges, and where weight gradients go."""

    name: str
    world: World
    queue: WeightQueue
    into: Edge
    """stream -> R, taken by the input of products"""
    out: Edge
    """P -> stream, taken by partial products"""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return move(x, self.into, self.world, TP, self.name)

    def leave(self, x: torch.Tensor, edge: Edge) -> torch.Tensor:
        return move(x, edge, self.world, TP, self.name, fresh=True)


class _Norm(torch.autograd.Function):
    """RMS norm (Zhang and Sennrich 2019, eq. 4). Hands its input on: its backward adds the residual's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slot: Slot, eps: float, wide: torch.dtype, place: Place) -> Any:
        rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)  # [t, 1]
        rstd.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        y = torch.mul(x, rstd).mul_(slot.weight).to(x.dtype)  # [t, h]
        ctx.save_for_backward(x, rstd)
        ctx.slot, ctx.queue, ctx.wide = slot, place.queue, wide
        ctx.set_materialize_grads(False)
        return y, x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gy, residual = gradients  # [t, h]; None where nobody took the residual
        x, rstd = ctx.saved_tensors
        slot: Slot = ctx.slot
        weight = slot.weight.to(ctx.wide)
        normed = torch.mul(x, rstd)  # [t, h]
        g = torch.mul(gy, normed)
        dw = g.sum(0)  # [h]
        mean = torch.mv(g, weight).mul_(1 / x.shape[-1])  # [t]
        torch.mul(gy, weight, out=g)
        g.addcmul_(normed, mean[:, None], value=-1).mul_(rstd)
        if residual is not None:
            g.add_(residual)
        del normed
        ctx.queue.put(lambda: slot.add(dw))
        return g.to(x.dtype), None, None, None, None


def rms_norm(
    x: torch.Tensor, slot: Slot, eps: float, wide: torch.dtype, place: Place
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed [t, h], x): carry the second on as the residual."""
    return _Norm.apply(x, slot, eps, wide, place)


class _Linear(torch.autograd.Function):
    """The one product function: every matrix product of the model, its edges and its weight gradients.

    Column form: the input takes stream -> R once for all products; the shard is saved and gathered again for the
    weight gradients. Row form: the partial product takes P -> stream and the residual is added.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        slots: tuple[Slot, ...],
        row: bool,
        place: Place,
        dead: bool,
    ) -> Any:
        ctx.save_for_backward(x)
        ctx.slots, ctx.row, ctx.place, ctx.residual = slots, row, place, residual is not None
        if dead:
            width = slots[0].parameter.shape[0]
            rows = x.shape[0] if residual is None else residual.shape[0]
            return x.new_empty(()).expand(rows, width)
        if not row:
            whole = place.enter(x)  # [T, m]
            return tuple(torch.mm(whole, s.weight.t()) for s in slots)  # [T, n / tp] each
        y = place.leave(torch.mm(x, slots[0].weight.t()), place.out)  # [t, n]
        return y if residual is None else y.add_(residual)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        slots, place, row = ctx.slots, ctx.place, ctx.row
        outer = move(gradients[0], place.out.dual, place.world, TP, place.name) if row else None
        whole = (outer,) if outer is not None else gradients  # [T, n / tp] each
        dx = torch.mm(whole[0], slots[0].weight)  # [T, m]
        for slot, g in zip(slots[1:], whole[1:], strict=True):
            dx.addmm_(g, slot.weight)
        if not row:
            dx = place.leave(dx, place.into.dual)  # [t, m]
        if place.queue.deferred is None and outer is not None:
            slots[0].add(torch.mm(outer.t(), x))
        else:
            # Detached, or the queue would hold the graph behind x.
            held = x.detach()
            place.queue.put(lambda: _weight_gradients(held, gradients, slots, row, place))
        return dx, gradients[0] if ctx.residual else None, None, None, None, None


def _weight_gradients(
    x: torch.Tensor, gradients: tuple[torch.Tensor, ...], slots: tuple[Slot, ...], row: bool, place: Place
) -> None:
    """gy^T x of each product [n / tp, m]; what was saved as a shard is gathered again."""
    whole = x if row else place.enter(x)
    for slot, g in zip(slots, gradients, strict=True):
        g_whole = move(g, place.out.dual, place.world, TP, place.name) if row else g
        slot.add(torch.mm(g_whole.t(), whole))


def column_linear(x: torch.Tensor, slots: tuple[Slot, ...], place: Place) -> tuple[torch.Tensor, ...]:
    """x [t, m] -> one [T, n / tp] a slot."""
    return _Linear.apply(x, None, slots, False, place, False)


def row_linear(x: torch.Tensor, slot: Slot, residual: torch.Tensor, place: Place, dead: bool = False) -> torch.Tensor:
    """x [T, m / tp], residual [t, n] -> [t, n]. `dead`: make the node alone, when only its backward is wanted."""
    return _Linear.apply(x, residual, (slot,), True, place, dead)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False) -> None:
    """Rotary embedding in place (Su et al. 2021, eq. 34; halves as in Llama's published weights).

    x [b, s, heads, d]; cos, sin [s, 1, d / 2]. `back` turns the other way: the transpose, for gradients.
    """
    first, second = x.chunk(2, -1)
    turned = first * sin
    sign = 1 if back else -1
    first.mul_(cos).addcmul_(second, sin, value=sign)
    second.mul_(cos)
    if back:
        second.sub_(turned)
    else:
        second.add_(turned)


class _Attention(torch.autograd.Function):
    """Rotary embedding and causal attention with grouped kv heads; saves q, k, v as rotated, the output and its LSE."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        head_dim: int,
    ) -> Any:
        seq = rope[0].shape[0]
        q4, k4, v4 = (x.view(-1, seq, x.shape[1] // head_dim, head_dim) for x in (q, k, v))  # [b, s, heads, d]
        # Nobody else holds q and k: they are fresh outputs of the products.
        rotate_(q4, *rope)
        rotate_(k4, *rope)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q4.transpose(1, 2), k4.transpose(1, 2), v4.transpose(1, 2), 0.0, True
        )
        o = out.transpose(1, 2).reshape(q.shape)  # [T, a * d / tp]
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rope, ctx.head_dim = rope, head_dim
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        q, k, v, o, lse = ctx.saved_tensors
        seq, d = ctx.rope[0].shape[0], ctx.head_dim
        g4, q4, k4, v4, o4 = (x.view(-1, seq, x.shape[1] // d, d).transpose(1, 2) for x in (gradient, q, k, v, o))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g4, q4, k4, v4, o4, lse, 0.0, True
        )
        grads = [x.transpose(1, 2) for x in (dq, dk, dv)]  # [b, s, heads, d]
        rotate_(grads[0], *ctx.rope, back=True)
        rotate_(grads[1], *ctx.rope, back=True)
        return *(g.reshape(x.shape) for g, x in zip(grads, (q, k, v), strict=True)), None, None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], head_dim: int
) -> torch.Tensor:
    """q [T, a * d / tp], k, v [T, kv * d / tp] -> [T, a * d / tp]. Writes the rotation into q and k."""
    return _Attention.apply(q, k, v, rope, head_dim)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up (Shazeer 2020, eq. 6); saves gate and up, the product is the next op's to save."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        gate, up = ctx.saved_tensors
        d_up = torch.nn.functional.silu(gate).mul_(gradient)
        d_gate = gradient * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, d_up


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up [T, f / tp] -> [T, f / tp]."""
    return _SwiGLU.apply(gate, up)


def _local_rows(ids: torch.Tensor, rows: int, place: Place) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(row numbers on this rank, mask of ids that live elsewhere; None where tp is 1). ids [T]"""
    if place.world.size("tp") == 1:
        return ids, None
    local = ids - rows * place.world.index("tp")
    outside = (local < 0).logical_or_(local >= rows)
    return local.masked_fill_(outside, 0), outside


class _Embed(torch.autograd.Function):
    """Vocabulary-parallel lookup. The weight is an input so that the graph has a leaf; its gradient is the slot's."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, ids: torch.Tensor, slot: Slot, place: Place) -> torch.Tensor:
        del leaf
        ctx.save_for_backward(ids)
        ctx.slot, ctx.place = slot, place
        local, outside = _local_rows(ids, slot.parameter.shape[0], place)
        x = torch.nn.functional.embedding(local, slot.weight)  # [T, h]
        if outside is not None:
            x.masked_fill_(outside[:, None], 0)
        return place.leave(x, place.out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        (ids,) = ctx.saved_tensors
        slot, place = ctx.slot, ctx.place
        place.queue.put(lambda: _embedding_gradient(gradient, ids, slot, place))
        return None, None, None, None


def _embedding_gradient(gradient: torch.Tensor, ids: torch.Tensor, slot: Slot, place: Place) -> None:
    """Add each token's gradient to its row, in the buffer's dtype."""
    record, parts = slot.record, slot.destination()
    whole = move(gradient, place.out.dual, place.world, TP, place.name)  # [T, h]
    local, outside = _local_rows(ids, record.shape[0], place)
    wide = whole.to(parts.dtype, copy=True)
    if outside is not None:
        wide.masked_fill_(outside[:, None], 0)
    shard = local.div(record.rows, rounding_mode="floor")
    row = local.remainder(record.rows)
    parts.unflatten(1, (record.rows, record.columns)).index_put_((shard, row), wide, accumulate=True)


def embed(ids: torch.Tensor, slot: Slot, place: Place) -> torch.Tensor:
    """ids [T] -> [t, h]."""
    return _Embed.apply(slot.parameter, ids, slot, place)


class _CrossEntropy(torch.autograd.Function):
    """Vocabulary-parallel cross-entropy, summed and scaled. Its gradient takes the place of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, place: Place
    ) -> torch.Tensor:
        world, name, wide = place.world, place.name, scale.dtype
        top = logits.amax(-1).to(wide)  # [T]
        world.all_reduce(top, TP, name, op="max")
        z = logits.to(wide).sub_(top[:, None])  # [T, v / tp]: the logits themselves where no cast is needed
        local, outside = _local_rows(targets.clamp(min=0), logits.shape[1], place)
        picked = z.gather(1, local[:, None]).squeeze(1)  # [T]
        if outside is not None:
            picked.masked_fill_(outside, 0)
        world.all_reduce(picked, TP, name)
        total = z.exp_().sum(-1)  # [T]
        world.all_reduce(total, TP, name)
        weight = (targets != IGNORE).to(wide).mul_(scale)  # [T]
        z.mul_((weight / total)[:, None])
        own = weight if outside is None else weight.masked_fill(outside, 0)
        z.scatter_add_(1, local[:, None], own.neg()[:, None])
        if z is not logits:
            logits.copy_(z)
        ctx.save_for_backward(logits)
        return total.log_().sub_(picked).mul_(weight).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        (d_logits,) = ctx.saved_tensors
        # Detached: what is saved of an input comes back with the graph that made it.
        return d_logits.detach().mul_(gradient), None, None, None


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, place: Place) -> torch.Tensor:
    """Sum over tokens of -log softmax(logits)[target] * scale, a scalar; logits [T, v / tp] are consumed.

    targets [T], IGNORE where a token does not count; scale: 1 / valid tokens of the whole step.
    """
    return _CrossEntropy.apply(logits, targets, scale, place)
