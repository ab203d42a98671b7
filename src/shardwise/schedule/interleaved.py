"""Interleaved 1F1B (Narayanan et al. 2104.04473, section 2.2.2), in Megatron's order, for any number of micro-batches.

Stage s lies on rank s % p, so that a rank holds v chunks of the model. The ranks take micro-batches in groups of p:
chunk 0 of the whole group, then chunk 1, and so on; backwards likewise with the chunks reversed. Rank r runs
2(p-1-r) + (v-1)p forwards before its first backward.

The last group may be short. Taking this short group with the same alternation deadlocks (p=4, v=3, m=5: a forward of
the short group waits for a backward that lies behind a later forward). So the order is made for a full last group, and
the actions of the absent micro-batches are left out. Micro-batches depend on each other only through the order of the
rows, hence what remains of an order that runs also runs, and never holds more in flight.
"""

from __future__ import annotations

import numpy as np

from shardwise.schedule.closed_form import Array, Busy, over_ranks, pace
from shardwise.schedule.table import Action, Op, Schedule, in_turn


def generate(pp: int, micro_batches: int, virtual: int) -> Schedule:
    """`pp * virtual` stages, stage s on rank s % pp."""
    rows = tuple(_row(rank, pp, micro_batches, virtual) for rank in range(pp))
    return Schedule(f"interleaved:{virtual}", in_turn(pp, virtual), rows, micro_batches)


def _row(rank: int, pp: int, micro_batches: int, virtual: int) -> tuple[Action, ...]:
    """The order of whole groups, without the micro-batches that the last group lacks."""
    order = [
        (chunk, micro_batch)
        for first in range(0, micro_batches, pp)
        for chunk in range(virtual)
        for micro_batch in range(first, first + pp)
    ]
    forwards = [Action(Op.F, chunk * pp + rank, i) for chunk, i in order]
    backwards = [Action(Op.BW, (virtual - 1 - chunk) * pp + rank, i) for chunk, i in order]
    warm_up = min(len(order), 2 * (pp - 1 - rank) + (virtual - 1) * pp)
    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += (forward, backward)
    row += backwards[len(order) - warm_up :]
    return tuple(row) if micro_batches % pp == 0 else tuple(a for a in row if a.micro_batch < micro_batches)


def span(busy: Busy, micro_batches: Array, virtual: int) -> Array:
    """Equal stages and m a multiple of p: the bubble (p-1)(F+B+W)/v, exactly (Narayanan et al. 2104.04473, section
    2.2.2). Unequal ranks, X = F+B+W of all stages of one: m max X + (sum X - max X)/v is an upper bound; as in 1F1B
    the slowest rank does not set the pace of the chunks at the ends, 4(p-1) of them (fitted: within 4 % for m >= 2p and
    single long stages). A short last group leaves the holes of p - m % p micro-batches in every chunk but one; the
    forwards of the group before fill the shorter kind (fitted; exact for v <= 2 and equal stages). Never less than the
    way of the first micro-batch through all stages, with the others of its group behind it, which is all there is to
    m < p.
    """
    pp, x = busy.pp, busy.whole / virtual  # mean chunk of each rank
    way, rising = over_ranks(x, busy.ranks), pace(x, busy.ranks)
    groups = way + rising.time(micro_batches * virtual - 1, repeat=4)
    short = np.ceil(micro_batches / pp) * pp - micro_batches
    if virtual > 1 and short.any():
        longer = np.maximum(busy.f.max(axis=0), (busy.b + busy.w).max(axis=0)) / virtual
        groups = groups + short * (virtual - 1) * longer
    first = virtual * way + rising.time(np.minimum(micro_batches, pp) - 1)
    return np.maximum(np.where(micro_batches >= pp, groups, 0.0), first)


def transfers(pp: int, micro_batches: Array, virtual: int) -> Array:
    """2(pv-1): the way of the first micro-batch."""
    return np.full_like(micro_batches, 2 * (pp * virtual - 1) * (pp > 1))


def saturation(pp: int) -> int:
    """Three groups: those in flight at rank 0, and two more. Found by enumeration up to pp=8, held by a test."""
    return 3 * pp


if __name__ == "__main__":
    from shardwise.schedule.drawing import render

    print(render(generate(pp=4, micro_batches=6, virtual=2)))
