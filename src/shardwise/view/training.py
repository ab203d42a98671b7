"""Training as it goes: a line a step, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Protocol

from shardwise.plan.plan import Plan, TrainSettings
from shardwise.units import format_count, format_seconds
from shardwise.view import words


class StepView(Protocol):
    """What is shown of a `train.loop.StepReport`: that module lies above this one and needs torch."""

    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def norm(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...


def opening(plan: Plan) -> str:
    """What is about to run."""
    settings = plan.train or TrainSettings()
    rates = f"learning rate {settings.learning_rate:g}, weight decay {settings.weight_decay:g}"
    return "\n".join(
        (
            words.what(plan.job),
            words.batch(plan.job),
            f"layout: {plan.layout}, {format_count(plan.layout.world_size)} ranks",
            f"data: {settings.data}; AdamW, {rates}, clip norm {settings.clip_norm:g}, seed {settings.seed}",
        )
    )


def step_line(of: StepView) -> str:
    """`step  7/50  loss 4.1234  gradient norm 1.23  98.7 ms`."""
    digits = len(str(of.steps))
    rate = f"{format_count(round(of.tokens / of.seconds))} tokens/s"
    place = f"step {of.step:>{digits}}/{of.steps}"
    return f"{place}  loss {of.loss:.4f}  gradient norm {of.norm:7.3f}  {format_seconds(of.seconds):>8}  {rate}"


def closing(reports: Sequence[StepView]) -> str:
    """The loss at both ends, and the median step: the first ones warm up."""
    first, last = reports[0], reports[-1]
    total = format_count(sum(r.tokens for r in reports))
    usual = format_seconds(median(r.seconds for r in reports))
    return f"loss {first.loss:.4f} -> {last.loss:.4f} over {total} tokens; median step {usual}"


def step_data(of: StepView) -> dict[str, Any]:
    """The same for programs."""
    names = ("step", "steps", "loss", "norm", "tokens", "seconds")
    return {name: getattr(of, name) for name in names}
