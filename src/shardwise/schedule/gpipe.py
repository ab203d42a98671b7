"""GPipe (Huang et al. 1811.06965, figure 2c): all forwards, then all backwards; every micro-batch is in flight at once.

The backwards run in the order 0 .. m-1, so that the micro-batch that has waited longest frees its activations first.
"""

from __future__ import annotations

import numpy as np

from shardwise.schedule.closed_form import Array, Busy, over_ranks
from shardwise.schedule.table import Action, Op, Schedule, in_turn


def generate(pp: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """`pp` stages, one a rank. `virtual` must be 1."""
    if virtual != 1:
        raise ValueError(f"gpipe places one stage on a rank, not {virtual}")
    rows = tuple(tuple(Action(op, rank, i) for op in (Op.F, Op.BW) for i in range(micro_batches)) for rank in range(pp))
    return Schedule("gpipe", in_turn(pp), rows, micro_batches)


def span(busy: Busy, micro_batches: Array) -> Array:
    """Each phase is a pipeline of its own: sum + (m-1) max. Equal stages give the bubble (p-1)(F+B+W) (Narayanan et al.
    2104.04473, section 2.2.1).
    """
    f, bw = np.ascontiguousarray(busy.f), np.ascontiguousarray(busy.b + busy.w)
    return over_ranks(f + bw, busy.ranks) + (micro_batches - 1) * (f.max(axis=0) + bw.max(axis=0))


def transfers(pp: int, micro_batches: Array) -> Array:
    """2(p-1): each phase exposes the way of its first micro-batch."""
    return np.full_like(micro_batches, 2 * (pp - 1))


if __name__ == "__main__":
    from shardwise.schedule.drawing import render

    print(render(generate(pp=4, micro_batches=6)))
