"""The dry run: the real training code of one rank, at full scale, without data, under the fake process group.

Three kinds of tensors show the same, a test holds them together: `meta` has shapes and no data, the fastest; `fake`
is torch's FakeTensorMode, which follows the CPU's own kernels; `real` is memory, for small models.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise import schedule as schedules
from shardwise.account.comm import predict_ledger
from shardwise.account.memory import memory_of
from shardwise.collective import Labels, Ledger
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.prove.compare import Proof
from shardwise.prove.record import Recorder
from shardwise.train.distributed import close_world, open_world
from shardwise.train.rank import Rank, build_rank, train_step

Tensors = Literal["meta", "fake", "real"]

Progress = Callable[[int, int], None]
"""Called with (micro-batches done, micro-batches to execute)."""


class PeriodError(RuntimeError):
    """Two successive periods of the steady state differ in collectives or memory: the step cannot be continued."""


class _Snapshot(NamedTuple):
    """What a rank had issued and held when a micro-batch's last gradient was through."""

    ledger: Ledger
    live_bytes: int


def prove_rank(
    job: Job,
    layout: Layout,
    rank: int,
    *,
    tensors: Tensors = "meta",
    full: bool = False,
    progress: Progress | None = None,
) -> Proof:
    """Run one step of one global rank and compare it with the plan.

    `full` executes every micro-batch instead of continuing the steady state by its period. Values mean nothing, of
    real tensors neither: no other rank answers. Raises ValueError for a rank outside the layout's world.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is outside 0 .. {layout.world_size - 1}")
    started = time.perf_counter()
    micro_batches = job.micro_batches(layout)
    executed = micro_batches if full else _to_execute(layout, micro_batches)
    recorder = Recorder(Labels())
    comm = open_world("fake", rank, layout.world_size, labels=recorder.labels)
    try:
        with FakeTensorMode() if tensors == "fake" else nullcontext(), recorder:
            device = torch.device("meta" if tensors == "meta" else "cpu")
            built = build_rank(job, layout, comm, recorder.labels, seed=None, device=device)
            snapshots = _run(built, recorder, executed, progress)
    finally:
        close_world()
    recorded = _continued(built, recorder.ledger, snapshots, executed)
    pp_rank = layout.mesh.coordinates(rank)["pp"]
    return Proof(
        rank=rank,
        predicted=predict_ledger(job, layout, rank),
        recorded=recorded,
        predicted_peak_bytes=memory_of(job, layout)[pp_rank].proved_bytes,
        measured_peak_bytes=recorder.peak_bytes,
        peak_at=recorder.peak_at,
        executed=executed,
        micro_batches=micro_batches,
        seconds=time.perf_counter() - started,
        max_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _to_execute(layout: Layout, micro_batches: int) -> int:
    """Warm-up, two periods and cool-down; the rest of the step is whole periods."""
    saturated, period = schedules.saturation(layout.schedule, layout.pp), schedules.period(layout.schedule, layout.pp)
    if saturated is None:
        return micro_batches
    # Warm-up and cool-down reach at most 2 pp micro-batches into the step; two periods lie between them.
    enough = max(saturated, 4 * layout.pp) + 2 * period + 2
    enough += (micro_batches - enough) % period
    return min(micro_batches, enough)


def _run(rank: Rank, recorder: Recorder, executed: int, progress: Progress | None) -> list[_Snapshot]:
    """One measured step; ledger and live bytes after each micro-batch's last gradient on the rank's first stage."""
    tokens = rank.job.cut(rank.layout).tokens
    shape, kind = (rank.micro_batches, tokens), {"dtype": torch.int64, "device": rank.device}
    ids = torch.zeros(shape, **kind) if rank.needs_ids else None
    targets = torch.zeros(shape, **kind) if rank.needs_targets else None
    snapshots: list[_Snapshot] = []

    def done(_: int) -> None:
        snapshots.append(_Snapshot(Counter(recorder.ledger), recorder.live_bytes))
        if progress is not None:
            progress(len(snapshots), executed)

    recorder.start()
    train_step(rank, ids, targets, micro_batches=executed, done=done)
    return snapshots


def _continued(rank: Rank, ledger: Ledger, snapshots: list[_Snapshot], executed: int) -> Ledger:
    """The ledger of the whole step: what was executed and, asserted equal, the periods that were not.

    What lives may grow by the losses alone, which wait for the step's end: anything else would not stay where it
    was seen.
    """
    micro_batches, layout = rank.micro_batches, rank.layout
    if executed == micro_batches:
        return ledger
    period = schedules.period(layout.schedule, layout.pp)
    middle = len(snapshots) // 2
    first, second, third = (snapshots[middle + k * period] for k in (-1, 0, 1))
    one, two = second.ledger - first.ledger, third.ledger - second.ledger
    where = f"micro-batches {middle - period} .. {middle + period} of {executed}"
    if one != two:
        raise PeriodError(f"{where} are not periodic: their collectives differ")
    losses = period // schedules.copies(layout.schedule) * rank.job.precision.accumulate_bytes * rank.needs_targets
    for grown in (second.live_bytes - first.live_bytes, third.live_bytes - second.live_bytes):
        if grown != losses:
            raise PeriodError(f"{where} are not periodic: memory grows by {grown:,} bytes, {losses:,} are expected")
    times = (micro_batches - executed) // period
    return ledger + Counter({c: n * times for c, n in two.items()})
