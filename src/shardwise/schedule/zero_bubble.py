"""ZB-H1 (Qi et al. 2401.10241, section 2.2): 1F1B with the weight gradient W apart, to fill the bubbles of the drain.

Rank r puts its weight gradients off by r micro-batches. Every rank then holds at most p micro-batches from F to W
(1F1B: p - r), and the gradient that the next step waits for travels up the ranks without waiting for a W.
"""

from __future__ import annotations

import numpy as np

from shardwise.schedule.closed_form import Array, paced
from shardwise.schedule.one_f_one_b import alternate
from shardwise.schedule.table import Action, Op, Schedule


def generate(pp: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """`pp` stages, one a rank. `virtual` must be 1."""
    if virtual != 1:
        raise ValueError(f"zb-h1 places one stage on a rank, not {virtual}")
    rows = tuple(_row(rank, pp, micro_batches) for rank in range(pp))
    return Schedule("zb-h1", (tuple(range(pp)),), rows, micro_batches)


def _row(rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    def backward(i: int) -> list[Action]:
        late = [Action(Op.W, rank, i - rank)] if i >= rank else []
        return [Action(Op.B, rank, i), *late]

    left = (Action(Op.W, rank, i) for i in range(max(0, micro_batches - rank), micro_batches))
    return (*alternate(rank, pp, micro_batches, backward), *left)


def span(f: Array, b: Array, w: Array, micro_batches: Array, pp: int, p2p_s: float) -> Array:
    """Seconds from the first to the last action; arguments as of `schedule.span`.

    Equal stages with W <= F: the bubble (p-1)(F+B-W), exactly (Qi et al. 2401.10241, table 1). Otherwise the longest
    of these paths (our derivation): down to the last rank, at the pace of F+B until the weight gradients begin, then
    of F+B+W; or all actions of one rank, once its first F or its first B can begin.
    """
    m, fb, x = micro_batches[..., None], f + b, f + b + w
    rank = np.arange(pp)
    first_f = np.cumsum(f, axis=-1) - f
    up = np.cumsum(b, axis=-1) - b  # from rank r to rank 0
    late_f = np.maximum(m - (pp - rank), 0) * f  # forwards of a rank after its first B
    late_w = np.maximum(m - 1 - rank, 0) * w  # weight gradients of a rank before its last B
    first_b = fb.sum(-1, keepdims=True) - up - b
    tail = up + w[..., :1]
    after_b = (np.minimum(m, rank + 1) * w - up).max(-1)  # the last B on its way up, and the weight gradients put off
    through = fb.sum(-1) + paced(fb, x.max(-1), micro_batches - 1, pp, 1) + after_b
    paths = (
        first_f + m * fb + late_w + tail,
        first_f + m * x,
        first_b + m * b + late_f + late_w + tail,
        first_b + m * b + late_f + m * w,
    )
    longest = np.maximum.reduce([path.max(-1) for path in paths])
    # As in 1F1B while there are no weight gradients to wait with; then they hide the transfers.
    tight = np.minimum(micro_batches - 1, pp)
    transfers = 2 * (pp - 1 + tight - np.ceil(tight / pp))
    return np.maximum(through, longest) + transfers * p2p_s


def saturation(pp: int) -> int:
    """The p from F to W, and two more to alternate with: found by enumeration up to pp=8, held by a test."""
    return pp + 2


if __name__ == "__main__":
    from shardwise.schedule.drawing import render

    print(render(generate(pp=4, micro_batches=6)))
