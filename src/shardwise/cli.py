"""The commands. Everything heavy is imported inside them: `plan` answers before torch would have loaded."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from shardwise.view import terminal
from shardwise.view.terminal import CHECK_FAILED, NOTHING_FITS, guard

if TYPE_CHECKING:
    from shardwise.cluster import Device
    from shardwise.plan.job import Job, Precision
    from shardwise.plan.layout import Layout
    from shardwise.search.solve import Candidate, SearchResult
    from shardwise.view.review import Request, Review

T = TypeVar("T")

DEFAULT_SEQ: Final = 8192
KEPT: Final = 10
"""Layouts in the table of `plan`."""

app = typer.Typer(
    name="shardwise",
    help="Plan, prove and run the parallel training of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Subject = Annotated[str, typer.Argument(metavar="MODEL", help="A catalogue name, a config.json or its folder.")]
Shown = Annotated[str, typer.Argument(metavar="MODEL|PLAN.toml", help="A model as for plan, or a plan file.")]
PlanFile = Annotated[str, typer.Argument(metavar="PLAN.toml", help="A plan file.")]
On = Annotated[str | None, typer.Option("--on", metavar="CLUSTER", help="64x8xh100, 8xh100, 4xcpu, or a TOML file.")]
Seq = Annotated[int | None, typer.Option("--seq", min=1, max=1 << 24, help="Tokens of a sequence.")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, max=1 << 24, help="Sequences of a step.")]
BatchTokens = Annotated[
    str | None, typer.Option("--batch-tokens", metavar="TOKENS", help="Tokens of a step, such as 4M.")
]
PrecisionName = Annotated[str | None, typer.Option("--precision", metavar="bf16|fp32|fp64", help="bf16 by default.")]
LayoutText = Annotated[str | None, typer.Option("--layout", metavar="TEXT", help='Such as "tp=8 pp=2 dp=4 mb=1".')]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN.toml", help="Write the best plan here.")]
ShownRank = Annotated[int, typer.Option("--rank", min=0, help="Global rank whose communication is shown.")]
Ranks = Annotated[list[str] | None, typer.Option("--rank", help="Global ranks, such as 0,8 or first,middle,last.")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, max=1 << 31, help="Steps; by default the plan's.")]
Json = Annotated[bool, typer.Option("--json", help="The same content for programs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected failure.")]


class InputError(ValueError):
    """What was asked cannot be; like every error of bad input, `faults` says all that is wrong."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__("\n".join(self.faults))


@dataclass(frozen=True, slots=True)
class Wishes:
    """The options that describe a job and a layout, as typed."""

    on: str | None = None
    seq: int | None = None
    batch: int | None = None
    batch_tokens: str | None = None
    precision: str | None = None
    layout: str | None = None


# --------------------------------------------------------------------------------------------------------- commands


@app.command()
def fit(subject: Shown, on: On = None, seq: Seq = None, batch: Batch = None, batch_tokens: BatchTokens = None,
        precision: PrecisionName = None, layout: LayoutText = None, as_json: Json = False,
        debug: Debug = False) -> None:  # fmt: skip
    """Does it fit?

    Answers for a given layout, or for the best of all.
    """
    with guard(debug):
        asked = read_request(subject, Wishes(on, seq, batch, batch_tokens, precision, layout))
        found = search(asked) if asked.layout is None else None
        layouts = [legal(asked)] if found is None else [best.layout for best in found.best[:1]]
        of = review(asked.job, layouts[0]) if layouts else None
        from shardwise.view import data, pages

        terminal.emit(as_json, lambda: data.fit(asked, of, found), lambda width: pages.fit(asked, of, found, width))
        if of is None or not of.fits:
            raise typer.Exit(NOTHING_FITS)


