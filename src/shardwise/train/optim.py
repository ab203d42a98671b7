"""AdamW on the shards of the model state, one clip norm, and the count of tokens: what a step does beside its row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shardwise.collective import Phase
from shardwise.mesh import DATA, REPORT, SHARDED
from shardwise.plan.plan import TrainSettings
from shardwise.train.ops import IGNORE
from shardwise.train.unit import UnitState
from shardwise.train.world import World


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019); `clip_norm` bounds the gradient's norm, 1-D parameters are not decayed."""

    learning_rate: float
    weight_decay: float
    clip_norm: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    @staticmethod
    def of(settings: TrainSettings) -> OptimizerSettings:
        """The part of a plan's settings that the optimizer takes."""
        return OptimizerSettings(settings.learning_rate, settings.weight_decay, settings.clip_norm)


class Optimizer:
    """torch's fused AdamW over flat views of every storage's master shard: 1-D parameters, then the others."""

    def __init__(self, states: Iterable[UnitState], settings: OptimizerSettings) -> None:
        self.states, self.settings = list(states), settings
        groups: list[dict[str, object]] = [{"params": [], "weight_decay": 0.0}, {"params": []}]
        self._pairs: list[tuple[torch.Tensor, UnitState, slice]] = []
        prepared: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for state in self.states:
            vector, end = state.storage.vector_numel, state.storage.shard_numel
            for group, part in zip(groups, (slice(0, vector), slice(vector, end)), strict=True):
                if part.start < part.stop:
                    parameter = state.master[part].detach()
                    params = group["params"]
                    assert isinstance(params, list)
                    params.append(parameter)
                    self._pairs.append((parameter, state, part))
                    prepared.append((parameter, state.moments[0][part], state.moments[1][part]))
        groups = [g for g in groups if g["params"]]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for parameter, first, second in prepared:
            # Preallocated, so that the first step's memory is every step's.
            count = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self._adamw.state[parameter] = {"step": count, "exp_avg": first, "exp_avg_sq": second}

    def step(self, norm: torch.Tensor) -> None:
        """Clip by the one norm, step the master shards, publish the weights."""
        limit = self.settings.clip_norm
        coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
        for parameter, state, part in self._pairs:
            gradient = state.gradient_shard[part]
            gradient.mul_(coefficient)
            parameter.grad = gradient
        self._adamw.step()
        for state in self.states:
            state.publish()


def clip_norm(states: Iterable[UnitState], world: World) -> torch.Tensor:
    """Norm of the whole gradient, a scalar: each logical element once, one all-reduce, equal on every rank."""
    parts = [state.square_norm() for state in states]
    total = torch.stack(parts).sum()
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
