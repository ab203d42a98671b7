"""DualPipeV: DualPipe (DeepSeek-V3, 2412.19437, section 3.2.1) cut in half, without its second copy of the weights
(https://github.com/deepseek-ai/DualPipe, and "Cut-in-half" of https://hackmd.io/@ufotalent/r1lVXsa9Jg).

Two chunks on a rank in a V. In the steady state a rank runs F of one chunk and BW of the other as one (`pairs`), so
that the all-to-all of one hides under the compute of the other. At the ends of the step B and W are apart, to fill the
bubbles. No rank holds more than 2p + 1 chunks.

A full order needs 2p micro-batches; of fewer, the absent ones are left out (see `interleaved`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.schedule.closed_form import Array, Busy, Ways, at_places, staggered, weighted
from shardwise.schedule.table import Schedule
from shardwise.schedule.v_shape import B0, B1, BW0, BW1, F0, F1, W0, W1, Call, head, numbered, placement, short_of


def generate(pp: int, micro_batches: int, virtual: int = 2) -> Schedule:
    """`2 * pp` stages. `virtual` must be 2."""
    if virtual != 2:
        raise ValueError(f"dualpipe-v places two stages on a rank, not {virtual}")
    rows = tuple(
        numbered(calls(rank, pp, micro_batches), (rank, 2 * pp - 1 - rank), micro_batches) for rank in range(pp)
    )
    return Schedule("dualpipe-v", placement(pp), rows, micro_batches, overlaps=True)


def calls(rank: int, pp: int, micro_batches: int) -> Iterator[Call]:
    """A rank's row for at least 2p micro-batches; those above `micro_batches` are for the caller to leave out."""
    below = pp - 1 - rank  # ranks after this one
    yield from [F0] * (2 * below)
    yield from [F0, F1] * (rank + 1)
    yield from [B1, W1, F1] * below
    yield from [F0, BW1, F1, BW0] * (max(micro_batches, 2 * pp) - pp - below)
    yield from [BW1, F1, BW0] * below
    yield from _drain(rank, below)


def _drain(rank: int, below: int) -> Iterator[Call]:
    """The last gradients: first whole, then with W put off until no B is left that another rank waits for."""
    whole = rank + 1
    turns = [(BW1, B1), (BW0, B0)] * (rank + 1)
    late: list[Call] = []
    for i, (both, alone) in enumerate(turns):
        late += [] if i < whole else [W1 if alone is B1 else W0]
        yield both if i < whole else alone
    for _ in range(below):
        yield late.pop(0)
        late.append(W0)
        yield B0
    yield from late


def span(busy: Busy, micro_batches: Array) -> Array:
    """Each F and BW one after the other. Equal stages: the bubble is the largest of (p-1) F/2, (p-1)(F+B-W)/2 and
    ((2p-2) B - F - (p-1) W)/2, exactly from m = 2p on (our derivation). As one, with both inputs to wait for, they
    leave (p-1)(FB + B/2 - W), FB being the time of a pair (the README of deepseek-ai/DualPipe), as the walk finds.
    With ranks 30 % longer up to 3 % too little; of fewer micro-batches from 15 % too little to 2 % too much.
    """
    pp, actions = busy.pp, 2 * micro_batches
    short = short_of(2 * pp, micro_batches)
    at = at_places(busy, range(pp) if short.any else (pp - 2,))  # the last rank differs, by an F
    below = pp - 1 - at.rank
    drain = np.maximum(2 * at.b_below - below * (at.b + at.w), 0.0)
    first = head(busy, at, short)
    late = at.rank + 1
    if short.any:
        # Those put off are among the last of a full order. Where these are absent, B and W stay together on the way up.
        of_chunk_1 = np.maximum(late - below, 0.0) / 2
        late = np.maximum(late - of_chunk_1 - short.absent, at.rank == 0) + np.maximum(of_chunk_1 - short.absent, 0.0)
        together = np.clip(2 * short.absent / pp - 1, 0.0, 1.0)
        w_above = weighted(at.where.above, busy.w) - (at.rank > 0) * at.w[0]  # that is counted apart
        at = at._replace(b_above=at.b_above + together * w_above)
    ways = Ways(first, 2 * pp + (below == 0), late, drain)
    return staggered(busy, at, ways, actions).max(axis=0) / 2


def saturation(pp: int) -> int:
    """The 2p of a full order, and one more: found by enumeration up to pp=8, held by a test."""
    return 2 * pp + 1


if __name__ == "__main__":
    from shardwise.schedule.drawing import render

    print(render(generate(pp=3, micro_batches=6)))
