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


@dataclass(frozen=True, slots=True)
class NormForm:
    """How a norm computes. `centred`: LayerNorm; `offset`: it multiplies by 1 + weight (Gemma); `spread`: its features
    are cut over tp, so that ranks sum their squares."""

    eps: float
    wide: torch.dtype
    centred: bool = False
    offset: bool = False
    spread: bool = False

    def factor(self, slot: Slot) -> torch.Tensor:
        """What normed values are multiplied by [n], wide."""
        weight = slot.weight
        return torch.ones_like(weight, dtype=self.wide).add_(weight) if self.offset else weight.to(self.wide)


@dataclass(frozen=True, slots=True)
class Affine:
    """A weight and a bias; a norm may have neither."""

    weight: Slot | None
    bias: Slot | None = None


class _Norm(torch.autograd.Function):
    """RMS norm (Zhang and Sennrich 2019, eq. 4) or LayerNorm (Ba et al. 2016, eq. 4) of the last dim.

    Without `added` it hands its input on: its backward adds the residual's gradient. `added` is summed to the result,
    and takes the incoming gradient. `dead`: make the node alone.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, added: torch.Tensor | None, own: Affine, form: NormForm, place: Place, dead: bool
    ) -> Any:
        n, wide = x.shape[-1], form.wide
        mean = x.mean(-1, keepdim=True, dtype=wide) if form.centred else None  # [t, 1]
        y = x if mean is None else torch.sub(x, mean)
        rstd = torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=wide).square_()  # [t, 1]
        if form.spread:
            place.world.all_reduce(rstd, TP, place.name)
            n *= place.world.size(*TP)
        rstd.mul_(1 / n).add_(form.eps).rsqrt_()
        ctx.save_for_backward(x, *(() if mean is None else (mean,)), rstd)
        ctx.own, ctx.form, ctx.place, ctx.handed = own, form, place, added is None
        ctx.set_materialize_grads(False)
        if dead:
            return x.new_empty(()).expand(x.shape)
        y = torch.mul(x, rstd) if mean is None else y.mul_(rstd)  # [t, n]
        if own.weight is not None:
            y.mul_(form.factor(own.weight) if form.offset else own.weight.weight)
        if own.bias is not None:
            y.add_(own.bias.weight)
        y = y.to(x.dtype)
        return (y, x) if added is None else y.add_(added)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gy, residual = gradients if ctx.handed else (gradients[0], None)  # [t, n]; None where nobody took the residual
        form, own, place = ctx.form, ctx.own, ctx.place
        x, *mean, rstd = ctx.saved_tensors
        normed = torch.sub(x, mean[0]).mul_(rstd) if form.centred else torch.mul(x, rstd)  # [t, n]
        g = torch.mul(gy, normed)
        n, weight, dw = g.shape[-1], None, None
        if own.weight is None:
            along = g.sum(-1)  # [t]
            g.copy_(gy)
        else:
            weight = form.factor(own.weight)
            dw = g.sum(0)  # [n]
            along = torch.mv(g, weight)
            torch.mul(gy, weight, out=g)
        if form.spread:
            place.world.all_reduce(along, TP, place.name)
            n *= place.world.size(*TP)
        g.addcmul_(normed, along.mul_(1 / n)[:, None], value=-1)
        if form.centred:
            g.sub_(g.mean(-1, keepdim=True))
        g.mul_(rstd)
        if residual is not None:
            g.add_(residual)
        del normed
        if own.weight is not None:
            place.queue.put(lambda: own.weight.add(dw))
        if own.bias is not None:
            db = gy.sum(0, dtype=form.wide)
            place.queue.put(lambda: own.bias.add(db))
        return g.to(x.dtype), None if ctx.handed else gradients[0], None, None, None, None


def norm(x: torch.Tensor, own: Affine, form: NormForm, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed [t, h], x): carry the second on as the residual."""
    return _Norm.apply(x, None, own, form, place, False)


def norm_after(
    x: torch.Tensor, residual: torch.Tensor, own: Affine, form: NormForm, place: Place, dead: bool = False
) -> torch.Tensor:
    """norm(x) + residual, [t, h]. `dead`: make the node alone, when only its backward is wanted."""
    return _Norm.apply(x, residual, own, form, place, dead)


def norm_inside(x: torch.Tensor, own: Affine, form: NormForm, place: Place) -> torch.Tensor:
    """Norm over every `weight`-sized part of the features: x [T, parts * n] -> the same."""
    assert own.weight is not None
    return _Norm.apply(x.view(-1, own.weight.parameter.shape[0]), None, own, form, place, False)[0].view(x.shape)


