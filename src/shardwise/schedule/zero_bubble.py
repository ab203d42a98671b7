"""ZB-H1 (Qi et al. 2401.10241, section 2.2): 1F1B with the weight gradient W apart, to fill the bubbles of the drain.

Rank r puts its weight gradients off by r micro-batches. Every rank then holds at most p micro-batches from F to W
(1F1B: p - r), and the gradient that the next step waits for travels up the ranks without waiting for a W.
"""

from __future__ import annotations

import numpy as np

from shardwise.schedule.closed_form import Array, At, Busy, Ways, at_places, over_ranks, pace, staggered
from shardwise.schedule.one_f_one_b import alternate
from shardwise.schedule.table import Action, Op, Schedule, in_turn


def generate(pp: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """`pp` stages, one a rank. `virtual` must be 1."""
    if virtual != 1:
        raise ValueError(f"zb-h1 places one stage on a rank, not {virtual}")
    rows = tuple(put_off(rank, pp - 1 - rank, rank, micro_batches) for rank in range(pp))
    return Schedule("zb-h1", in_turn(pp), rows, micro_batches)


def put_off(stage: int, warm_up: int, late: int, micro_batches: int) -> tuple[Action, ...]:
    """The row of `alternate` with B and W apart, each W put off by `late` micro-batches."""

    def backward(i: int) -> list[Action]:
        weight = [Action(Op.W, stage, i - late)] if i >= late else []
        return [Action(Op.B, stage, i), *weight]

    left = (Action(Op.W, stage, i) for i in range(max(0, micro_batches - late), micro_batches))
    return (*alternate(stage, warm_up, micro_batches, backward), *left)


def span(busy: Busy, micro_batches: Array) -> Array:
    """Equal stages with W <= F: the bubble (p-1)(F+B-W), exactly (Qi et al. 2401.10241, table 1). Otherwise the longest
    path that stays on a rank, or the one (our derivation) down to the last rank, at the pace of F+B until the weight
    gradients begin, then of F+B+W, and up again.
    """
    # In a short step the weight gradients put off are concave in the rank.
    at = at_places(busy, range(busy.pp) if (micro_batches < busy.pp).any() else ())
    fb = np.ascontiguousarray(busy.f + busy.b)
    rising = pace(fb, busy.ranks, busy.whole.max(axis=0))
    # How much longer the weight gradients that a rank has put off take than the last B's way up from there.
    after_b = (np.minimum(micro_batches, at.rank + 1) * at.w - at.b_above).max(axis=0)
    through = over_ranks(fb, busy.ranks) + rising.time(micro_batches - 1) + after_b
    ways = Ways(by_first_b(busy, at), busy.pp - at.rank, at.rank + 1)
    return np.maximum(through, staggered(busy, at, ways, micro_batches).max(axis=0))


def by_first_b(busy: Busy, at: At) -> Array:
    """[place, n] until a rank's first B can begin: F down to the last rank and B up to this one."""
    return over_ranks(busy.f, busy.ranks) + at.b_below


def transfers(pp: int, micro_batches: Array) -> Array:
    """As in 1F1B while there are no weight gradients to wait with; then they hide the transfers."""
    tight = np.minimum(micro_batches - 1, pp)
    return 2 * (pp - 1 + tight - np.ceil(tight / pp))


def saturation(pp: int) -> int:
    """The p from F to W, and two more to alternate with: found by enumeration up to pp=8, held by a test."""
    return pp + 2


if __name__ == "__main__":
    from shardwise.schedule.drawing import render

    print(render(generate(pp=4, micro_batches=6)))
