"""Initial weights: functions of (seed, parameter name, row), so that every layout starts from the same bits."""

from __future__ import annotations

import hashlib
import math

import torch

from shardwise.model.families.forms import form_of
from shardwise.model.spec import Model
from shardwise.plan.shards import Record

CHUNK_ROWS = 256
"""Rows that share one generator: a rank draws only the chunks that it holds rows of."""


def initial_values(model: Model, record: Record, tp_index: int, seed: int) -> torch.Tensor:
    """This rank's part [its box] of a parameter, in float64: norms begin as the identity, biases as zero, all else is
    normal.

    The deviation is 0.02, that of products into the residual stream 0.02 / sqrt(2 layers) (GPT-2, Radford et al.
    2019, section 2.3).
    """
    rows, *columns = record.box(tp_index)
    if not columns:
        zero = record.name.endswith(".bias") or form_of(model).norm_offset
        return torch.full((rows.stop - rows.start,), 0.0 if zero else 1.0, dtype=torch.float64)
    into_stream = record.name.endswith(("attention.out.weight", "mlp.down.weight"))
    deviation = 0.02 / math.sqrt(2 * model.layers) if into_stream else 0.02
    return _normal(record, rows, columns[0], seed).mul_(deviation)


def _normal(record: Record, rows: slice, columns: slice, seed: int) -> torch.Tensor:
    """A box of the whole parameter, standard normal."""
    start, stop = rows.start, rows.stop
    out = torch.empty(stop - start, columns.stop - columns.start, dtype=torch.float64)
    for chunk in range(start // CHUNK_ROWS, -(-stop // CHUNK_ROWS)):
        first = chunk * CHUNK_ROWS
        digest = hashlib.sha256(f"{seed}/{record.name}/{chunk}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        drawn = torch.randn(CHUNK_ROWS, record.whole[1], dtype=torch.float64, generator=generator)
        low, high = max(start, first), min(stop, first + CHUNK_ROWS)
        if low < high:
            out[low - start : high - start] = drawn[low - first : high - first, columns]
    return out
