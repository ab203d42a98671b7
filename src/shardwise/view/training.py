"""Training as it goes: a line a step, and what it came to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rich.text import Text

from shardwise.plan.job import Job
from shardwise.plan.plan import Plan
from shardwise.plan.settings import TrainSettings
from shardwise.units import format_bytes, format_count, format_flops, format_seconds
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


def opening(plan: Plan, kernel: str = "", weights: object = None) -> str:
    """What is about to run; `kernel`: how the optimizer's step is computed, `weights`: where the first ones come from,
    if not from the seed."""
    settings = plan.train or TrainSettings()
    said = [
        words.what(plan.job),
        words.batch(plan.job),
        f"layout: {plan.layout}, {format_count(plan.layout.world_size)} ranks; {_mfu(plan.job)}",
        f"data: {settings.data}; {_update(plan.job, settings, kernel)}, seed {settings.seed}",
    ]
    return "\n".join([*said, *([] if weights is None else [f"weights: from {weights}"])])


def _mfu(job: Job) -> str:
    """What MFU is a share of, once for the run."""
    device, dtype = job.cluster.device, job.precision.product_dtype
    peak = device.peak_flops.get(dtype)
    if peak is None:
        return f"MFU n/a, {device.name} has no peak for {dtype}"
    return f"MFU of {format_flops(peak)}/s in {dtype} a rank"


def _update(job: Job, settings: TrainSettings, kernel: str) -> str:
    """`AdamW (fused), learning rate 0.0003, warmup 100 steps, cosine to 10 %, weight decay 0.1, clip norm 1`."""
    s = settings
    rates = [f"learning rate {s.learning_rate:g}"]
    if s.warmup:
        rates.append(f"warmup {format_count(s.warmup)} steps")
    if s.decay != "constant":
        rates.append(f"{s.decay} to {100 * s.floor:g} %")
    rates += [f"weight decay {s.weight_decay:g}", f"clip norm {s.clip_norm:g}"]
    return ", ".join([job.optimizer.title + (f" ({kernel})" if kernel else ""), *rates])


def step_line(of: StepView) -> str:
    """`step  7/50  loss 4.1234  gradient norm 1.23  98.7 ms  20,800 tokens/s`."""
    digits = len(str(of.steps))
    rate = f"{format_count(round(of.tokens / of.seconds))} tokens/s"
    place = f"step {of.step:>{digits}}/{of.steps}"
    return f"{place}  loss {of.loss:.4f}  gradient norm {of.norm:7.3f}  {format_seconds(of.seconds):>8}  {rate}"


def bar_text(of: ReportView) -> str:
    """The same on one line of a narrow terminal, beside a bar."""
    rate = f"{format_count(round(of.tokens / of.seconds))} tokens/s"
    mfu = "" if of.mfu is None else f"  {of.mfu:.1%} MFU"
    return f"step {of.step}/{of.steps}  loss {of.loss:.4f}  {rate}{mfu}  {format_bytes(of.memory_bytes)}"


def report_line(of: ReportView) -> str:
    """A step's line, with `312 MiB`, MFU where it is known, and a new checkpoint."""
    mfu = "" if of.mfu is None else f"  {of.mfu:.1%} MFU"
    saved = "" if of.saved is None else f"  saved {of.saved}"
    return f"{step_line(of)}  {format_bytes(of.memory_bytes)}{mfu}{saved}"


@contextmanager
def telling(as_json: bool) -> Generator[Callable[[ReportView], None]]:
    """Tells each step as it is called with it: JSON or a line each, or on a terminal one line that is redrawn, under
    those that name a new checkpoint."""
    if as_json or not sys.stdout.isatty():
        say = report_data if as_json else report_line
        yield lambda of: terminal.line(say(of))
        return
    with terminal.bar() as draw:

        def told(of: ReportView) -> None:
            if of.saved is not None:
                terminal.line(f"saved {of.saved}")
            draw(of.step, of.steps, bar_text(of))

        yield told


def closing(reports: Sequence[StepView], saved: object = None, profile: Path | None = None) -> str:
    """The loss at both ends, and the median step: the first ones warm up. `saved`: the last checkpoint, if any;
    `profile`: the folder of the profiles."""
    first, last = reports[0], reports[-1]
    total = format_count(sum(r.tokens for r in reports))
    usual = format_seconds(median(r.seconds for r in reports))
    said = f"loss {first.loss:.4f} -> {last.loss:.4f} over {total} tokens; median step {usual}"
    return "\n".join([said, *([] if saved is None else [f"saved {saved}"]), *profiles(profile)])


def profiles(folder: Path | None) -> list[str]:
    """A line that says where the profiles of a run lie, or that there are none; no line where none were asked for."""
    if folder is None:
        return []
    if not any(folder.glob("rank-*-memory.svg")):
        return [f"no profile in {folder}: the run ended before one was whole"]
    return [f"profile in {folder}: rank-N.json for ui.perfetto.dev, rank-N-memory.svg for any browser"]


def exit_code(kind: str) -> int:
    """Of a rank's failure, by what it is said to be."""
    return {"input": terminal.BAD_INPUT, "io": terminal.IO_FAILED}.get(kind, terminal.OUR_FAULT)


def interrupted(saved: object, profile: Path | None = None) -> list[str]:
    """What Ctrl-C leaves: `saved` is the last checkpoint, if there is any; `profile` the folder of the profiles."""
    said = "interrupted" if saved is None else f"interrupted; go on with --resume {saved}"
    return [said, *profiles(profile)]


class ExportView(Protocol):
    """What is shown of a `train.export.Exported`."""

    @property
    def checkpoint(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def folder(self) -> str: ...
    @property
    def files(self) -> Sequence[str]: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def exported_page(of: ExportView) -> Text:
    """What was written where, and how to load it."""
    parameters, files = (
        words.format_parameters(of.parameters),
        "1 file" if len(of.files) == 1 else f"{len(of.files)} files",
    )
    return Text(
        f"{of.checkpoint}: {parameters} parameters after step {format_count(of.step)}\n"
        f"written to {of.folder}: config.json and {files}, {format_bytes(of.total_bytes)} in {of.dtype}\n"
        f'next: transformers.AutoModelForCausalLM.from_pretrained("{of.folder}"), or train --init-from {of.folder}'
    )


def exported_data(of: ExportView) -> dict[str, Any]:
    """The same for programs."""
    names = ("checkpoint", "step", "folder", "total_bytes", "parameters", "dtype")
    return {name: getattr(of, name) for name in names} | {"files": list(of.files)}


def step_data(of: StepView) -> dict[str, Any]:
    """The same for programs."""
    names = ("step", "steps", "loss", "norm", "tokens", "seconds")
    return {name: getattr(of, name) for name in names}


def report_data(of: ReportView) -> dict[str, Any]:
    """The same of a report."""
    return step_data(of) | {"memory_bytes": of.memory_bytes, "mfu": of.mfu, "saved": of.saved}
