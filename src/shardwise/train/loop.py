"""The loop: start the ranks or join a launcher's, read data, step, report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.collective import Labels
from shardwise.mesh import DATA
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan, TrainSettings
from shardwise.train.data import BYTES, Corpus, DataError, read_corpus
from shardwise.train.distributed import close_world, open_world
from shardwise.train.launch import launch
from shardwise.train.optim import OptimizerSettings
from shardwise.train.rank import Rank, build_rank, train_step

TIMEOUT_S = 20.0
"""Longest wait for another rank inside a step: a rank that fails ends all others within 30 s."""


class WorldMismatchError(ValueError):
    """The processes at hand are not the ranks that the layout wants; found before any of them talks to another."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as rank 0 tells it."""

    step: int
    steps: int
    loss: float
    norm: float
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


OnStep = Callable[[StepReport], None]


def _launched() -> tuple[int, int] | None:
    """(rank, world size) of a launcher such as torchrun, or None."""
    names = ("RANK", "WORLD_SIZE")
    return (int(os.environ[names[0]]), int(os.environ[names[1]])) if all(n in os.environ for n in names) else None


def is_reporter() -> bool:
    """Whether this process is the one that prints: rank 0, or the one that starts the ranks."""
    found = _launched()
    return found is None or found[0] == 0


def train(plan: Plan, steps: int | None = None, on_step: OnStep | None = None) -> list[StepReport]:
    """Train, and return what each step reported (on the reporting process; elsewhere nothing).

    Without a launcher this process starts the ranks itself, on this machine; it must not have run a torch operation.
    Raises WorldMismatchError or DataError before any rank starts, and RankFailed or the rank's own error after.
    """
    settings = plan.train or TrainSettings()
    count = settings.steps if steps is None else steps
    launched = _launched()
    _check_world(plan, launched)
    _check_data(plan, settings)
    if launched is not None:
        rank, world_size = launched
        return _run_rank(rank, world_size, None, plan, settings, count, on_step)
    return launch(plan.layout.world_size, _run_rank, (plan, settings, count, on_step))[0]


def _check_world(plan: Plan, launched: tuple[int, int] | None) -> None:
    layout, cluster = plan.layout, plan.job.cluster
    wanted = layout.world_size
    if launched is not None:
        if launched[1] != wanted:
            raise WorldMismatchError(
                f"the layout {layout} wants {wanted:,} ranks (tp {layout.tp} x pp {layout.pp} x dp {layout.dp}), "
                f"the launcher started {launched[1]:,}"
            )
        return
    if cluster.nodes > 1 or cluster.device.name != "cpu":
        raise WorldMismatchError(
            f"the plan is for {cluster.name}, not for ranks on the CPUs of this machine: start it there, with "
            f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} -m shardwise train PLAN"
        )


def _check_data(plan: Plan, settings: TrainSettings) -> None:
    """Everything about the data that can be wrong is found before a rank starts."""
    if plan.job.model.vocab < BYTES:
        raise DataError(f"vocabulary of {plan.job.model.vocab}: byte-level text takes {BYTES}")
    read_corpus(settings.data, plan.job.seq_len, settings.seed, plan.job.global_batch)


def _run_rank(
    rank: int,
    world_size: int,
    rendezvous: str | None,
    plan: Plan,
    settings: TrainSettings,
    steps: int,
    on_step: OnStep | None,
) -> list[StepReport]:
    """One rank from its start to its end."""
    torch.set_num_threads(1)
    labels = Labels()
    comm = open_world("gloo", rank, world_size, rendezvous, labels=labels, timeout_s=TIMEOUT_S)
    try:
        optimizer = OptimizerSettings(
            settings.learning_rate, weight_decay=settings.weight_decay, clip_norm=settings.clip_norm
        )
        built = build_rank(plan.job, plan.layout, comm, labels, seed=settings.seed, settings=optimizer)
        corpus = read_corpus(settings.data, plan.job.seq_len, settings.seed, plan.job.global_batch)
        return _steps(built, corpus, steps, on_step if rank == 0 else None)
    finally:
        close_world()


def _steps(rank: Rank, corpus: Corpus, steps: int, on_step: OnStep | None) -> list[StepReport]:
    reports: list[StepReport] = []
    for step in range(steps):
        started = time.perf_counter()
        try:
            result = train_step(rank, *_micro_batches(rank, corpus, step))
            loss, norm = float(result.loss), float(result.norm)
        except Exception as error:
            _name_step(error, step)
            raise
        seconds = time.perf_counter() - started
        reports.append(StepReport(step + 1, steps, loss, norm, rank.job.tokens, seconds))
        if on_step is not None:
            on_step(reports[-1])
    return reports


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
