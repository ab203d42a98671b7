"""1F1B, that is PipeDream-flush (Narayanan et al. 2006.09503, section 3.2): rank r keeps min(m, p - r) in flight.

After p - 1 - r warm-up forwards a rank alternates one forward with one backward, then drains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from shardwise.schedule.closed_form import Array, Busy, over_ranks, pace
from shardwise.schedule.table import Action, Op, Schedule, in_turn


def generate(pp: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """`pp` stages, one a rank. `virtual` must be 1."""
    if virtual != 1:
        raise ValueError(f"1f1b places one stage on a rank, not {virtual}; interleaved:{virtual} does")
    rows = tuple(tuple(_row(rank, pp, micro_batches)) for rank in range(pp))
    return Schedule("1f1b", in_turn(pp), rows, micro_batches)


def _row(rank: int, pp: int, micro_batches: int) -> Iterator[Action]:
    return alternate(rank, pp - 1 - rank, micro_batches, lambda i: [Action(Op.BW, rank, i)])


def alternate(
    stage: int, warm_up: int, micro_batches: int, backward: Callable[[int], Iterable[Action]]
) -> Iterator[Action]:
    """The row of a rank with one stage: `warm_up` forwards, then one forward and what `backward` of the next
    micro-batch runs, in turn.
    """
    warm_up = min(micro_batches, warm_up)
    yield from (Action(Op.F, stage, i) for i in range(warm_up))
    for i in range(micro_batches):
        if i + warm_up < micro_batches:
            yield Action(Op.F, stage, i + warm_up)
        yield from backward(i)


def span(busy: Busy, micro_batches: Array) -> Array:
    """Equal stages: the bubble (p-1)(F+B+W), exactly (Narayanan et al. 2104.04473, section 2.2.1). X = F+B+W of a
    stage: for unequal ones sum X + (m-1) max X is an upper bound, see `Pace`.
    """
    x = busy.whole
    return over_ranks(x, busy.ranks) + pace(x, busy.ranks).time(micro_batches - 1)


def transfers(pp: int, micro_batches: Array) -> Array:
    """The first micro-batch's way, then round trips: at most p micro-batches are in flight, and such a round trip
    holds 2(p-1) transfers, so that in the long run each micro-batch pays 2(p-1)/p of one.
    """
    later = micro_batches - 1
    return 2 * (pp - 1 + later - np.ceil(later / pp))


def saturation(pp: int) -> int:
    """The p in flight, and two more to alternate with: found by enumeration up to pp=8, held by a test."""
    return pp + 2


if __name__ == "__main__":
    from shardwise.schedule.drawing import render

    print(render(generate(pp=4, micro_batches=6)))
