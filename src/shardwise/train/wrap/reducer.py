"""Gradients of replicated parameters, averaged in buckets while backward still runs.

A bucket is launched when the gradients of all its parameters have arrived and all buckets before it are launched: the
order is the same on every rank, whatever order the gradients come in (Li et al. 2020, PyTorch Distributed, 3.2.3).
What never arrived is launched by `finish`, zeros for each missing gradient. Every bucket ends with one count a
parameter, so that a parameter without a gradient on any rank keeps none, as in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from shardwise.train.wrap.collectives import Ranks, pieces, start_all_reduce

MB = 1_000_000

AGAIN = (
    "a gradient arrived after its bucket was reduced: call finish_gradient_synchronization() after each backward, and "
    "run all backwards but the last inside no_sync() (also where one module runs in several reentrant checkpoints)"
)


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters of one dtype and device; `flat` [numel + one count a parameter] exists while it is reduced, `parts`
    are its views of the parameters' shapes."""

    parameters: list[torch.nn.Parameter]
    missing: set[int] = field(default_factory=set[int])
    flat: torch.Tensor | None = None
    parts: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    work: dist.Work | None = None
    used: list[bool] = field(default_factory=list[bool])
    late: bool = False
    """more gradients came after the launch"""

    def reset(self) -> None:
        self.missing = set(range(len(self.parameters)))
        self.flat, self.parts, self.work, self.used, self.late = None, [], None, [], False

    @torch.no_grad()
    def launch(self, ranks: Ranks) -> None:
        """Take the gradients, divided by the ranks, and start their sum."""
        self.used = [p.grad is not None for p in self.parameters]
        sizes = [p.numel() for p in self.parameters]
        self.flat = self.parameters[0].new_empty(sum(sizes) + len(sizes))
        *flats, counts = self.flat.split([*sizes, len(sizes)])
        self.parts = [flat.view(p.shape) for flat, p in zip(flats, self.parameters, strict=True)]
        for p, part in zip(self.parameters, self.parts, strict=True):
            if p.grad is None:
                part.zero_()
            else:
                torch.div(p.grad, ranks.size, out=part)
                p.grad = None  # the bucket has it: the peak is the gradients and one bucket
        if all(self.used):
            counts.fill_(1)
        else:
            counts.copy_(counts.new_tensor(self.used))
        self.work = start_all_reduce(self.flat, ranks)

    def land(self) -> None:
        """Averages become views of the bucket."""
        if self.flat is None or self.work is None:
            raise RuntimeError("a bucket was waited for before its reduction began")
        self.work.wait()
        counts = None if all(self.used) else self.flat[-len(self.used) :].tolist()
        for i, (p, average) in enumerate(zip(self.parameters, self.parts, strict=True)):
            if counts is None or counts[i] > 0:
                p.grad = average if p.grad is None else p.grad + average
        self.reset()


class Reducer:
    """Buckets over `parameters` in reverse order, about the order in which backward reaches them.

    `bucket_bytes` <= 0: a bucket for each parameter. Frozen parameters are in no bucket; `refresh` notices changes.
    `alike`: all ranks run the same modules, so a gradient that comes after its bucket was launched comes so on every
    rank, and `finish` reduces that bucket again. Elsewhere it raises RuntimeError.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], ranks: Ranks, bucket_bytes: float, alike: bool = False
    ) -> None:
        self.parameters, self.ranks, self.bucket_bytes, self.alike = list(parameters), ranks, bucket_bytes, alike
        self.paused = False
        self.open = False
        """a gradient has arrived since the last `finish`, outside a pause"""
        self._trainable: list[bool] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.buckets: list[Bucket] = []
        self._next = 0
        self.refresh()

    def refresh(self) -> None:
        """Follow changes of `requires_grad`; the same on every rank."""
        trainable = [p.requires_grad for p in self.parameters]
        if trainable == self._trainable:
            return
        self.close()
        self._trainable = trainable
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for p in reversed(self.parameters):
            if p.requires_grad:
                kinds.setdefault((p.dtype, p.device), []).append(p)
        runs = [run for same in kinds.values() for run in pieces(same, self.bucket_bytes)]
        self.buckets = [Bucket([p for p in run if isinstance(p, torch.nn.Parameter)]) for run in runs]
        for bucket in self.buckets:
            bucket.reset()
            for i, p in enumerate(bucket.parameters):
                self._hooks.append(p.register_post_accumulate_grad_hook(partial(self._arrived, bucket, i)))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arrived(self, bucket: Bucket, index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise RuntimeError("a gradient is sparse, wanted dense: build the embedding with sparse=False")
        if self.paused:
            return
        if bucket.flat is not None:
            if not self.alike:
                raise RuntimeError(AGAIN)
            bucket.late = True
            return
        self.open = True
        bucket.missing.discard(index)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch_next()

    def _launch_next(self) -> None:
        self.buckets[self._next].launch(self.ranks)
        self._next += 1

    def abandon(self) -> None:
        """Forget a backward that failed on every rank: what is under way is waited for and dropped."""
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.reset()
        self._next = 0
        self.open = False

    def finish(self) -> None:
        """Launch what is left, wait for all; every rank then has the same averages in `.grad`. Collective."""
        while self._next < len(self.buckets):
            self._launch_next()
        for bucket in self.buckets:
            late = bucket.late
            bucket.land()
            if late:  # the average is equal on all ranks: averaging it again with what came late changes nothing of it
                bucket.launch(self.ranks)
                bucket.land()
        self._next = 0
        self.open = False
