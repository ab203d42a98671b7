"""The optimizers on the shards of the model state, one clip norm, and the count of tokens: what a step does beside its
row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from shardwise.collective import Phase
from shardwise.mesh import DATA, REPORT, SHARDED
from shardwise.plan.optimizer import ADAMW, OptimizerSpec
from shardwise.plan.settings import TrainSettings
from shardwise.train.ops import IGNORE
from shardwise.train.unit import UnitState
from shardwise.train.world import World

Kernel = Literal["fused", "foreach", "in place"]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The numbers of an update; `clip_norm` bounds the gradient's norm, 1-D parameters are not decayed.

    `betas` and `eps` are AdamW's, `momentum` is that of SGD with momentum.
    """

    learning_rate: float
    weight_decay: float
    clip_norm: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9

    @staticmethod
    def of(settings: TrainSettings) -> OptimizerSettings:
        """The part of a plan's settings that the optimizer takes."""
        s = settings
        return OptimizerSettings(s.learning_rate, s.weight_decay, s.clip_norm, (s.beta1, s.beta2), s.eps, s.momentum)


def kernel_of(spec: OptimizerSpec, device: str) -> Kernel:
    """How a step is computed on a type of device: AdamW by torch's one kernel, where that exists for it, SGD by up to
    three operations in place. Neither allocates; foreach takes the bytes of one more gradient for a while."""
    if spec is not ADAMW:
        return "in place"
    return "fused" if device in ("meta", *_get_fused_kernels_supported_devices()) else "foreach"


class Flat(NamedTuple):
    """One flat view that is stepped: the 1-D parameters of a storage's shard, or the others, which alone decay."""

    state: UnitState
    rows: slice
    decays: bool

    @property
    def master(self) -> torch.Tensor:
        return self.state.master[self.rows].detach()

    @property
    def gradient(self) -> torch.Tensor:
        return self.state.gradient_shard[self.rows]

    def moments(self) -> dict[str, torch.Tensor]:
        return {name: whole[self.rows] for name, whole in self.state.moments.items()}


def flat_views(states: Iterable[UnitState]) -> list[Flat]:
    """Of every storage, the views that are not empty."""
    found: list[Flat] = []
    for state in states:
        vector, end = state.storage.vector_numel, state.storage.shard_numel
        views = Flat(state, slice(0, vector), False), Flat(state, slice(vector, end), True)
        found += [view for view in views if view.rows.start < view.rows.stop]
    return found


class Optimizer:
    """Steps every storage's master shard, by the update of its kind, and publishes the weights."""

    def __init__(self, states: Iterable[UnitState], spec: OptimizerSpec, settings: OptimizerSettings) -> None:
        self.states, self.settings = list(states), settings
        self._views = flat_views(self.states)
        self._update: _Update = (_AdamW if spec is ADAMW else _Sgd)(self._views, settings)

    def set_learning_rate(self, value: float) -> None:
        """Of the steps to come."""
        self._update.set_learning_rate(value)

    def set_steps(self, steps: int) -> None:
        """How many steps the state has seen: AdamW corrects its moments' bias by them."""
        self._update.set_steps(steps)

    def step(self, norm: torch.Tensor) -> None:
        """Clip by the one norm, step the master shards, publish the weights."""
        coefficient = (self.settings.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [view.gradient.mul_(coefficient) for view in self._views]
        self._update.step(gradients)
        for state in self.states:
            state.publish()


class _Update(Protocol):
    """One way to step flat views, whose gradients [in their order] it may overwrite."""

    def set_learning_rate(self, value: float) -> None: ...
    def set_steps(self, steps: int) -> None: ...
    def step(self, gradients: Sequence[torch.Tensor]) -> None: ...


class _AdamW:
    """torch's. Its state is preallocated, so that the first step's memory is every step's."""

    def __init__(self, views: Sequence[Flat], settings: OptimizerSettings) -> None:
        self.masters = [view.master for view in views]
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.0}, {"params": []}]
        for view, master in zip(views, self.masters, strict=True):
            groups[view.decays]["params"].append(master)
        kernel = kernel_of(ADAMW, self.masters[0].device.type)
        self.torchs = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            **{kernel: True},
        )
        for view, master in zip(views, self.masters, strict=True):
            # Without its one kernel torch wants the counter where it can read it.
            count = torch.zeros((), dtype=torch.float32, device=master.device if kernel == "fused" else "cpu")
            self.torchs.state[master] = {"step": count, **view.moments()}

    def set_learning_rate(self, value: float) -> None:
        for group in self.torchs.param_groups:
            group["lr"] = value

    def set_steps(self, steps: int) -> None:
        for values in self.torchs.state.values():
            values["step"].fill_(steps)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.torchs.step()


class _Sgd:
    """torch.optim.SGD's arithmetic with nothing allocated, on any device: its one kernel runs on no meta tensor, and
    its others copy the gradient. The momentum buffer begins at zero, which is torch's first step as well."""

    def __init__(self, views: Sequence[Flat], settings: OptimizerSettings) -> None:
        self.settings, self.learning_rate = settings, settings.learning_rate
        self.views = [(view.master, view.decays, *view.moments().values()) for view in views]

    def set_learning_rate(self, value: float) -> None:
        self.learning_rate = value

    def set_steps(self, steps: int) -> None:
        """Its state does not depend on their number."""

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        for (master, decays, *buffer), gradient in zip(self.views, gradients, strict=True):
            update = gradient.add_(master, alpha=self.settings.weight_decay) if decays else gradient
            for moving in buffer:
                update = torch.add(update, moving, alpha=self.settings.momentum, out=moving)
            master.add_(update, alpha=-self.learning_rate)


def clip_norm(states: Iterable[UnitState], world: World) -> torch.Tensor:
    """Norm of the whole gradient, a scalar: each logical element once, one all-reduce, equal on every rank."""
    every = list(states)
    parts = [part for state in every for part in state.counted()]
    total = torch.zeros((), dtype=every[0].wide, device=every[0].master.device)
    if parts:
        total += torch.nn.utils.get_total_norm(parts).square()
    world.all_reduce(total, SHARDED, "clip", Phase.NORM)
    return total.sqrt()


def token_scale(targets: torch.Tensor, wide: torch.dtype, world: World) -> torch.Tensor:
    """1 / valid tokens of the whole step, a scalar, known before any backward: the loss is a sum; of none it is 0."""
    count = (targets != IGNORE).sum()
    world.all_reduce(count, DATA, "loss", Phase.COUNT)
    return count.clamp(min=1).to(wide).reciprocal()


def report(losses: list[torch.Tensor], wide: torch.dtype, device: torch.device, world: World) -> torch.Tensor:
    """The step's loss on every rank: summed over micro-batches, data-parallel ranks and (zeros elsewhere) stages."""
    total = torch.zeros((), dtype=wide, device=device)
    for loss in losses:
        total += loss
    world.all_reduce(total, REPORT, "loss", Phase.REPORT)
    return total
