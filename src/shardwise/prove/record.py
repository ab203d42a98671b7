"""The recorder: what one rank really issues and holds, read off torch's dispatcher.

Labels are declared by the runtime; quantities are not. Kind, bytes, dtype and global ranks of a collective come from
the dispatched operation alone, and memory from the storages that operations return. Nothing is ever corrected.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwise.collective import Collective, Kind, Labels, Ledger

Payload = Callable[[tuple[Any, ...]], torch.Tensor]

_COLLECTIVES: dict[str, tuple[Kind, Payload]] = {
    "allreduce_": (Kind.ALL_REDUCE, lambda args: args[0][0]),
    "_allgather_base_": (Kind.ALL_GATHER, lambda args: args[0]),
    "_reduce_scatter_base_": (Kind.REDUCE_SCATTER, lambda args: args[1]),
    "alltoall_base_": (Kind.ALL_TO_ALL, lambda args: args[0]),
    "send": (Kind.SEND, lambda args: args[0][0]),
    "recv_": (Kind.RECV, lambda args: args[0][0]),
}
"""Dispatched name -> kind, and the tensor that is the payload: the whole one."""


class Recorder(TorchDispatchMode):
    """Collects a ledger and the peak of live tensor bytes while it is active, for one rank of this process."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()
        self.labels = labels
        self.ledger: Ledger = Counter()
        self.live_bytes = self.peak_bytes = 0
        self.peak_at = ""
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def start(self) -> None:
        """Forget the ledger and the peak so far; what lives stays counted."""
        self.ledger.clear()
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args)
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                self._track(x.untyped_storage())
        return out

    def _collective(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.overloadpacket.__name__
        if name not in _COLLECTIVES:
            raise RuntimeError(f"the runtime issued {func}, for which the ledger has no word")
        kind, payload_of = _COLLECTIVES[name]
        payload = payload_of(args)
        handle = next(a for a in args if isinstance(a, torch.ScriptObject))
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(handle)))
        if kind in (Kind.SEND, Kind.RECV):
            peer, me = ranks[args[2]], dist.get_rank()
            ranks = (me, peer) if kind is Kind.SEND else (peer, me)
        size = payload.numel() * payload.element_size()
        dtype = str(payload.dtype).removeprefix("torch.")
        self.ledger[Collective(self.labels.key, kind, ranks, size, dtype)] += 1

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()

        def freed(_: object) -> None:
            self.live_bytes -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, freed)
        self.live_bytes += size
        labels = self.labels
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_at = f"{labels.module or 'step'} / {labels.phase or '-'}"
