"""DualPipe (DeepSeek-V3, 2412.19437, section 3.2.1): micro-batches enter at both ends, on two copies of the weights.

Rank r holds stage r of copy 0 and stage p-1-r of copy 1, so that the two directions meet two and two: ranks r and
p-1-r work like rank r of a V on half the ranks (`dualpipe_v`), chunk 0 being the direction that comes from the nearer
end. Even micro-batches go down copy 0, odd ones down copy 1. No rank holds more than p + 1 of them.

The number of ranks must be even: the middle one would hold one stage twice.
"""

from __future__ import annotations

import numpy as np

from shardwise.schedule import dualpipe_v
from shardwise.schedule.closed_form import Array, Busy
from shardwise.schedule.table import Action, Placement, Schedule
from shardwise.schedule.v_shape import numbered


def generate(pp: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """`pp` stages, each held twice; `pp` even. `virtual` must be 1."""
    if virtual != 1:
        raise ValueError(f"dualpipe places one stage of each copy on a rank, not {virtual}")
    rows = tuple(_row(rank, pp, micro_batches) for rank in range(pp))
    return Schedule("dualpipe", placement(pp), rows, micro_batches, overlaps=True)


def placement(pp: int, virtual: int = 1) -> Placement:
    """Stage r of copy 0 and stage p-1-r of copy 1 on rank r."""
    del virtual
    down = tuple(range(pp))
    return down, down[::-1]


def _row(rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    depth = min(rank, pp - 1 - rank)
    near = int(rank != depth)  # the copy that enters at the nearer end
    stages = depth, pp - 1 - depth
    each = (micro_batches + 1) // 2
    row = list[Action]()
    for action in numbered(dualpipe_v.calls(depth, pp // 2, each), stages, each):
        micro_batch = 2 * action.micro_batch + (near if action.stage == depth else 1 - near)
        if micro_batch < micro_batches:
            row.append(Action(action.op, action.stage, micro_batch))
    return tuple(row)


def span(busy: Busy, micro_batches: Array) -> Array:
    """That of the V on half the ranks, for half the micro-batches. Of an odd number the absent one saves the F that it
    would have begun with (by enumeration; exact for equal stages from m = 2p on). The two stages of a rank count as
    alike: if one is 1.3 and the other 0.8 of the rest, it is up to 6 % too little.
    """
    odd = micro_batches % 2
    return dualpipe_v.span(_half(busy), (micro_batches + odd) / 2) - odd * (micro_batches > busy.pp) * busy.f[0] / 2


def _half(busy: Busy) -> Busy:
    """The ranks of the first half; the second is its mirror image."""
    left, ranks = busy.pp // 2, list[int]()
    while left:
        ranks.append(min(left, busy.ranks[len(ranks)]))
        left -= ranks[-1]
    n = len(ranks)
    return Busy(busy.f[:n], busy.b[:n], busy.w[:n], tuple(ranks))


def transfers(pp: int, micro_batches: Array) -> Array:
    """The way of the first micro-batch; longer steps expose up to half as many again, as F, B and W have it."""
    return np.full_like(micro_batches, 2 * (pp - 1))


def saturation(pp: int) -> int:
    """Those of both halves, and one more of each: found by enumeration up to pp=8, held by a test."""
    return 2 * pp + 2


if __name__ == "__main__":
    from shardwise.schedule.drawing import render

    print(render(generate(pp=4, micro_batches=8)))
