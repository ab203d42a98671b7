"""The commands. Everything heavy is imported inside them: `plan` answers before torch would have loaded."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from shardwise.view import terminal
from shardwise.view.asking import (
    InputError,
    Wishes,
    legal,
    read_output,
    read_plan_request,
    read_ranks,
    read_request,
)
from shardwise.view.terminal import CHECK_FAILED, NOTHING_FITS, guard

if TYPE_CHECKING:
    from shardwise.plan.job import Job
    from shardwise.plan.layout import Layout
    from shardwise.search.solve import Candidate, SearchResult
    from shardwise.view.review import Request, Review

MAX_DRAWN: Final = 20_000
"""Stages times micro-batches of a whole picture; a longer step is drawn with fewer micro-batches."""

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
Seq = Annotated[str | None, typer.Option("--seq", metavar="TOKENS", help="Tokens of a sequence; 8K by default.")]
Batch = Annotated[
    int | None, typer.Option("--batch", metavar="SEQUENCES", min=1, max=1 << 24, help="Sequences of a step.")
]
BatchTokens = Annotated[
    str | None, typer.Option("--batch-tokens", metavar="TOKENS", help="Tokens of a step, such as 4M.")
]
PrecisionName = Annotated[str | None, typer.Option("--precision", metavar="bf16|fp32|fp64", help="bf16 by default.")]
LayoutText = Annotated[str | None, typer.Option("--layout", metavar="TEXT", help='Such as "tp=8 pp=2 dp=4 mb=1".')]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN.toml", help="Write the best plan here.")]
Kept = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="PLAN.toml", help="Write this layout's plan here.")
]
ShownRank = Annotated[
    int, typer.Option("--rank", metavar="RANK", min=0, help="Global rank whose communication is shown.")
]
Ranks = Annotated[
    list[str] | None,
    typer.Option("--rank", metavar="RANKS", help="Global ranks, such as 0,8 or first,middle,last; 0 by default."),
]
Steps = Annotated[
    int | None, typer.Option("--steps", metavar="N", min=1, max=1 << 31, help="Steps; by default the plan's.")
]
Json = Annotated[bool, typer.Option("--json", help="The same content for programs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected failure.")]


# --------------------------------------------------------------------------------------------------------- commands


@app.command()
def fit(
    subject: Shown,
    on: On = None,
    seq: Seq = None,
    batch: Batch = None,
    batch_tokens: BatchTokens = None,
    precision: PrecisionName = None,
    layout: LayoutText = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Does it fit?

    Answers for a given layout, or for the fastest of all: shardwise fit llama-3.1-8b --on 8xh100
    """
    with guard(debug):
        asked = read_request(subject, Wishes(on, seq, batch, batch_tokens, precision, layout))
        found = search(asked, 1) if asked.layout is None else None
        layouts = [legal(asked)] if found is None else [best.layout for best in found.best[:1]]
        of = review(asked.job, layouts[0], detailed=False) if layouts else None
        from shardwise.view import data, pages

        terminal.emit(as_json, lambda: data.fit(asked, of, found), lambda width: pages.fit(asked, of, found, width))
        if of is None or not of.fits:
            raise typer.Exit(NOTHING_FITS)


