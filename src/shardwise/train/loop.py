"""The loop: start the ranks or join a launcher's, read data, step, report."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from shardwise.collective import Labels
from shardwise.mesh import DATA
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan, TrainSettings
from shardwise.train.data import BYTES, Corpus, DataError, read_corpus
from shardwise.train.distributed import CommError, close_world, open_world
from shardwise.train.environment import launched, local_world_size
from shardwise.train.launch import RankFailed, failure_of, launch
from shardwise.train.optim import OptimizerSettings
from shardwise.train.rank import Rank, build_rank, train_step

TIMEOUT_S = 300.0
"""Longest wait for another rank: it bounds a hang and the work of a stage. A rank that ends is noticed at once."""

SECOND_S = 3.0
"""How long a rank with nothing new to say stays, under a launcher: that ends all ranks as soon as one has left, so the
one that knows more speaks first, and alone."""

LATE_IMPORTS = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo")
"""What torch's first backward and first optimizer import (1.2 s): once here, not once in every forked rank."""


class WorldMismatchError(ValueError):
    """The processes at hand are not the ranks that the layout wants; found before any of them talks to another."""


class NotFiniteError(ArithmeticError):
    """The loss or the gradient's norm is infinite or no number: nothing that follows would mean anything."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as rank 0 tells it."""

    step: int
    steps: int
    loss: float
    norm: float
    tokens: int
    seconds: float


OnStep = Callable[[StepReport], None]


def train(
    plan: Plan, steps: int | None = None, on_step: OnStep | None = None, on_start: Callable[[], None] | None = None
) -> list[StepReport]:
    """Train, and return what each step reported (on the reporting process; elsewhere nothing).

    Without a launcher this process starts the ranks itself, on this machine, and calls `on_step`; it must not have
    run a torch operation. `on_start` is called once nothing more can be wrong with the input. Raises
    WorldMismatchError or DataError before any rank starts, and RankFailed after.
    """
    settings = plan.train or TrainSettings()
    place = launched()
    _check_world(plan, place)
    corpus = _read_data(plan, settings)
    if on_start is not None:
        on_start()
    work = plan, settings, corpus, settings.steps if steps is None else steps
    if place is None:
        for name in LATE_IMPORTS:
            importlib.import_module(name)
        return launch(plan.layout.world_size, _run_rank, work, on_word=on_step)[0]
    rank, world_size = place
    try:
        return _run_rank(rank, world_size, None, *work, on_step)
    except BrokenPipeError:  # of rank 0's output
        raise
    except Exception as error:
        if isinstance(error, CommError):  # another rank has failed, most likely
            time.sleep(SECOND_S)
        raise RankFailed(rank, failure_of(error)) from error


def _check_world(plan: Plan, place: tuple[int, int] | None) -> None:
    layout, cluster = plan.layout, plan.job.cluster
    if cluster.device.name != "cpu":
        raise WorldMismatchError(
            f"the plan is for {cluster.name}, ranks run on CPUs only: plan for CPUs, such as {layout.world_size}xcpu"
        )
    if place is None and cluster.nodes > 1:
        raise WorldMismatchError(
            f"the plan is for {cluster.name}, this is one machine: start it on each node, with "
            f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} -m shardwise train PLAN"
        )
    if place is not None and place[1] != layout.world_size:
        raise WorldMismatchError(
            f"the layout {layout} wants {layout.world_size:,} ranks (tp {layout.tp} x pp {layout.pp} x "
            f"dp {layout.dp}), the launcher started {place[1]:,}"
        )


def _read_data(plan: Plan, settings: TrainSettings) -> Corpus:
    """Everything about the data that can be wrong is found before a rank starts."""
    if plan.job.model.vocab < BYTES:
        raise DataError(f"vocabulary of {plan.job.model.vocab}: byte-level text takes {BYTES}")
    return read_corpus(settings.data, plan.job.seq_len, settings.seed, plan.job.global_batch)


def _run_rank(
    rank: int,
    world_size: int,
    rendezvous: str | None,
    plan: Plan,
    settings: TrainSettings,
    corpus: Corpus,
    steps: int,
    on_step: OnStep | None = None,
) -> list[StepReport]:
    """One rank from its start to its end."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size(world_size)))
    labels = Labels()
    comm = open_world("gloo", rank, world_size, rendezvous, labels=labels, timeout_s=TIMEOUT_S)
    optimizer = OptimizerSettings.of(settings)
    built = build_rank(plan.job, plan.layout, comm, labels, seed=settings.seed, settings=optimizer)
    reports = _steps(built, corpus, steps, on_step if rank == 0 else None)
    close_world()  # not after a failure: peers would fail of it, and be heard before the cause
    return reports if rank == 0 else []


def _steps(rank: Rank, corpus: Corpus, steps: int, on_step: OnStep | None) -> list[StepReport]:
    reports: list[StepReport] = []
    for step in range(steps):
        started = time.perf_counter()
        try:
            result = train_step(rank, *_micro_batches(rank, corpus, step))
            loss, norm = float(result.loss), float(result.norm)
            _require_finite(loss, norm)
        except BaseException as error:
            _name_step(error, step)
            raise
        seconds = time.perf_counter() - started
        reports.append(StepReport(step + 1, steps, loss, norm, rank.job.tokens, seconds))
        if on_step is not None:
            on_step(reports[-1])
    return reports


def _require_finite(loss: float, norm: float) -> None:
    if not (isfinite(loss) and isfinite(norm)):
        raise NotFiniteError(f"loss {loss:g}, gradient norm {norm:g}: take a smaller learning_rate or clip_norm")


def _name_step(error: Any, step: int) -> None:
    """The launcher reports the step of the rank that failed first."""
    error.step = step + 1


def _micro_batches(rank: Rank, corpus: Corpus, step: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(ids, targets) [micro-batches, T] of this rank: the step's samples, micro-batch by micro-batch."""
    if not (rank.needs_ids or rank.needs_targets):
        return None, None
    rows = [
        corpus.batch(places)
        for places in sample_places(rank.layout, rank.world.index(*DATA), rank.job.global_batch, step)
    ]
    samples = torch.stack(rows)  # [m, mb, s + 1]
    ids = samples[..., :-1].flatten(1).contiguous() if rank.needs_ids else None
    targets = samples[..., 1:].flatten(1).contiguous() if rank.needs_targets else None
    return ids, targets


def sample_places(layout: Layout, data_rank: int, global_batch: int, step: int) -> list[range]:
    """Places in the sample stream of each micro-batch of one data-parallel rank.

    A step takes the same `global_batch` places on any layout: micro-batch i of all ranks is one block of them.
    """
    block = layout.dp * layout.mb
    first = step * global_batch + data_rank * layout.mb
    return [range(first + i * block, first + i * block + layout.mb) for i in range(global_batch // block)]
