"""Data parallelism: every rank holds the whole module, gradients are averaged while backward runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.train.wrap.collectives import AnyMesh, broadcast_all, data_ranks, require_same
from shardwise.train.wrap.reducer import MB, Reducer


def ddp(module: nn.Module, bucket_mb: float | None = 25.0, mesh: AnyMesh = None) -> Ddp:
    """Wrap `module` for data parallel training: rank 0's parameters and buffers go to all ranks, here, once.

    Gradients are averaged over the ranks in buckets of `bucket_mb` MB (10^6 bytes; None or <= 0: one for each
    parameter), from hooks, while backward runs. Call `finish_gradient_synchronization()` before the optimizer's step.
    `mesh`: a shardwise Mesh, a DeviceMesh of one dim, a ProcessGroup, or None for the world. Collective.
    Raises RuntimeError where no process group is open; ValueError where ranks hold different parameters or a
    parameter has no values yet.
    """
    return Ddp(module, bucket_mb, mesh)


class Ddp(nn.Module):
    """The wrapper that `ddp` makes; the module is `.module`, and the names in `state_dict` begin with `module.`."""

    def __init__(self, module: nn.Module, bucket_mb: float | None, mesh: AnyMesh) -> None:
        super().__init__()
        self.module = module
        ranks = data_ranks(mesh)
        named = list(module.named_parameters())
        require_values(named)
        require_same("parameters", [describe(name, p) for name, p in named], ranks)
        broadcast_all([*(p for _, p in named), *module.buffers()], ranks)
        self._reducer = Reducer([p for _, p in named], ranks, (bucket_mb or 0.0) * MB)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's. Raises RuntimeError after a backward whose gradients were never finished."""
        if torch.is_grad_enabled() and not self._reducer.paused:
            if self._reducer.open:
                raise RuntimeError(
                    "the last backward's gradients are not finished: call finish_gradient_synchronization() after it, "
                    "or run it inside no_sync() to accumulate"
                )
            self._reducer.refresh()
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the average over ranks; parameters that no rank used keep no gradient.

        Collective: each rank calls it after each backward that is not in `no_sync()`, in which it does nothing.
        """
        if not self._reducer.paused:
            self._reducer.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block add to the local gradients; the next one outside reduces the sum."""
        before, self._reducer.paused = self._reducer.paused, True
        try:
            yield
        finally:
            self._reducer.paused = before

    def __deepcopy__(self, memo: object) -> Ddp:
        raise TypeError("a data parallel wrapper cannot be copied: copy .module and wrap the copy")

    def __reduce__(self) -> Any:
        raise TypeError("a data parallel wrapper cannot be pickled: save .module.state_dict()")


def describe(name: str, p: nn.Parameter) -> str:
    """What ranks must agree on."""
    frozen = "" if p.requires_grad else ", frozen"
    return f"{name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')}{frozen}"


def require_values(named: list[tuple[str, nn.Parameter]]) -> None:
    """Raise ValueError, naming every parameter that is lazy or on the meta device."""
    empty = [name for name, p in named if nn.parameter.is_lazy(p) or p.is_meta]
    if empty:
        raise ValueError(f"{', '.join(empty)}: no values yet; give the module its shapes and a device first")
