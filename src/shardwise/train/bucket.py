"""The gradients of one bucket on one rank, and their sums over all axes of the mesh."""

from __future__ import annotations

from functools import partial

import torch

from shardwise.collective import Kind, Phase
from shardwise.plan.buckets import Bucket, GradientMove
from shardwise.train.comm import Work
from shardwise.train.reduction import Start
from shardwise.train.unit import UnitState
from shardwise.train.world import World


class GradientBucket:
    """`part`, this rank's part of the gradients, is one flat buffer: that of `first`, or of all `together`."""

    def __init__(self, bucket: Bucket, first: UnitState, together: torch.Tensor | None, world: World) -> None:
        self.bucket, self.first, self.world = bucket, first, world
        self.part = self.first.gradient_shard if together is None else together
        self._moves = {final: self._taken(bucket.moves(first.zero, final)) for final in (False, True)}

    def _taken(self, moves: list[GradientMove]) -> list[GradientMove]:
        """Those of groups of more than one rank."""
        return [move for move in moves if self.world.group(*move.axes) is not None]

    def reduce(self, final: bool) -> list[Start]:
        """What sums this rank's gradients, each to be started when the one before is over: over the shards' axis first,
        and when `final`, its shard over every other axis of the mesh."""
        moves = self._moves[final]
        return [self.first.scatter if m.kind is Kind.REDUCE_SCATTER else partial(self._sum, m) for m in moves]

    def twin(self) -> None:
        """Sum the gradients of the two copies of our stage."""
        if (work := self._sum(self.bucket.twin_move())) is not None:
            work.wait()

    def _sum(self, move: GradientMove) -> Work | None:
        part = self.part[move.start : move.start + move.elements]
        return self.world.start_all_reduce(part, move.axes, move.module, Phase.REDUCE)