class _Linear(torch.autograd.Function):
    """The one product function: every matrix product of the model, its edges and its weight gradients.

    Column form: the input takes stream -> R once for all products; the shard is saved and gathered again for the
    weight gradients. `hand`: it is handed on as the residual, whose gradient the backward adds. Row form: the partial
    product takes P -> stream, bias and residual are added.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, products: tuple[Affine, ...], call: Call
    ) -> Any:
        place = call.place
        ctx.save_for_backward(x)
        ctx.products, ctx.call, ctx.residual = products, call, residual is not None
        if call.dead:
            width = _of(products[0].weight).parameter.shape[0]
            rows = x.shape[0] if residual is None else residual.shape[0]
            return x.new_empty(()).expand(rows, width)
        if not call.row:
            whole = place.enter(x)  # [T, m]
            made = tuple(_product(whole, p) for p in products)  # [T, n / tp] each
            return (*made, x) if call.hand else made
        y = place.leave(torch.mm(x, _of(products[0].weight).weight.t()), place.out)  # [t, n]
        if (bias := products[0].bias) is not None:
            y.add_(bias.weight)
        return y if residual is None else y.add_(residual)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        products, call, place = ctx.products, ctx.call, ctx.call.place
        outer = move(gradients[0], place.out.dual, place.world, TP, place.name) if call.row else None
        whole = (outer,) if outer is not None else gradients[: len(products)]  # [T, n / tp] each
        dx = torch.mm(whole[0], _of(products[0].weight).weight)  # [T, m]
        for p, g in zip(products[1:], whole[1:], strict=True):
            dx.addmm_(g, _of(p.weight).weight)
        if not call.row:
            dx = place.leave(dx, place.into.dual)  # [t, m]
        if call.hand:
            dx.add_(gradients[-1])
        if place.queue.deferred is None and outer is not None:
            _of(products[0].weight).add_product(outer, x)
            _add_bias(products[0], gradients[0])
        else:
            # Detached, or the queue would hold the graph behind x.
            held = x.detach()
            place.queue.put(lambda: _weight_gradients(held, gradients, products, call))
        return dx, gradients[0] if ctx.residual else None, None, None


@dataclass(frozen=True, slots=True)
class Call:
    """How a product is called; `dead`: make the node alone, when only its backward is wanted."""

    place: Place
    row: bool
    dead: bool = False
    hand: bool = False


def _of(slot: Slot | None) -> Slot:
    assert slot is not None, "every product has a weight"
    return slot


def _product(x: torch.Tensor, p: Affine) -> torch.Tensor:
    weight = _of(p.weight).weight.t()
    return torch.mm(x, weight) if p.bias is None else torch.addmm(p.bias.weight, x, weight)


def _weight_gradients(
    x: torch.Tensor, gradients: tuple[torch.Tensor, ...], products: tuple[Affine, ...], call: Call
) -> None:
    """gy^T x of each product [n / tp, m], and of its bias; what was saved as a shard is gathered again."""
    place = call.place
    whole = x if call.row else place.enter(x)
    for p, g in zip(products, gradients, strict=False):  # behind them the residual's, which is held as long
        g_whole = move(g, place.out.dual, place.world, TP, place.name) if call.row else g
        _of(p.weight).add_product(g_whole, whole)
        _add_bias(p, g)


def _add_bias(p: Affine, gradient: torch.Tensor) -> None:
    """The sum over this rank's tokens: of all of them for a column product, of the stream's for a row product."""
    if p.bias is not None:
        p.bias.add(gradient.sum(0, dtype=p.bias.destination().dtype))


def column_linear(
    x: torch.Tensor, products: tuple[Affine, ...], place: Place, hand: bool = False
) -> tuple[torch.Tensor, ...]:
    """x [t, m] -> one [T, n / tp] a product; with `hand` x itself behind them, to carry on as the residual."""
    return _Linear.apply(x, None, products, Call(place, row=False, hand=hand))


def row_linear(
    x: torch.Tensor, product: Affine, residual: torch.Tensor | None, place: Place, dead: bool = False
) -> torch.Tensor:
    """x [T, m / tp], residual [t, n] or None -> [t, n]. `dead`: make the node alone."""
    return _Linear.apply(x, residual, (product,), Call(place, row=True, dead=dead))


def _activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """`silu`, `gelu`, or `gelu_tanh`, its approximation (Hendrycks and Gimpel 1606.08415, section 2)."""
    F = torch.nn.functional
    return F.silu(x) if name == "silu" else F.gelu(x, approximate=APPROXIMATE[name])


APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def _activation_gradient_(gradient: torch.Tensor, x: torch.Tensor, name: str, out: torch.Tensor) -> None:
    """gradient * f'(x) into `out`."""
    if name == "silu":
        torch.ops.aten.silu_backward.grad_input(gradient, x, grad_input=out)
    else:
        torch.ops.aten.gelu_backward.grad_input(gradient, x, approximate=APPROXIMATE[name], grad_input=out)


class _Gated(torch.autograd.Function):
    """f(gate) * up (Shazeer 2020, eq. 6); saves gate and up, the product is the next op's to save."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return _activate(gate, name).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        gate, up = ctx.saved_tensors
        d_up = _activate(gate, ctx.name).mul_(gradient)
        d_gate = gradient * up
        _activation_gradient_(d_gate, gate, ctx.name, d_gate)
        return d_gate, d_up, None


def gated(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """gate, up [T, f / tp] -> [T, f / tp]."""
    return _Gated.apply(gate, up, name)


class _Activation(torch.autograd.Function):
    """f(x); saves x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        return _activate(x, name)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _activation_gradient_(gradients[0], x, ctx.name, dx)
        return dx, None


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """x [T, f / tp] -> [T, f / tp]."""
    return _Activation.apply(x, name)
