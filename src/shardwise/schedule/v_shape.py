"""What the V schedules share: rank r holds the stages r and 2p-1-r, so that a micro-batch turns round on the last rank
and its loss is computed where it came in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shardwise.schedule.closed_form import Array, At, Busy, over_ranks
from shardwise.schedule.table import Action, Op, Placement

Call = int
"""Runs an op for the next micro-batch of a chunk. Chunk 0 leads down the ranks, chunk 1 up."""

F0, F1, B0, B1, W0, W1, BW0, BW1 = range(8)

_OPS = tuple(op for op in (Op.F, Op.B, Op.W, Op.BW) for _chunk in (0, 1))


def placement(pp: int, virtual: int = 2) -> Placement:
    """One copy, whose stages r and 2p-1-r lie on rank r."""
    del virtual
    return ((*range(pp), *reversed(range(pp))),)


def numbered(calls: Iterable[Call], stages: tuple[int, int], present: int) -> tuple[Action, ...]:
    """The calls with their micro-batches, in each chunk 0, 1, ..; those from `present` on are absent, and left out."""
    following = [0] * BW0  # the next micro-batch of each call that is not both gradients
    row: list[Action] = []
    for call in calls:
        if call < BW0:
            micro_batch = following[call]
            following[call] += 1
        else:
            micro_batch = following[call - 4]  # that of B
            following[call - 4] = following[call - 2] = micro_batch + 1
        if micro_batch < present:
            row.append(Action(_OPS[call], stages[call % 2], micro_batch))
    return tuple(row)


class Short(NamedTuple):
    """The micro-batches of a step, and how many fewer they are than a full order has; where it is full, the bounds
    that they set are infinite and zero, so that long steps pay nothing for short ones.
    """

    present: Array
    absent: Array

    @property
    def any(self) -> bool:
        return bool(self.absent.any())


def short_of(full: int, micro_batches: Array) -> Short:
    if (micro_batches >= full).all():
        return Short(np.asarray(np.inf), np.asarray(0.0))
    return Short(micro_batches, np.maximum(full - micro_batches, 0.0))


def head(busy: Busy, at: At, short: Short) -> Array:
    """[place, n] seconds until the first B of a rank, for chunks of F and B: past all forwards on the way to the last
    rank, or to the rank's own chunk 1, and up to rank 0, where the B begins its way down.
    """
    own = np.minimum(short.present, 2 * (busy.pp - 1 - at.rank) + 1)
    return np.maximum(2 * at.f_above + (own + 1) * at.f, 2 * over_ranks(busy.f, busy.ranks)) + at.b_above


def transfers(pp: int, micro_batches: Array) -> Array:
    """4(p-1), the way of the first micro-batch; longer steps expose up to half as many again, as F, B and W have it."""
    return np.full_like(micro_batches, 4 * (pp - 1))
