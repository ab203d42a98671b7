"""Edges on activations: `move` executes table 2 on tensors, `redistribute` is its one autograd function."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.collective import Kind
from shardwise.mesh import Axes
from shardwise.placement import Edge, Local
from shardwise.train.world import World


def move(x: torch.Tensor, edge: Edge, world: World, axes: Axes, module: str, fresh: bool = False) -> torch.Tensor:
    """The tensor after the edge's forward move along `axes`.

    Never writes into x, unless it is `fresh` (nobody else holds it), where an all-reduce may work in place. Where
    nothing moves, x itself is returned. An all-to-all or a slice cuts evenly: raises ValueError where it cannot.
    """
    group = world.groups[axes]
    what = edge.forward
    if group is None or what is Local.NOTHING:
        return x
    n, index = group.size, group.index
    if what is Kind.ALL_REDUCE:
        out = x if fresh else x.clone(memory_format=torch.contiguous_format)
        world.all_reduce(out, axes, module)
        return out
    if what is Kind.ALL_GATHER:
        dim = _dim(edge.source.dim)
        return _from_front(world.collect(what, _to_front(x, dim), axes, module), dim)
    if what is Kind.REDUCE_SCATTER:
        dim = _even(x, _dim(edge.destination.dim), n)
        return _from_front(world.collect(what, _to_front(x, dim), axes, module), dim)
    if what is Kind.ALL_TO_ALL:
        return _all_to_all(x, edge, world, axes, module, n)
    if what is Local.SLICE:
        dim = _even(x, _dim(edge.destination.dim), n)
        return x.chunk(n, dim)[index].contiguous()
    if what is Local.MASK:
        return x if index == 0 else torch.zeros_like(x)
    dim = _dim(edge.source.dim)
    whole = x.new_zeros([size * (n if d == dim else 1) for d, size in enumerate(x.shape)])
    whole.narrow(dim, index * x.shape[dim], x.shape[dim]).copy_(x)
    return whole


def _dim(dim: int | None) -> int:
    if dim is None:
        raise ValueError("a sharded placement without its dim")
    return dim


def _even(x: torch.Tensor, dim: int, n: int) -> int:
    if x.shape[dim] % n:
        raise ValueError(f"{n} ranks cannot cut dim {dim} of {tuple(x.shape)} evenly")
    return dim


def _to_front(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Collectives work along a contiguous dim 0."""
    return x.movedim(dim, 0).contiguous()


def _from_front(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.movedim(0, dim).contiguous()


def _all_to_all(x: torch.Tensor, edge: Edge, world: World, axes: Axes, module: str, n: int) -> torch.Tensor:
    """S(a) -> S(b): part j along b goes to rank j, parts are joined along a in rank order."""
    join, cut = _dim(edge.source.dim), _even(x, _dim(edge.destination.dim), n)
    parts = torch.stack(x.chunk(n, cut))  # [n, ..., size(cut) / n, ...]
    got = world.collect(Kind.ALL_TO_ALL, parts, axes, module)
    return torch.cat(got.unbind(0), join)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, edge: Edge, world: World, axes: Axes, module: str) -> torch.Tensor:
        ctx.back = edge.dual, world, axes, module
        out = move(x, edge, world, axes, module)
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        edge, world, axes, module = ctx.back
        return move(gradients[0], edge, world, axes, module), None, None, None, None


def redistribute(x: torch.Tensor, edge: Edge, world: World, axes: Axes, module: str) -> torch.Tensor:
    """x after the edge; its gradient takes the dual edge. Labelled `module` in the ledger."""
    return _Redistribute.apply(x, edge, world, axes, module)
