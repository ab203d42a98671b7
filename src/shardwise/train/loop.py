"""The loop: start the ranks or join a launcher's, read data, step, save, report."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from shardwise.account.compute import flops_per_token
from shardwise.collective import Labels, Phase
from shardwise.mesh import DATA
from shardwise.model.hf import to_config
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.settings import TrainSettings
from shardwise.train.data import Corpus, read_corpus
from shardwise.train.device import Target, check_world
from shardwise.train.distributed import CommError, close_world, open_world
from shardwise.train.environment import is_reporter, launched, local_rank, local_world_size
from shardwise.train.launch import RankFailed, failure_of, launch
from shardwise.train.optim import OptimizerSettings
from shardwise.train.options import Options
from shardwise.train.profile import open_folder, profiled
from shardwise.train.rank import Rank, build_rank, set_weights, train_step

if TYPE_CHECKING:
    from shardwise.train.checkpoint import Checkpoint, Saver
    from shardwise.train.hf_weights import Weights

TIMEOUT_S = 300.0
"""Longest wait for another rank: it bounds a hang and the work of a stage. A rank that ends is noticed at once."""

SECOND_S = 3.0
"""How long a rank with nothing new to say stays, under a launcher: that ends all ranks as soon as one has left, so the
one that knows more speaks first, and alone."""

LATE_IMPORTS = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo")
"""What torch's first backward and first optimizer import (1.2 s): once here, not once in every forked rank."""


class NotFiniteError(ArithmeticError):
    """The loss or the gradient's norm is infinite or no number: nothing that follows would mean anything."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as rank 0 tells it. `mfu`: None where the device's file has no peak; `saved`: a new checkpoint."""

    step: int
    steps: int
    loss: float
    norm: float
    tokens: int
    seconds: float
    learning_rate: float = 0.0
    memory_bytes: int = 0
    mfu: float | None = None
    saved: str | None = None


OnStep = Callable[[StepReport], None]


@dataclass(frozen=True, slots=True)
class Run:
    """What every rank is started with. `settings` are the plan's, or the defaults; `weights` are the first ones, where
    they are not drawn from the seed."""

    target: Target
    plan: Plan
    settings: TrainSettings
    options: Options
    corpus: Corpus
    resume: Checkpoint | None = None
    weights: Weights | None = None

    @property
    def seed(self) -> int | None:
        """Of the first weights; None where they come from files."""
        return self.settings.seed if self.resume is None and self.weights is None else None

    @property
    def start(self) -> int:
        """Steps that are done already."""
        return 0 if self.resume is None else self.resume.step

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on to go on here; the layout is not among it."""
        job, settings = self.plan.job, self.settings
        model = {f"model.{key}": value for key, value in to_config(job.model).items()}
        return model | {
            "state type": job.precision.accumulate,
            "optimizer": job.optimizer.name,
            "seq_len": job.seq_len,
            "global_batch": job.global_batch,
            "seed": settings.seed,
            "data": self.corpus.fingerprint(),
        }


def train(
    plan: Plan,
    on_step: OnStep | None = None,
    on_start: Callable[[], None] | None = None,
    options: Options | None = None,
) -> list[StepReport]:
    """Train, and return what each step reported (on the reporting process; elsewhere nothing).

    Without a launcher this process starts the ranks itself, on this machine, and calls `on_step`; it must not have
    run a torch operation, or used a GPU. `on_start` is called once nothing more can be wrong with the input. Raises
    WorldMismatchError, DataError, WeightsError or CheckpointError before any rank starts, and RankFailed after.
    """
    place = launched()
    target = check_world(plan, place)
    run = _prepare(target, plan, options or Options())
    if on_start is not None:
        on_start()
    with _recorded(run, on_step) as told:
        if place is None:
            for name in LATE_IMPORTS:
                importlib.import_module(name)
            return launch(plan.layout.world_size, _run_rank, (run,), on_word=told)[0]
        return _join(run, place, told)


def _join(run: Run, place: tuple[int, int], told: OnStep) -> list[StepReport]:
    """As one of a launcher's ranks."""
    rank, world_size = place
    try:
        return _run_rank(rank, world_size, None, run, told)
    except BrokenPipeError:  # of rank 0's output
        raise
    except Exception as error:
        failed = RankFailed(rank, failure_of(error))
        if isinstance(error, CommError) or failed.rank != rank:  # another rank has failed, most likely
            time.sleep(SECOND_S)
        raise failed from error


