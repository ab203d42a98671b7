"""CPU seconds and peak memory of two sides in the same processes.

CPU seconds are of the whole process, so that the threads of collectives count: gloo's threads sleep while they wait
(2 s of waiting take 4 ms), so waiting costs neither side anything. Memory is read off torch's CPU allocator by its
profiler, in a run of its own: what a device's allocator would hold. Resident size is no measure at this scale: it is
mostly code, and what malloc keeps.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.profiler import ProfilerActivity, profile, record_function

from beside.interval import Cost, paired
from beside.models import Share, Size
from beside.sides import ROWS, Row, Step
from shardwise.plan.layout import parse
from shardwise.train.distributed import open_world

WARM = 3
AGREE = 1e-4
PAUSE_S = 1e-3
KEPT: list[object] = []


def compare(rank: int, world_size: int, init_method: str, row: int, size: Size, pairs: int) -> Cost:
    """One rank of a row: CPU seconds of all ranks together."""
    share = _join(rank, world_size, init_method, ROWS[row], size)
    steps = ROWS[row].ours(share), ROWS[row].theirs(share)
    for _ in range(WARM):
        _require_equal(_sum(steps[0]()), _sum(steps[1]()), ROWS[row])
    gc.collect()
    gc.freeze()  # else a collection walks all of torch's objects, at the cost of whichever side it falls into
    cost = paired(partial(_cpu_s, steps[0]), partial(_cpu_s, steps[1]), pairs)
    _leave(steps)
    return cost


def _join(rank: int, world_size: int, init_method: str, row: Row, size: Size) -> Share:
    torch.set_num_threads(1)
    open_world("gloo", rank, world_size, init_method, timeout_s=120)
    return Share.of(size, parse(row.layout), rank)


def _leave(kept: object) -> None:
    """Stay until all ranks are done. The process ends soon and closes its world with it: torch's own closing can wait
    for a thread of gloo that waits for the interpreter's lock, when a DistributedDataParallel goes with it."""
    KEPT.append(kept)
    dist.barrier()


def _sum(x: torch.Tensor) -> float:
    x = x.double()
    dist.all_reduce(x)
    return x.item()


def _require_equal(ours: float, theirs: float, row: Row) -> None:
    if not math.isclose(ours, theirs, rel_tol=AGREE):
        raise RuntimeError(f"{row.peer}: our loss is {ours}, the peer's {theirs}: this compares two different things")


def _cpu_s(step: Step) -> float:
    """CPU seconds of all ranks together, from one barrier to the next."""
    dist.barrier()
    started = time.process_time()
    step()
    dist.barrier()
    return _sum(torch.tensor(time.process_time() - started, dtype=torch.float64))


def peak(rank: int, world_size: int, init_method: str, row: int, size: Size, side: int) -> int:
    """Most bytes that one rank of one side holds in a step, its model's included."""
    share = _join(rank, world_size, init_method, ROWS[row], size)
    _wait_for_holders()
    make = (ROWS[row].ours, ROWS[row].theirs)[side]
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = make(share)
        for i in range(WARM):
            with record_function(f"step {i}"):
                step()
            gc.collect()
    _leave(step)
    return _peak_of(profiler)


def _wait_for_holders() -> None:
    """Have every wait for a collective, of either side, end a moment late. A thread of gloo lets go of a tensor a
    moment after the wait has ended; memory that is released there is released unseen, and would count for ever."""

    def patient(function: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            time.sleep(PAUSE_S)
            return result

        return waited

    dist.Work.wait = patient(dist.Work.wait)
    functional.wait_tensor = patient(functional.wait_tensor)


def _peak_of(profiler: Any) -> int:
    """Highest level of the last step. Raises RuntimeError where the level rises from step to step."""
    events = profiler.profiler.kineto_results.events()
    spans = [next((e.start_ns(), e.end_ns()) for e in events if e.name() == f"step {i}") for i in range(WARM)]
    level, levels, peaks = 0, [0] * WARM, [0] * WARM
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        level += event.nbytes()
        for i, (start, end) in enumerate(spans):
            if start <= event.start_ns():
                levels[i] = level
                if event.start_ns() <= end:
                    peaks[i] = max(peaks[i], level)
    return peaks[-1]
