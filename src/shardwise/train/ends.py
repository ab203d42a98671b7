"""The operations at the model's two ends: embedding, learned positions, cross-entropy. They meet the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.train.ops import IGNORE, TP, Place
from shardwise.train.redistribute import move
from shardwise.train.weights import Slot


def _vocabulary(slot: Slot, place: Place) -> slice:
    """The rows of the vocabulary that this rank holds; there may be fewer than the slot has, and none."""
    return slot.record.box(place.world.index("tp"))[0]


def _local_rows(ids: torch.Tensor, rows: slice, place: Place) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(row numbers on this rank, mask of ids that live elsewhere; None where tp is 1). ids [T]"""
    if place.world.size("tp") == 1:
        return ids, None
    local = ids - rows.start
    outside = (local < 0).logical_or_(local >= rows.stop - rows.start)
    return local.masked_fill_(outside, 0), outside


class _Embed(torch.autograd.Function):
    """Vocabulary-parallel lookup. The unit's weights are inputs so that the graph has leaves; their gradients are the
    slots'."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, slot: Slot, place: Place, scale: float, *leaves: torch.Tensor
    ) -> torch.Tensor:
        del leaves
        ctx.save_for_backward(ids)
        ctx.slot, ctx.place, ctx.scale = slot, place, scale
        local, outside = _local_rows(ids, _vocabulary(slot, place), place)
        x = torch.nn.functional.embedding(local, slot.weight)  # [T, h]
        if outside is not None:
            x.masked_fill_(outside[:, None], 0)
        x = place.leave(x, place.out)
        return x if scale == 1 else x.mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        (ids,) = ctx.saved_tensors
        slot, place, scale = ctx.slot, ctx.place, ctx.scale
        place.queue.put(lambda: _embedding_gradient(gradient, ids, slot, place, scale))
        return (None,) * len(ctx.needs_input_grad)


def _embedding_gradient(gradient: torch.Tensor, ids: torch.Tensor, slot: Slot, place: Place, scale: float) -> None:
    """Add each token's gradient to its row, in the buffer's dtype."""
    parts = slot.destination()
    whole = move(gradient, place.out.dual, place.world, TP, place.name)  # [T, h]
    local, outside = _local_rows(ids, _vocabulary(slot, place), place)
    wide = whole.to(parts.dtype, copy=True)
    if outside is not None:
        wide.masked_fill_(outside[:, None], 0)
    if scale != 1:
        wide.mul_(scale)
    _add_rows(slot, local, wide)


def _add_rows(slot: Slot, rows: torch.Tensor, wide: torch.Tensor) -> None:
    """Sum wide [n, h] into rows [n] of the slot's gradient."""
    record = slot.record
    shard = rows.div(record.rows, rounding_mode="floor")
    row = rows.remainder(record.rows)
    parts = slot.destination().unflatten(1, (record.rows, record.columns))
    parts.index_put_((shard, row), wide, accumulate=True)


def embed(ids: torch.Tensor, slot: Slot, place: Place, leaves: tuple[Slot, ...], scale: float = 1.0) -> torch.Tensor:
    """ids [T] -> [t, h], times `scale`. `leaves`: every slot of the unit."""
    return _Embed.apply(ids, slot, place, scale, *(leaf.parameter for leaf in leaves))


class _Positions(torch.autograd.Function):
    """x + the learned row of each token's position."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slot: Slot, seq_len: int, place: Place) -> torch.Tensor:
        ctx.slot, ctx.seq_len, ctx.place = slot, seq_len, place
        return torch.nn.functional.embedding(_positions(x, seq_len, place), slot.weight).add_(x)  # [t, h]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        slot, seq_len, place = ctx.slot, ctx.seq_len, ctx.place

        def entry() -> None:
            wide = gradient.to(slot.destination().dtype, copy=True)
            _add_rows(slot, _positions(gradient, seq_len, place), wide)

        place.queue.put(entry)
        return gradient, None, None, None


def _positions(x: torch.Tensor, seq_len: int, place: Place) -> torch.Tensor:
    """Places in their sequences of the stream's tokens on this rank, x [t, ...] -> [t]."""
    rows = x.shape[0]
    cut = place.into.source.dim is not None
    first = rows * place.world.index(*TP) if cut else 0
    return torch.arange(first, first + rows, device=x.device).remainder_(seq_len)


def positions(x: torch.Tensor, slot: Slot, seq_len: int, place: Place) -> torch.Tensor:
    """x [t, h] -> [t, h]. The slot has at least `seq_len` rows."""
    return _Positions.apply(x, slot, seq_len, place)


@dataclass(frozen=True, slots=True)
class Cap:
    """Logits become value * tanh(logit / value); the backward takes so many `columns` of the vocabulary at a time."""

    value: float
    columns: int


@dataclass(frozen=True, slots=True)
class Output:
    """How logits are made of products: with which weight, and capped or not."""

    slot: Slot
    cap: Cap | None = None


class _CrossEntropy(torch.autograd.Function):
    """Vocabulary-parallel cross-entropy, summed and scaled. Its gradient takes the place of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, place: Place, output: Output
    ) -> torch.Tensor:
        world, name, wide, cap = place.world, place.name, scale.dtype, output.cap
        if cap is not None:
            logits.div_(cap.value).tanh_().mul_(cap.value)
        rows = _vocabulary(output.slot, place)
        # Padding takes no part: e^-inf is 0, in the sum and as a gradient.
        logits[:, rows.stop - rows.start :] = float("-inf")
        top = logits.amax(-1).to(wide)  # [T]
        world.all_reduce(top, TP, name, op="max")
        z = logits.to(wide).sub_(top[:, None])  # [T, v / tp]: the logits themselves where no cast is needed
        local, outside = _local_rows(targets.clamp(min=0), rows, place)
        picked = z.gather(1, local[:, None]).squeeze(1)  # [T]
        if outside is not None:
            picked.masked_fill_(outside, 0)
        world.all_reduce(picked, TP, name)
        total = z.exp_().sum(-1)  # [T]
        world.all_reduce(total, TP, name)
        weight = (targets != IGNORE).to(wide).mul_(scale)  # [T]
        target_weight = weight
        if cap is not None:
            _uncap_(z, top, cap)
            target_weight = _slope(picked + top, cap.value).mul_(weight)
        z.mul_((weight / total)[:, None])
        own = target_weight if outside is None else target_weight.masked_fill(outside, 0)
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
        return d_logits.detach().mul_(gradient), None, None, None, None


def _slope(capped: torch.Tensor, cap: float) -> torch.Tensor:
    """d capped / d logit = 1 - (capped / cap)^2, in the place of `capped`."""
    return capped.div_(cap).clamp_(-1, 1).square_().neg_().add_(1)


def _uncap_(z: torch.Tensor, top: torch.Tensor, cap: Cap) -> None:
    """exp(capped - top) [T, v / tp] times the cap's slope, a piece of the vocabulary at a time.

    The capped logits are read back from their exponentials: there is no second tensor of this size.
    """
    for piece in z.split(cap.columns, 1):
        piece.mul_(_slope(torch.log(piece).add_(top[:, None]), cap.value))


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, place: Place, output: Output
) -> torch.Tensor:
    """Sum over tokens of -log softmax(logits)[target] * scale, a scalar; logits [T, v / tp] are consumed.

    targets [T], IGNORE where a token does not count; scale: 1 / valid tokens of the whole step. Columns beyond the
    vocabulary count for nothing.
    """
    return _CrossEntropy.apply(logits, targets, scale, place, output)
