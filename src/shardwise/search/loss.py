"""Beyond one step: how many of them a batch size takes to reach a loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeToLoss:
    """`steps_factor` is the steps needed over S_min, those of an endless batch; `tokens_factor` the tokens over those
    of the smallest batch; `relative_s` the step times `steps_factor`: what to compare layouts and batches by. `total_s`
    where S_min is known."""

    steps_factor: float
    tokens_factor: float
    relative_s: float
    total_s: float | None


def time_to_loss(
    step_s: float, batch_tokens: int, critical_batch_tokens: float, min_steps: float | None = None
) -> TimeToLoss:
    """Time to a loss = step_s x S_min x (1 + B_crit / B), tokens = E_min x (1 + B / B_crit) (McCandlish et al.
    1812.06162, equations 2.7 and D.6). Raises ValueError for a batch or a critical batch that is not positive."""
    if batch_tokens <= 0 or critical_batch_tokens <= 0:
        raise ValueError(f"batch {batch_tokens} and critical batch {critical_batch_tokens}: wanted tokens above 0")
    steps = 1 + critical_batch_tokens / batch_tokens
    tokens = 1 + batch_tokens / critical_batch_tokens
    relative = step_s * steps
    return TimeToLoss(steps, tokens, relative, None if min_steps is None else relative * min_steps)
