"""What the closed forms of the spans share. Their arrays are float64: seconds, or counts of micro-batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def paced(head: Array, steady: Array, steps: Array, pp: int, repeat: int) -> Array:
    """The time of `steps` [...] successive micro-batches, each at the pace of a slowest rank; `head` [..., pp].

    The rank with the slowest stage sets the pace, `steady` [...], but not from the start: rank r runs its p-1-r
    warm-up forwards without backwards, so a micro-batch near the ends of the step (our derivation, for the longest
    path through the table) can only be slowed by the ranks that alternate already: step i by the slowest of the last
    i ranks. `repeat` steps have equal i.
    """
    slowest = np.maximum.accumulate(head[..., ::-1], axis=-1)[..., : pp - 1]
    slowest = np.repeat(slowest, repeat, axis=-1)
    ramp = np.concatenate((np.zeros_like(head[..., :1]), np.cumsum(slowest, axis=-1)), axis=-1)
    on_ramp = np.minimum(steps, repeat * (pp - 1)).astype(np.int64)
    shape = np.broadcast_shapes(ramp.shape[:-1], on_ramp.shape)
    ramp = np.broadcast_to(ramp, (*shape, ramp.shape[-1]))
    index = np.broadcast_to(on_ramp, shape)[..., None]
    return np.take_along_axis(ramp, index, axis=-1)[..., 0] + (steps - on_ramp) * steady