# ---------------------------------------------------------------------------------------------------------- beforehand


def _prepare(target: Target, plan: Plan, options: Options) -> Run:
    """Everything about data, weights and checkpoints that can be wrong is found before a rank starts."""
    settings = plan.train or TrainSettings()
    job = plan.job
    corpus = read_corpus(
        settings.data, job.seq_len, settings.seed, job.global_batch, vocab=job.model.vocab, tokenizer=options.tokenizer
    )
    run = Run(target, plan, settings, options, corpus)
    if options.init_from is not None:
        from shardwise.train.hf_weights import open_weights

        run = replace(run, weights=open_weights(job.model, options.init_from))
    if options.profile is not None:
        open_folder(options.profile)
    if options.save is None and options.resume is None:
        return run
    from shardwise.train import checkpoint  # half a second: once here, not once in every forked rank

    if options.resume is not None:
        run = replace(run, resume=checkpoint.find_checkpoint(options.resume, run.identity()))
        if run.start >= settings.steps:
            fault = f"{options.resume}: {run.start:,} steps are done; this run ends at {settings.steps:,}: take --steps"
            raise checkpoint.CheckpointError([fault])
    if options.save is not None:
        checkpoint.open_folder(options.save, run.start)
    return run


@contextmanager
def _recorded(run: Run, on_step: OnStep | None) -> Iterator[OnStep]:
    """Tells `on_step` and appends to the metrics file, where there is one, on the reporting process."""
    path = run.options.metrics_file
    with nullcontext() if path is None or not is_reporter() else path.open("a", encoding="utf-8") as file:

        def told(of: StepReport) -> None:
            if file is not None:
                file.write(json.dumps(asdict(of)) + "\n")
                file.flush()
            if on_step is not None:
                on_step(of)

        yield told


# ------------------------------------------------------------------------------------------------------------ one rank


def _run_rank(
    rank: int, world_size: int, rendezvous: str | None, run: Run, on_step: OnStep | None = None
) -> list[StepReport]:
    """One rank from its start to its end."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size(world_size)))
    labels, target = Labels(), run.target
    device = target.device(local_rank(rank, world_size))
    comm = open_world(target.backend, rank, world_size, rendezvous, labels=labels, timeout_s=TIMEOUT_S, device=device)
    among = _all_ranks(run)
    optimizer = OptimizerSettings.of(run.settings)
    built = build_rank(run.plan.job, run.plan.layout, comm, labels, seed=run.seed, settings=optimizer, device=device)
    if run.weights is not None:
        set_weights(built, run.weights.local)
    saver = _restore(built, run, among) if among is not None else None
    with profiled(run.options.profile, built, range(run.start, run.settings.steps)) as advance:
        reports = _steps(built, run, saver, on_step if rank == 0 else None, advance)
    close_world()  # not after a failure: peers would fail of it, and be heard before the cause
    return reports if rank == 0 else []


def _all_ranks(run: Run) -> Any:
    """The checkpoints' own group, where there are any: before any other group is made."""
    if run.options.save is None and run.resume is None:
        return None
    from shardwise.train.checkpoint import AllRanks

    return AllRanks.make(TIMEOUT_S)


def _restore(rank: Rank, run: Run, among: Any) -> Saver | None:
    """Go on from the checkpoint, and make ready to save."""
    from shardwise.train.checkpoint import About, Saver, load

    if run.resume is not None:
        load(rank, run.resume, among)
    if run.options.save is None:
        return None
    return Saver(rank, run.options.save, About(run.identity(), asdict(run.settings)), among, run.options.keep)