@app.command()
def plan(subject: Subject, on: On = None, seq: Seq = None, batch: Batch = None, batch_tokens: BatchTokens = None,
         precision: PrecisionName = None, output: Output = None, as_json: Json = False,
         debug: Debug = False) -> None:  # fmt: skip
    """Which layout trains fastest?

    Ranks all that fit, and writes the best as a plan.
    """
    with guard(debug):
        asked = read_request(subject, Wishes(on, seq, batch, batch_tokens, precision), planning=True)
        found = search(asked)
        from shardwise.plan.plan import Plan, write
        from shardwise.view import data, pages

        written = None
        if output is not None and found.best:
            write(Plan(asked.job, found.best[0].layout, results=data.plan_results(found)), output)
            written = str(output)
        terminal.emit(
            as_json, lambda: data.plan(asked, found, written), lambda width: pages.plan(asked, found, written, width)
        )
        if not found.best:
            raise typer.Exit(NOTHING_FITS)


@app.command()
def show(subject: Shown, on: On = None, seq: Seq = None, batch: Batch = None, batch_tokens: BatchTokens = None,
         precision: PrecisionName = None, layout: LayoutText = None, rank: ShownRank = 0, as_json: Json = False,
         debug: Debug = False) -> None:  # fmt: skip
    """What does this layout cost?

    Memory, time, communication and pipeline of one layout, whether it fits or not.
    """
    with guard(debug):
        asked = read_request(subject, Wishes(on, seq, batch, batch_tokens, precision, layout))
        if asked.layout is None:
            raise InputError(
                ['--layout: missing, for example --layout "tp=8 pp=2 dp=4 mb=1"; `plan` finds the best one']
            )
        of = review(asked.job, legal(asked), rank)
        from shardwise.view import data, pages

        terminal.emit(as_json, lambda: data.show(asked, of), lambda width: pages.show(asked, of, width))


@app.command()
def prove(path: PlanFile, rank: Ranks = None, as_json: Json = False, debug: Debug = False) -> None:
    """Is the plan true?

    Runs the real training code of one rank on fake tensors and compares peak memory and every collective with the plan.
    """
    with guard(debug):
        asked = read_plan_request(path, Wishes())
        layout = legal(asked)
        ranks = read_ranks(rank or ["first"], layout.world_size)
        from shardwise.prove.dryrun import prove_rank
        from shardwise.view import proof

        with terminal.working("dry run") as tell:
            found = [prove_rank(asked.job, layout, one, progress=lambda n, of: tell(f"{n} of {of}")) for one in ranks]
        terminal.emit(as_json, lambda: proof.data(path, found), lambda _: proof.page(asked, found))
        if not all(one.ok for one in found):
            raise typer.Exit(CHECK_FAILED)


@app.command("train")
def train_(path: PlanFile, steps: Steps = None, as_json: Json = False, debug: Debug = False) -> None:
    """Do it.

    Trains on processes of this machine, one a rank, or joins the ranks of torchrun.
    """
    with guard(debug):
        legal(read_plan_request(path, Wishes()))
        from shardwise.plan.plan import load_plan
        from shardwise.train.data import DataError
        from shardwise.train.launch import RankFailed
        from shardwise.train.loop import WorldMismatchError, is_reporter, train
        from shardwise.view import training

        chosen, speaks = load_plan(path), is_reporter() and not as_json
        if speaks:
            terminal.line(training.opening(chosen))
        try:
            done = train(
                chosen, steps, lambda of: terminal.line(training.step_data(of) if as_json else training.step_line(of))
            )
        except (DataError, WorldMismatchError) as error:
            raise InputError([f"{path}: {error}"]) from error
        except RankFailed as error:
            terminal.fail(terminal.OUR_FAULT, str(error).splitlines())
        if speaks and done:
            terminal.line(training.closing(done))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Plan, prove and run the parallel training of large language models."""
    if version:
        from shardwise import __version__

        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


# --------------------------------------------------------------------------------------------------- reading requests


class Faults:
    """Collects what is wrong while the rest is still read, so that all is said at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def take(self, option: str, read: Callable[[], T]) -> T | None:
        """What `read` returns, or None and its faults."""
        try:
            return read()
        except ValueError as error:
            faults: list[str] = getattr(error, "faults", [str(error)])
            self.found += [f"{option}: {fault}" if option else fault for fault in faults]
            return None