@app.command()
def plan(
    subject: Subject,
    on: On = None,
    seq: Seq = None,
    batch: Batch = None,
    batch_tokens: BatchTokens = None,
    precision: PrecisionName = None,
    output: Output = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Which layout trains fastest?

    Ranks all that fit, and writes the best as a plan: shardwise plan llama-3.1-70b --on 64x8xh100 --batch-tokens 4M
    """
    with guard(debug):
        read_output(output)
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
def show(
    subject: Shown,
    on: On = None,
    seq: Seq = None,
    batch: Batch = None,
    batch_tokens: BatchTokens = None,
    precision: PrecisionName = None,
    layout: LayoutText = None,
    rank: ShownRank = 0,
    output: Kept = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What does this layout cost?

    Memory, time, communication and pipeline of one layout, whether it fits or not, and writes it as a plan:
    shardwise show llama-3.1-8b --on 8xh100 --layout "tp=2 dp=4 zero=3 mb=2"
    """
    with guard(debug):
        read_output(output)
        asked = read_request(subject, Wishes(on, seq, batch, batch_tokens, precision, layout))
        if asked.layout is None:
            raise InputError(
                ['--layout: missing, for example --layout "tp=8 pp=2 dp=4 mb=1"; `plan` finds the best one']
            )
        chosen = legal(asked)
        with terminal.working("count, simulate"):
            of = review(asked.job, chosen, rank)
        from shardwise.plan.plan import Plan, write
        from shardwise.view import data, pages

        if output is not None:
            write(Plan(asked.job, of.layout, results=data.show_results(of)), output)
        written = None if output is None else str(output)
        terminal.emit(
            as_json, lambda: data.show(asked, of, written), lambda width: pages.show(asked, of, width, written)
        )


@app.command()
def prove(path: PlanFile, rank: Ranks = None, as_json: Json = False, debug: Debug = False) -> None:
    """Is the plan true?

    Runs the real training code of one rank on fake tensors, without the memory that it would need, and compares its
    peak and every collective with the plan: shardwise prove plan.toml --rank first,middle,last
    """
    with guard(debug):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that fake ranks have no network
        asked = read_plan_request(path, Wishes())
        layout = legal(asked)
        ranks = read_ranks(rank or ["first"], layout.world_size)
        from shardwise.view import proof

        with terminal.working("dry run: loading torch") as tell:
            from shardwise.prove.dryrun import prove_rank

            found: list[proof.ProofView] = []
            for one in ranks:

                def done(n: int, of: int, of_rank: int = one) -> None:
                    tell(f"dry run of rank {of_rank}: {n} of {of} micro-batches")

                tell(f"dry run of rank {one}")
                found.append(prove_rank(asked.job, layout, one, progress=done))
        terminal.emit(as_json, lambda: proof.data(path, found), lambda _: proof.page(asked, found))
        if not all(one.ok for one in found):
            raise typer.Exit(CHECK_FAILED)


@app.command("train")
def train_(path: PlanFile, steps: Steps = None, as_json: Json = False, debug: Debug = False) -> None:
    """Do it.

    Trains on processes of this machine, one a rank, or joins the ranks of torchrun: shardwise train examples/tiny.toml
    """
    from shardwise.plan.plan import load_plan
    from shardwise.train.environment import is_reporter
    from shardwise.view.review import Request

    with guard(debug, speaks=is_reporter()):
        chosen = load_plan(path)
        legal(Request(chosen.job, chosen.layout))
        from shardwise.train.data import DataError
        from shardwise.train.launch import RankFailed
        from shardwise.train.loop import WorldMismatchError, train
        from shardwise.view import training

        speaks = is_reporter() and not as_json
        try:
            say = training.step_data if as_json else training.step_line
            opening = partial(terminal.line, training.opening(chosen)) if speaks else None
            done = train(chosen, steps, lambda of: terminal.line(say(of)), opening)
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


# ------------------------------------------------------------------------------------------------------- finding out


def review(job: Job, layout: Layout, rank: int = 0, detailed: bool = True) -> Review:
    """All that is known of one legal layout; `detailed`, with one global rank's communication and the pipeline."""
    from shardwise.account.comm import predict_ledger
    from shardwise.account.compute import flops_per_token
    from shardwise.account.memory import memory_of
    from shardwise.simulate.step import step_time, timeline
    from shardwise.view.review import Review

    read_ranks([str(rank)], layout.world_size)
    schedule, times = timeline(job, layout, drawn(job, layout) if detailed else layout.pp)
    of = Review(
        job=job,
        layout=layout,
        memory=memory_of(job, layout),
        step=step_time(job, layout),
        flops_per_token=flops_per_token(job.model, job.seq_len),
        rank=rank,
        ledger=predict_ledger(job, layout, rank) if detailed else Counter(),
        schedule=schedule,
        timeline=times,
    )
    return of if of.fits else replace(of, remedies=remedies(job, layout))


def drawn(job: Job, layout: Layout) -> int:
    """Micro-batches of the picture: all, or where they are very many, enough for both ends and a steady middle."""
    whole = job.micro_batches(layout)
    return whole if whole * layout.stages <= MAX_DRAWN else min(whole, layout.pp * max(4, 64 // layout.pp))


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
    tried = {replace(layout, **change) for change in changes if all(v != 0 for v in change.values())}
    found = [evaluate(job, one) for one in tried - {layout} if not findings(one, job)]
    return sorted((c for c in found if c.fits), key=lambda c: (c.step.total_s, str(c.layout)))


def search(asked: Request, keep: int = KEPT) -> SearchResult:
    """The `keep` best layouts of a job."""
    from shardwise.search.solve import solve

    with terminal.working("search") as tell:
        return solve(asked.job, lambda what, n, of: tell(f"search: {what}, {n:,} of {of:,} layouts"), keep)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without µ gets a question mark, not a failure
    app(prog_name="shardwise")


if __name__ == "__main__":
    main()
