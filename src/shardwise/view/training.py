"""Training as it goes: a line a step, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Protocol

from shardwise.plan.plan import Plan, TrainSettings
from shardwise.units import format_bytes, format_count, format_seconds
from shardwise.view import terminal, words


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


class ReportView(StepView, Protocol):
    """And what was measured beside the step."""

    @property
    def memory_bytes(self) -> int: ...
    @property
    def mfu(self) -> float | None: ...
    @property
    def saved(self) -> str | None: ...


def opening(plan: Plan, data: str | None = None) -> str:
    """What is about to run; `data` where it is not the plan's."""
    settings = plan.train or TrainSettings()
    rates = f"learning rate {settings.learning_rate:g}, weight decay {settings.weight_decay:g}"
    return "\n".join(
        (
            words.what(plan.job),
            words.batch(plan.job),
            f"layout: {plan.layout}, {format_count(plan.layout.world_size)} ranks",
            f"data: {data or settings.data}; AdamW, {rates}, clip norm {settings.clip_norm:g}, seed {settings.seed}",
        )
    )


def step_line(of: StepView) -> str:
    """`step  7/50  loss 4.1234  gradient norm 1.23  98.7 ms  20,800 tokens/s`."""
    digits = len(str(of.steps))
    rate = f"{format_count(round(of.tokens / of.seconds))} tokens/s"
    place = f"step {of.step:>{digits}}/{of.steps}"
    return f"{place}  loss {of.loss:.4f}  gradient norm {of.norm:7.3f}  {format_seconds(of.seconds):>8}  {rate}"


def report_line(of: ReportView) -> str:
    """A step's line, with `312 MiB`, MFU where it is known, and a new checkpoint."""
    mfu = "" if of.mfu is None else f"  {of.mfu:.1%} MFU"
    saved = "" if of.saved is None else f"  saved {of.saved}"
    return f"{step_line(of)}  {format_bytes(of.memory_bytes)}{mfu}{saved}"


def closing(reports: Sequence[StepView], saved: object = None) -> str:
    """The loss at both ends, and the median step: the first ones warm up. `saved`: the last checkpoint, if any."""
    first, last = reports[0], reports[-1]
    total = format_count(sum(r.tokens for r in reports))
    usual = format_seconds(median(r.seconds for r in reports))
    said = f"loss {first.loss:.4f} -> {last.loss:.4f} over {total} tokens; median step {usual}"
    return said if saved is None else f"{said}\nsaved {saved}"


def exit_code(kind: str) -> int:
    """Of a rank's failure, by what it is said to be."""
    return {"input": terminal.BAD_INPUT, "io": terminal.IO_FAILED}.get(kind, terminal.OUR_FAULT)


def interrupted(saved: object) -> str:
    """What Ctrl-C leaves: `saved` is the last checkpoint, if there is any."""
    return "interrupted" if saved is None else f"interrupted; go on with --resume {saved}"


def step_data(of: StepView) -> dict[str, Any]:
    """The same for programs."""
    names = ("step", "steps", "loss", "norm", "tokens", "seconds")
    return {name: getattr(of, name) for name in names}


def report_data(of: ReportView) -> dict[str, Any]:
    """The same of a report."""
    return step_data(of) | {"memory_bytes": of.memory_bytes, "mfu": of.mfu, "saved": of.saved}