def read_request(subject: str, wishes: Wishes, planning: bool = False) -> Request:
    """The job and the layout that the command line or a plan file asks for. Raises InputError with all faults."""
    if subject.endswith(".toml"):
        if planning:
            raise InputError(
                [f"{subject}: a plan already; wanted a model: a catalogue name, a config.json or its folder"]
            )
        return read_plan_request(subject, wishes)
    from shardwise.model.hf import load_model
    from shardwise.plan.job import PRECISIONS, Job
    from shardwise.plan.layout import parse
    from shardwise.plan.plan import load_cluster
    from shardwise.view.review import Request

    faults = Faults()
    model = faults.take(subject, lambda: load_model(subject))
    if wishes.on is None:
        faults.found.append("--on: missing; the cluster, such as --on 64x8xh100, or a plan file instead of a model")
    cluster = None if wishes.on is None else faults.take("--on", lambda: load_cluster(wishes.on or ""))
    layout = None if wishes.layout is None else faults.take("--layout", lambda: parse(wishes.layout or ""))
    name = wishes.precision or "bf16"
    if name not in PRECISIONS:
        faults.found.append(f"--precision: found {name!r}; wanted one of {', '.join(PRECISIONS)}")
    elif cluster is not None:
        faults.found += unknown_rate(cluster.device, PRECISIONS[name])
    seq_len = wishes.seq or DEFAULT_SEQ
    batch, assumed = read_batch(wishes, seq_len, layout, cluster.world_size if cluster else 1, faults)
    if planning and assumed:
        faults.found.append("--batch-tokens or --batch: missing; the global batch decides which layout is best")
    if faults.found or model is None or cluster is None:
        raise InputError(faults.found)
    if wishes.seq is None:
        assumed = (f"--seq {DEFAULT_SEQ}", *assumed)
    return Request(Job(model, cluster, seq_len, batch, PRECISIONS[name]), layout, assumed)


def unknown_rate(device: Device, precision: Precision) -> list[str]:
    """A fault if the device's data do not say how fast it computes in the precision's dtype."""
    if precision.compute in device.peak_flops:
        return []
    known = ", ".join(device.peak_flops)
    return [f"precision {precision.name}: peak_flops of {device.name} has no {precision.compute}; it has {known}"]


def read_batch(
    wishes: Wishes, seq_len: int, layout: Layout | None, devices: int, faults: Faults
) -> tuple[int, tuple[str, ...]]:
    """(sequences of a step, what was assumed for want of an option)."""
    from shardwise.plan.job import batch_from_tokens
    from shardwise.units import parse_tokens

    text = wishes.batch_tokens
    if text is not None:
        if wishes.batch is not None:
            faults.found.append("--batch: refused beside --batch-tokens, which already says it")
        read = faults.take("--batch-tokens", lambda: batch_from_tokens(parse_tokens(text), seq_len))
        return read or 1, ()
    if wishes.batch is not None:
        return wishes.batch, ()
    if layout is not None:
        return layout.dp * layout.mb, (f"--batch {layout.dp * layout.mb}, one micro-batch a data-parallel rank",)
    return devices, (f"--batch {devices}, one sequence a data-parallel rank where every device is one",)


def read_plan_request(path: str, wishes: Wishes) -> Request:
    """A plan file's job and layout; only the layout may be asked for otherwise."""
    from shardwise.plan.layout import parse
    from shardwise.plan.plan import load_plan
    from shardwise.view.review import Request

    faults = Faults()
    for key, value in asdict(wishes).items():
        if value is not None and key != "layout":
            faults.found.append(f"--{key.replace('_', '-')}: refused beside {path}, which already says it")
    found = faults.take("", lambda: load_plan(path))
    layout = None if wishes.layout is None else faults.take("--layout", lambda: parse(wishes.layout or ""))
    if faults.found or found is None:
        raise InputError(faults.found)
    if wrong := unknown_rate(found.job.cluster.device, found.job.precision):
        raise InputError([f"{path}: {fault}" for fault in wrong])
    return Request(found.job, layout or found.layout)


