"""What placements mean, written apart from the code that moves tensors between them."""

from __future__ import annotations

import torch

from shardwise.placement import Placement


def scatter(value: torch.Tensor, placement: Placement, rank: int, n: int) -> torch.Tensor:
    """One rank's tensor of a whole value so placed; partial sums are random parts that add up."""
    if placement.kind == "S":
        assert placement.dim is not None
        return value.chunk(n, placement.dim)[rank].clone()
    if placement.kind == "P":
        parts = [
            torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(100 + r))
            for r in range(n - 1)
        ]
        return parts[rank] if rank < n - 1 else value - torch.stack(parts).sum(0)
    return value.clone()


def whole(parts: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The value that all ranks' tensors mean together; replicas must be bit-equal."""
    if placement.kind == "S":
        assert placement.dim is not None
        return torch.cat(parts, placement.dim)
    if placement.kind == "P":
        return torch.stack(parts).sum(0)
    assert all(torch.equal(p, parts[0]) for p in parts)
    return parts[0]