def _steps(
    rank: Rank, run: Run, saver: Saver | None, on_step: OnStep | None, advance: Callable[[], None]
) -> list[StepReport]:
    reports: list[StepReport] = []
    steps, every = run.settings.steps, run.options.save_every
    for step in range(run.start, steps):
        started = time.perf_counter()
        try:
            learning_rate = run.settings.learning_rate_at(step)
            rank.optimizer.set_learning_rate(learning_rate)
            result = train_step(rank, *_micro_batches(rank, run.corpus, step))
            loss, norm = float(result.loss), float(result.norm)
            _require_finite(loss, norm)
            _save(saver, step + 1, (step + 1) % every == 0 or step + 1 == steps)
        except BaseException as error:
            _name_step(error, step)
            raise
        seconds, tokens = time.perf_counter() - started, rank.job.tokens
        advance()
        reports.append(
            StepReport(
                *(step + 1, steps, loss, norm, tokens, seconds, learning_rate),
                memory_bytes=_peak_memory_bytes(rank.device),
                mfu=_mfu(rank.job, rank.layout, seconds),
                saved=None if saver is None else saver.news(),
            )
        )
        if on_step is not None:
            on_step(reports[-1])
    if saver is not None:
        saver.finish()
    return reports


def _save(saver: Saver | None, steps: int, due: bool) -> None:
    """Hear of a save that has failed; start one when it is due. Both are the same on every rank, or soon."""
    if saver is not None:
        saver.check()
        if due:
            saver.start(steps)


def _require_finite(loss: float, norm: float) -> None:
    if not (isfinite(loss) and isfinite(norm)):
        raise NotFiniteError(f"loss {loss:g}, gradient norm {norm:g}: take a smaller learning_rate or clip_norm")


def _name_step(error: Any, step: int) -> None:
    """The launcher reports the step of the rank that failed first; a failed save has its own."""
    if getattr(error, "step", None) is None:
        error.step = step + 1


def _peak_memory_bytes(device: torch.device) -> int:
    """The device's, of this rank; on a CPU its process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _mfu(job: Job, layout: Layout, seconds: float) -> float | None:
    """Model FLOPs over those of the peak that the device's file gives for the products' dtype."""
    peak = job.cluster.device.peak_flops.get(job.precision.product_dtype, 0.0)
    done = flops_per_token(job.model, job.seq_len) * job.tokens
    return done / (seconds * layout.world_size * peak) if peak else None


def _micro_batches(rank: Rank, corpus: Corpus, step: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(ids, targets) [micro-batches, T] on this rank's device: the step's samples, micro-batch by micro-batch."""
    if not (rank.needs_ids or rank.needs_targets):
        return None, None
    places = sample_places(rank.layout, rank.world.index(*DATA), rank.job.global_batch, step)
    with rank.world.labels.at(phase=Phase.DATA):
        samples = torch.stack([corpus.batch(block) for block in places])  # [m, mb, s + 1]
        ids = _onto(rank.device, samples[..., :-1].flatten(1)) if rank.needs_ids else None
        targets = _onto(rank.device, samples[..., 1:].flatten(1)) if rank.needs_targets else None
    return ids, targets


def _onto(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """x [contiguous] on the device; the copy to a GPU takes its place in the queue and nobody waits for it."""
    x = x.contiguous()
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def sample_places(layout: Layout, data_rank: int, global_batch: int, step: int) -> list[range]:
    """Places in the sample stream of each micro-batch of one data-parallel rank.

    A step takes the same `global_batch` places on any layout: micro-batch i of all ranks is one block of them.
    """
    block = layout.dp * layout.mb
    first = step * global_batch + data_rank * layout.mb
    return [range(first + i * block, first + i * block + layout.mb) for i in range(global_batch // block)]
