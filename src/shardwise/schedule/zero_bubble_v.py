"""ZB-V (Qi et al. 2401.10241, section 6): two chunks on a rank in a V, with the weight gradient apart.

The order is the one for F = B = W, whatever they are: once the first gradients arrive, a rank runs F, B and W of one
chunk and of the other in turn, and only the last gradients are put off. No rank holds more than 2p chunks, as much as
rank 0 of 1F1B.

A full order needs 2p - 1 micro-batches; of fewer, the absent ones are left out (see `interleaved`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.schedule.closed_form import Array, Busy, Ways, at_places, staggered
from shardwise.schedule.table import Schedule
from shardwise.schedule.v_shape import B0, B1, F0, F1, W0, W1, Call, head, numbered, placement, short_of


def generate(pp: int, micro_batches: int, virtual: int = 2) -> Schedule:
    """`2 * pp` stages. `virtual` must be 2."""
    if virtual != 2:
        raise ValueError(f"zb-v places two stages on a rank, not {virtual}")
    full = max(micro_batches, 2 * pp - 1)
    rows = tuple(numbered(_calls(rank, pp, full), (rank, 2 * pp - 1 - rank), micro_batches) for rank in range(pp))
    return Schedule("zb-v", placement(pp), rows, micro_batches)


def _calls(rank: int, pp: int, micro_batches: int) -> Iterator[Call]:
    """A rank's row for at least 2p - 1 micro-batches."""
    warm_up, onward = 2 * pp - 1 - rank, pp - rank  # forwards of chunk 0 and of chunk 1 before both alternate
    yield from [F0] * (warm_up - rank)
    yield from [F1, F0] * rank
    yield from [F1, B1, W1] * onward
    for i in range(micro_batches - pp):
        if warm_up + i < micro_batches:
            yield F0
        yield from (B0, W0, F1, B1, W1)
    yield from [B0, B1] * rank
    yield from [B0, W0] * onward
    yield from [W1] * rank + [W0] * rank


def span(busy: Busy, micro_batches: Array) -> Array:
    """Equal stages with B >= F: the bubble (p-1) max(B/2, B-W), exactly from m = 2p on (our derivation; Qi et al. have
    none if F = B = W, as they count the idle time of a rank alone). Else the longest path that stays on a rank, or ends
    on the last one (see `staggered`), in twice the seconds: a chunk has half of a rank's. With ranks 30 % longer that
    is up to 3 % too little; of fewer micro-batches from 7 % too little to 3 % too much.
    """
    pp, actions = busy.pp, 2 * micro_batches
    short = short_of(2 * pp - 1, micro_batches)
    at = at_places(busy, range(pp) if short.any else (1,))  # rank 0 differs, by `turned`
    below = pp - 1 - at.rank
    late = np.maximum(at.rank - short.absent, 0.0)  # weight gradients of a chunk that are put off to the end
    before_b = np.minimum(short.present, 2 * below + 1 + at.rank) + np.minimum(short.present, at.rank + 1)
    meanwhile = np.minimum(short.present, below + 1) - 1  # B and W of chunk 0 between the last B of chunk 1 and of 0
    turned = late == 0  # the last W of chunk 1 follows its B
    passed = meanwhile * at.b + (meanwhile + turned) * at.w
    drain = np.maximum(2 * at.b_below - passed, 0.0)
    on_a_rank = staggered(busy, at, Ways(head(busy, at, short), before_b, 2 * late + 1, drain), actions)
    # From the last B of chunk 1 on: this rank's actions, or the way down to the last rank and that one's.
    mine = passed + at.b + (1 + 2 * late) * at.w
    theirs = at.b_below + at.b[-1] + (1 + turned[-1] + 2 * late[-1]) * at.w[-1]
    body = np.take(actions * busy.whole, at.where.run, axis=0)
    return np.maximum(on_a_rank, at.f_above + body - mine + theirs).max(axis=0) / 2


def saturation(pp: int) -> int:
    """The 2p-1 of a full order, and one more: found by enumeration up to pp=8, held by a test."""
    return 2 * pp


if __name__ == "__main__":
    from shardwise.schedule.drawing import render

    print(render(generate(pp=3, micro_batches=5)))
