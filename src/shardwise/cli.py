"""The commands. Everything heavy is imported inside them: `plan` answers before torch would have loaded."""

from __future__ import annotations

import gc
import io
import os
import sys
from functools import partial
from typing import Annotated

import typer

from shardwise.search.heap import no_collection
from shardwise.train.options import KEEP, SAVE_EVERY
from shardwise.view import options as given
from shardwise.view import terminal
from shardwise.view import training_options as at
from shardwise.view.asking import (
    InputError,
    SearchWishes,
    Wishes,
    legal,
    read_model,
    read_output,
    read_plan_request,
    read_planning,
    read_ranks,
    read_recipe,
    read_request,
    read_table,
    runnable,
)
from shardwise.view.finding import elsewhere, in_convention, review, search, tell
from shardwise.view.terminal import CHECK_FAILED, NOTHING_FITS, guard

app = typer.Typer(
    name="shardwise",
    help="Plan, prove and run the parallel training of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# --------------------------------------------------------------------------------------------------------- commands


@app.command()
def fit(
    subject: given.Shown,
    on: given.On = None,
    seq: given.Seq = None,
    batch: given.Batch = None,
    batch_tokens: given.BatchTokens = None,
    precision: given.PrecisionName = None,
    stack: given.StackName = None,
    imbalance: given.Imbalance = None,
    optimizer: given.OptimizerName = None,
    layout: given.LayoutText = None,
    as_json: given.Json = False,
    debug: given.Debug = False,
) -> None:
    """Does it fit?

    Answers for a given layout, or for the fastest of all: shardwise fit llama-3.1-8b --on 8xh100
    """
    with guard(debug), no_collection():
        wishes = Wishes(on, seq, batch, batch_tokens, precision, layout, stack, imbalance, optimizer=optimizer)
        asked = read_request(subject, wishes)
        found = search(asked, 1) if asked.layout is None else None
        layouts = [legal(asked)] if found is None else [best.layout for best in found.best[:1]]
        of = review(asked.job, layouts[0], detailed=False) if layouts else None
        told = tell(asked, found) if of is None and found is not None else None
        from shardwise.view import data, pages

        terminal.emit(
            as_json, lambda: data.fit(asked, of, found, told), lambda width: pages.fit(asked, of, found, width, told)
        )
        if of is None or not of.fits:
            raise typer.Exit(NOTHING_FITS)


@app.command()
def plan(
    subject: given.Subject,
    on: given.On = None,
    seq: given.Seq = None,
    batch: given.Batch = None,
    batch_tokens: given.BatchTokens = None,
    precision: given.PrecisionName = None,
    stack: given.StackName = None,
    imbalance: given.Imbalance = None,
    optimizer: given.OptimizerName = None,
    pin: given.Pins = None,
    forbid: given.Forbids = None,
    only_runnable: given.OnlyRunnable = False,
    critical_batch: given.CriticalBatch = None,
    why_not: given.WhyNot = None,
    output: given.Output = None,
    as_json: given.Json = False,
    debug: given.Debug = False,
) -> None:
    """Which layout trains fastest?

    Ranks all that fit, explains the best and writes it: shardwise plan llama-3.1-70b --on 64x8xh100 --batch-tokens 4M
    """
    with guard(debug), no_collection():
        read_output(output)
        wishes = Wishes(on, seq, batch, batch_tokens, precision, why_not, stack, imbalance, optimizer=optimizer)
        asked, limits, critical = read_planning(
            subject, wishes, SearchWishes(pin, forbid, only_runnable, critical_batch)
        )
        found = search(asked, limits=limits)
        told = tell(asked, found, limits, critical)
        from shardwise.plan.plan import Plan, write
        from shardwise.view import data, pages

        written = None
        if output is not None and found.best:
            write(Plan(asked.job, found.best[0].layout, results=data.plan_results(found)), output)
            written = str(output)
        terminal.emit(
            as_json,
            lambda: data.plan(asked, found, written, told),
            lambda width: pages.plan(asked, found, written, width, told),
        )
        if not found.best:
            raise typer.Exit(NOTHING_FITS)


@app.command()
def show(
    subject: given.Shown,
    on: given.On = None,
    seq: given.Seq = None,
    batch: given.Batch = None,
    batch_tokens: given.BatchTokens = None,
    precision: given.PrecisionName = None,
    stack: given.StackName = None,
    imbalance: given.Imbalance = None,
    optimizer: given.OptimizerName = None,
    layout: given.LayoutText = None,
    mfu: given.MfuName = None,
    stacks: given.AllStacks = False,
    levels: given.AllLevels = False,
    rank: given.ShownRank = 0,
    output: given.Kept = None,
    as_json: given.Json = False,
    debug: given.Debug = False,
) -> None:
    """What does this layout cost?

    Memory, time, communication and pipeline of one layout, whether it fits or not, and writes it as a plan:
    shardwise show llama-3.1-8b --on 8xh100 --layout "tp=2 dp=4 zero=3 mb=2"
    """
    with guard(debug), no_collection():
        read_output(output)
        wishes = Wishes(on, seq, batch, batch_tokens, precision, layout, stack, imbalance, mfu, optimizer)
        asked = read_request(subject, wishes)
        if asked.layout is None:
            raise InputError(
                ['--layout: missing, for example --layout "tp=8 pp=2 dp=4 mb=1"; `plan` finds the best one']
            )
        chosen = legal(asked)
        with terminal.working("count, simulate"):
            of = in_convention(review(asked.job, chosen, rank), asked.mfu)
            others = elsewhere(asked.job, chosen, asked.mfu, levels, stacks)
        from shardwise.plan.plan import Plan, write
        from shardwise.view import data, pages

        if output is not None:
            write(Plan(asked.job, of.layout, asked.train, data.show_results(of)), output)
        written = None if output is None else str(output)
        terminal.emit(
            as_json,
            lambda: data.show(asked, of, written, others),
            lambda width: pages.show(asked, of, width, written, others),
        )


@app.command()
def models(
    name: given.Named = None, seq: given.Seq = None, as_json: given.Json = False, debug: given.Debug = False
) -> None:
    """Which models are known?

    The catalogue, or one model, config.json or folder in detail: shardwise models llama-3.1-8b
    """
    with guard(debug):
        from shardwise.view import models as view

        if name is None:
            found = view.listing()
            terminal.emit(as_json, lambda: view.list_data(found), lambda width: view.list_page(found, width))
            return
        model, seq_len = read_model(name, seq)
        terminal.emit(as_json, lambda: view.data(model, seq_len), lambda _: view.page(model, seq_len))


@app.command()
def clusters(name: given.Named = None, as_json: given.Json = False, debug: given.Debug = False) -> None:
    """Which accelerators are known?

    All of them, one, or a cluster as it is understood: shardwise clusters 64x8xh100
    """
    with guard(debug):
        from shardwise.view import clusters as view

        if name is None:
            terminal.emit(as_json, view.list_data, view.list_page)
            return
        of, part = view.read(name)
        terminal.emit(as_json, lambda: view.data(of, part), lambda _: view.page(of, part))


@app.command()
def schedules(
    name: given.Named = None,
    pp: given.Stages = 4,
    micro_batches: given.MicroBatches = 8,
    as_csv: given.Csv = False,
    as_json: given.Json = False,
    debug: given.Debug = False,
) -> None:
    """Which pipeline schedules are known?

    A sentence each, or one drawn as a grid: shardwise schedules zb-v --pp 4 --micro-batches 8
    """
    with guard(debug):
        from shardwise.view import schedules as view

        if name is None:
            terminal.emit(as_json, view.list_data, lambda _: view.list_page())
            return
        of = view.read(name, pp, micro_batches)
        if as_csv:
            sys.stdout.write(view.csv(of))
            return
        terminal.emit(as_json, lambda: view.data(of), lambda width: view.page(of, width))


@app.command()
def rules(as_json: given.Json = False, debug: given.Debug = False) -> None:
    """What must a layout keep?

    Every rule by the id under which it is broken.
    """
    with guard(debug):
        from shardwise.view import rules as view

        terminal.emit(as_json, view.data, lambda _: view.page())


@app.command()
def prove(
    path: given.PlanFile, rank: given.Ranks = None, as_json: given.Json = False, debug: given.Debug = False
) -> None:
    """Is the plan true?

    Runs the real training code of one rank on fake tensors, without the memory that it would need, and compares its
    peak and every collective with the plan: shardwise prove plan.toml --rank first,middle,last
    """
    with guard(debug):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that fake ranks have no network
        asked = read_plan_request(path, Wishes())
        layout = runnable(asked)
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
def train_(
    path: given.PlanFile,
    steps: given.Steps = None,
    data: at.DataFile = None,
    tokenizer: at.TokenizerFile = None,
    init_from: at.InitFrom = None,
    save: at.Save = None,
    save_every: at.SaveEvery = SAVE_EVERY,
    keep: at.Keep = KEEP,
    resume: at.Resume = None,
    learning_rate: at.LearningRate = None,
    warmup: at.Warmup = None,
    decay: at.Decay = None,
    floor: at.Floor = None,
    metrics: at.Metrics = None,
    profile: at.Profile = None,
    as_json: given.Json = False,
    debug: given.Debug = False,
) -> None:
    """Do it.

    Trains on processes of this machine, one a rank, or joins the ranks of torchrun: shardwise train examples/tiny.toml
    --save runs/a, and on any other layout: shardwise train other.toml --resume runs/a
    """
    from shardwise.train.environment import is_reporter
    from shardwise.view.review import Request

    with guard(debug, speaks=is_reporter()):
        chosen = read_recipe(
            path,
            steps=steps,
            data=data,
            learning_rate=learning_rate,
            warmup=warmup,
            decay=decay,
            floor=floor,
        )
        runnable(Request(chosen.job, chosen.layout))
        from shardwise.train.data import DataError
        from shardwise.train.device import WorldMismatchError, target_of
        from shardwise.train.launch import RankFailed
        from shardwise.train.loop import train
        from shardwise.train.optim import kernel_of
        from shardwise.train.options import Options, newest
        from shardwise.view import training

        speaks = is_reporter() and not as_json
        options = Options(tokenizer, save, save_every, keep, resume, metrics, profile, init_from)
        try:
            kernel = kernel_of(chosen.job.optimizer, target_of(chosen.job.cluster).kind)
            opening = partial(terminal.line, training.opening(chosen, kernel, init_from)) if speaks else None
            with training.telling(as_json) as tell_step:
                done = train(chosen, tell_step, opening, options)
        except (DataError, WorldMismatchError) as error:
            raise InputError([f"{path}: {error}"]) from error
        except RankFailed as error:
            terminal.fail(training.exit_code(error.kind), [*str(error).splitlines(), *training.profiles(profile)])
        except KeyboardInterrupt:
            terminal.fail(terminal.INTERRUPTED, training.interrupted(save and newest(save), profile))
        if speaks and done:
            terminal.line(training.closing(done, save and newest(save), profile))


@app.command()
def export(
    checkpoint: at.Checkpoint,
    output: at.Folder,
    dtype: at.Dtype = None,
    as_json: given.Json = False,
    debug: given.Debug = False,
) -> None:
    """Take the weights along.

    Writes those of a checkpoint, whatever layout saved it, as transformers loads them: shardwise export runs/a -o hf
    """
    with guard(debug):
        from shardwise.view import training

        with terminal.working("export: loading torch") as say:
            from shardwise.train.export import export as write_weights

            done = write_weights(checkpoint, output, dtype, lambda name, n, of: say(f"export: {n} of {of}, {name}"))
        terminal.emit(as_json, lambda: training.exported_data(done), lambda _: training.exported_page(done))


@app.command()
def score(file: given.ScoreFile = None, as_json: given.Json = False, debug: given.Debug = False) -> None:
    """How wrong are the predictions?

    Predicts every published run of a table and prints the errors by source; by default of the table that comes along.
    """
    with guard(debug):
        read_table(file)
        from shardwise.view import scores

        with terminal.working("score") as say:
            from shardwise.score.score import score_file, to_json

            found = score_file(file, lambda what, n, of: say(f"score: {what}, {n:,} of {of:,}"))
        terminal.emit(as_json, lambda: to_json(found), lambda width: scores.page(found, width))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Plan, prove and run the parallel training of large language models."""
    if version:
        from shardwise import __version__

        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without µ gets a question mark, not a failure
    try:
        app(prog_name="shardwise")
    finally:
        gc.freeze()  # else the interpreter's last collection walks half a second through what ends with it


if __name__ == "__main__":
    main()
