"""Seconds of a step as a source measured them: printed, or from the rate that it printed."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.account.compute import flops_per_token
from shardwise.model.spec import Model
from shardwise.score.facts import words
from shardwise.score.skip import SkipError
from shardwise.score.table import Published

TOLERANCE = 0.03
"""How far a printed step time and a printed rate may be apart: rounding of two or three digits."""


class Measured(NamedTuple):
    """Seconds of a step, and what they were read from: a column, with the convention of FLOPs."""

    seconds: float
    read_from: str


def measured_of(row: Published, model: Model, tokens: int) -> Measured | None:
    """What was measured, of a step of so many tokens. None: nothing, the run did not fit. Raises SkipError."""
    rate, devices = row.metric_tokens_per_s_per_device, row.devices or 1
    by_rate = tokens / (rate * devices) if rate else None
    if row.metric_step_time_s:
        if by_rate and abs(by_rate / row.metric_step_time_s - 1) > TOLERANCE:
            said = f"a step of {row.metric_step_time_s:g} s and tokens/s that make it {by_rate:.4g} s contradict"
            raise SkipError("measurement", said)
        return Measured(row.metric_step_time_s, "step time")
    if by_rate:
        return Measured(by_rate, "tokens/s")
    if row.metric_tflops_per_device:
        return _by_flops(row, row.metric_tflops_per_device * 1e12 * devices, model, tokens)
    if row.out_of_memory:
        return None
    raise SkipError("measurement", "neither a step time nor a rate is printed")


def _by_flops(row: Published, flops_per_s: float, model: Model, tokens: int) -> Measured:
    found = words().conventions.get(row.tflops_convention)
    if found is None or row.seq_len is None:
        raise SkipError("measurement", f"FLOP/s of an unknown convention: {row.tflops_convention or 'not stated'}")
    convention, factor = found
    seconds = factor * flops_per_token(model, row.seq_len, convention) * tokens / flops_per_s
    return Measured(seconds, f"FLOP/s ({row.tflops_convention})")