def read_ranks(texts: Sequence[str], world_size: int) -> list[int]:
    """Global ranks: numbers, or first, middle, last. Raises InputError with all that are none."""
    named = {"first": 0, "middle": world_size // 2, "last": world_size - 1}
    words = [word.strip() for text in texts for word in text.split(",")]
    ranks = [named[w] if w in named else int(w) if w.isascii() and w.isdigit() and len(w) < 10 else -1 for w in words]
    wrong = [w for w, rank in zip(words, ranks, strict=True) if not 0 <= rank < world_size]
    if wrong:
        limits = f"wanted a rank from 0 to {world_size - 1:,}, or first, middle, last"
        raise InputError([f"--rank: found {word[:40]!r}; {limits}" for word in wrong])
    return list(dict.fromkeys(ranks))


def legal(asked: Request) -> Layout:
    """The layout asked for. Raises InputError with every rule that it breaks."""
    from shardwise.plan.rules import findings

    assert asked.layout is not None
    broken = findings(asked.layout, asked.job)
    if broken:
        raise InputError([f"{asked.layout}: {finding}" for finding in broken])
    return asked.layout


# ------------------------------------------------------------------------------------------------------- finding out


def review(job: Job, layout: Layout, rank: int = 0) -> Review:
    """All that is known of one legal layout, with the communication of one global rank."""
    from shardwise.account.comm import predict_ledger
    from shardwise.account.compute import flops_per_token
    from shardwise.account.memory import memory_of
    from shardwise.simulate.step import step_time, timeline
    from shardwise.view.review import Review

    read_ranks([str(rank)], layout.world_size)
    schedule, times = timeline(job, layout)
    of = Review(
        job=job,
        layout=layout,
        memory=memory_of(job, layout),
        step=step_time(job, layout),
        flops_per_token=flops_per_token(job.model, job.seq_len),
        rank=rank,
        ledger=predict_ledger(job, layout, rank),
        schedule=schedule,
        timeline=times,
    )
    return of if of.fits else replace(of, remedies=remedies(job, layout))


def remedies(job: Job, layout: Layout) -> list[Candidate]:
    """Layouts one change away that are legal and fit, the fastest first."""
    from shardwise.plan.rules import findings
    from shardwise.search.solve import evaluate

    half = {"dp_shard": layout.dp_shard // 2} if layout.dp_shard > 1 else {"dp_replicate": layout.dp_replicate // 2}
    changes: list[dict[str, Any]] = [
        {"recompute": "full"},
        {"zero": max(1, layout.zero), "dp_replicate": 1, "dp_shard": layout.dp},
        {"zero": 3, "dp_replicate": 1, "dp_shard": layout.dp},
        {"mb": layout.mb // 2},
        {"tp": 2 * layout.tp, "sp": True, **half},
        {"pp": 2 * layout.pp, "split": (), **half},
    ]
    tried = {replace(layout, **change).normalised() for change in changes if all(v != 0 for v in change.values())}
    found = [evaluate(job, one) for one in tried - {layout} if not findings(one, job)]
    return sorted((c for c in found if c.fits), key=lambda c: (c.step.total_s, str(c.layout)))


def search(asked: Request) -> SearchResult:
    """The best layouts of a job."""
    from shardwise.search.solve import solve

    with terminal.working("search") as tell:
        return solve(asked.job, lambda what, n, of: tell(f"{what}, {n:,} of {of:,} layouts"), KEPT)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without µ gets a question mark, not a failure
    app(prog_name="shardwise")


if __name__ == "__main__":
    main()
