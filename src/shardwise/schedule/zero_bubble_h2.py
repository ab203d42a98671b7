"""ZB-H2 (Qi et al. 2401.10241, section 2.2): ZB-H1 with as many forwards ahead as fill the warm-up's bubbles too.

Rank r runs 2(p-1-r) forwards before it alternates and puts its weight gradients off by 2r micro-batches: 2p - 1 are
in flight from F to W on every rank, twice what 1F1B needs. No rank then idles between its first action and its last.
The step still takes as long as the ranks are staggered, since the optimizer waits for all of them (the paper's way
round that, post-validation, is not assumed here).
"""

from __future__ import annotations

import numpy as np

from shardwise.schedule.closed_form import Array, Busy, Ways, at_places, staggered
from shardwise.schedule.table import Schedule, in_turn
from shardwise.schedule.zero_bubble import by_first_b, put_off


def generate(pp: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """`pp` stages, one a rank. `virtual` must be 1."""
    if virtual != 1:
        raise ValueError(f"zb-h2 places one stage on a rank, not {virtual}")
    rows = tuple(put_off(rank, 2 * (pp - 1 - rank), 2 * rank, micro_batches) for rank in range(pp))
    return Schedule("zb-h2", in_turn(pp), rows, micro_batches)


def span(busy: Busy, micro_batches: Array) -> Array:
    """Equal stages: the bubble (p-1) max(F, F+B-2W, B-F), exactly from m = 2p on (our derivation; Qi et al. 2401.10241,
    table 1, count the idle time of a rank alone, (p-1)(F+B-2W)). Unequal ones, some 30 % longer: up to 3 % too little;
    of fewer micro-batches up to 11 %.
    """
    short = bool((micro_batches < 2 * busy.pp).any())
    at = at_places(busy, range(busy.pp) if short else ())
    ways = Ways(by_first_b(busy, at), 2 * (busy.pp - at.rank) - 1, 2 * at.rank + 1)
    longest = staggered(busy, at, ways, micro_batches).max(axis=0)
    if not short:
        return longest
    # Of few, a rank may have put all its weight gradients off, and then waits for the last B of the last rank.
    last = at.f_above[-1] + micro_batches * (at.f[-1] + at.b[-1])
    put_off = np.minimum(micro_batches, 2 * at.rank + 1) * at.w
    return np.maximum(longest, last + (at.b_below + at.b - at.b[-1] + put_off).max(axis=0))


def transfers(pp: int, micro_batches: Array) -> Array:
    """The way down and up: p-1 of them are hidden in long steps if F = B = W, all are exposed if B is longer."""
    return np.full_like(micro_batches, 2 * (pp - 1))


def saturation(pp: int) -> int:
    """The 2p-1 in flight, and two more to alternate with: found by enumeration up to pp=8, held by a test."""
    return 2 * pp + 1


if __name__ == "__main__":
    from shardwise.schedule.drawing import render

    print(render(generate(pp=3, micro_batches=6)))
