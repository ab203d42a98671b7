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

from shardwise.schedule.closed_form import Array, paced
from shardwise.schedule.table import Action, Op, Schedule


def generate(pp: int, micro_batches: int, virtual: int) -> Schedule:
    """`pp * virtual` stages, stage s on rank s % pp."""
    placement = tuple(stage % pp for stage in range(pp * virtual))
    rows = tuple(_row(rank, pp, micro_batches, virtual) for rank in range(pp))
    return Schedule(f"interleaved:{virtual}", (placement,), rows, micro_batches)


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


def span(f: Array, b: Array, w: Array, micro_batches: Array, pp: int, p2p_s: float) -> Array:
    """Seconds from the first to the last action; arguments as of `schedule.span`. X = F+B+W of all stages of a rank.

    Equal stages and m a multiple of p: the bubble (p-1)(F+B+W)/v, exactly (Narayanan et al. 2104.04473, section
    2.2.2). Unequal ranks: m max X + (sum X - max X)/v is an upper bound; as in 1F1B the slowest rank does not set the
    pace of the chunks at the ends, 4(p-1) of them (fitted: within 4 % for m >= 2p and single long stages). A short
    last group leaves the holes of p - m % p micro-batches in every chunk but one; the forwards of the group before
    fill the shorter kind (fitted; exact for v <= 2 and equal stages). Never less than the way of the first
    micro-batch through all stages, with the others of its group behind it, which is all there is to m < p. This way
    is exposed to its transfers: 2(pv-1).
    """
    virtual = f.shape[-1] // pp
    by_rank = (*f.shape[:-1], virtual, pp)
    forward, backward = (a.reshape(by_rank).sum(-2) / virtual for a in (f, b + w))  # mean chunk of each rank
    x = forward + backward
    slowest = x.max(-1)
    holes = (-micro_batches % pp) * (virtual - 1) * np.maximum(forward.max(-1), backward.max(-1))
    groups = x.sum(-1) + paced(x, slowest, micro_batches * virtual - 1, pp, 4) + holes
    first = virtual * x.sum(-1) + paced(x, slowest, np.minimum(micro_batches, pp) - 1, pp, 1)
    longest = np.maximum(groups * (micro_batches >= pp), first)
    return longest + 2 * (pp * virtual - 1) * (pp > 1) * p2p_s


def saturation(pp: int) -> int:
    """Three groups: those in flight at rank 0, and two more. Found by enumeration up to pp=8, held by a test."""
    return 3 * pp


if __name__ == "__main__":
    from shardwise.schedule.drawing import render

    print(render(generate(pp=4, micro_batches=6, virtual=2)))
