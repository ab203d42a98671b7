"""What collectives compute, on the tensors of all ranks of a group at once, and what they require of arguments.

Sums run in rank order in the tensor's own dtype, so the thread backend and the gloo lowering agree bit for bit.
Every function reads all inputs before it writes an output, because an output may be a part of an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


def reduce_in_order(xs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """A new tensor: ((x0 + x1) + x2) + ..., or the elementwise maximum."""
    total = xs[0].clone()
    for x in xs[1:]:
        if op == "sum":
            total += x
        else:
            torch.maximum(total, x, out=total)
    return total


def all_reduce(outs: list[torch.Tensor], xs: list[torch.Tensor], op: str) -> None:
    total = reduce_in_order(xs, op)
    for out in outs:
        out.copy_(total)


def all_gather(outs: list[torch.Tensor], xs: list[torch.Tensor], _op: str) -> None:
    gathered = torch.cat([x.reshape(-1) for x in xs])
    for out in outs:
        out.view(-1).copy_(gathered)


def reduce_scatter(outs: list[torch.Tensor], xs: list[torch.Tensor], op: str) -> None:
    parts = reduce_in_order([x.view(-1) for x in xs], op).view(len(xs), -1)
    for out, part in zip(outs, parts, strict=True):
        out.view(-1).copy_(part)


def all_to_all(outs: list[torch.Tensor], xs: list[torch.Tensor], _op: str) -> None:
    parts = torch.stack([x.view(len(xs), -1) for x in xs])  # [from, to, part]
    for index, out in enumerate(outs):
        out.view(len(xs), -1).copy_(parts[:, index])


ARITHMETIC: dict[str, Callable[[list[torch.Tensor], list[torch.Tensor], str], None]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}


class HasType(Protocol):
    """A tensor, or what is remembered of one."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...


def type_text(x: HasType) -> str:
    """`float32[4, 8]`, for messages."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def require(out: torch.Tensor, x: torch.Tensor, numel: int) -> None:
    """Raise ValueError unless both are contiguous and `out` has `numel` elements of x's dtype."""
    if not (out.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"a communicated tensor is not contiguous: {type_text(x)} -> {type_text(out)}")
    if out.numel() != numel or out.dtype != x.dtype:
        raise ValueError(f"the output must have {numel} elements of {x.dtype}: {type_text(x)} -> {type_text(out)}")


def require_op(op: str) -> None:
    """Raise ValueError unless this is a reduction we know."""
    if op not in ("sum", "max"):
        raise ValueError(f"all_reduce: op is 'sum' or 'max', not {op!r}")


def require_divisible(x: torch.Tensor, parts: int) -> None:
    """Raise ValueError unless x splits into equal parts."""
    if x.numel() % parts:
        raise ValueError(f"{type_text(x)} does not split into {parts} equal parts")


def group_index(axes: tuple[str, ...], ranks: tuple[int, ...], rank: int, world_size: int) -> int:
    """The place of `rank` in the group; ValueError unless the ranks are ascending, in the world, and hold it."""
    ascending = list(ranks) == sorted(set(ranks))
    if rank not in ranks or not ascending or not 0 <= ranks[0] <= ranks[-1] < world_size:
        raise ValueError(f"group {axes}: {ranks} must be ascending, in 0 .. {world_size - 1}, and hold {rank}")
    return ranks.index(rank)
