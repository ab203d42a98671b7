"""What the planner says of the published runs: equal questions are answered once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.account.memory import memory_of, peak_bytes
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.results import MemoryBreakdown, StepTime
from shardwise.score.cases import Case
from shardwise.simulate.step import step_time
from shardwise.units import GIB

Progress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, out of how much)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one run. `memory_GiB` is of what its source measured: tensors, the allocator's, or the device's."""

    step: StepTime
    memory_GiB: float
    fits: bool


def predict(cases: Sequence[Case], progress: Progress) -> list[Prediction]:
    """A prediction for each case, in their order. Steps are walked, peaks are exact."""
    steps: dict[tuple[Job, Layout], StepTime] = {}
    peaks: dict[tuple[Job, Layout], int] = {}
    found: list[Prediction] = []
    for done, case in enumerate(cases):
        progress("published runs", done, len(cases))
        key = case.job, case.layout
        if key not in steps:
            steps[key] = step_time(*key)
            peaks[key] = int(peak_bytes(case.job, LayoutBatch.of([case.layout]))[0])
        fits = peaks[key] <= case.job.cluster.device.usable_bytes
        found.append(Prediction(steps[key], _measurable_bytes(case, peaks[key]) / GIB, fits))
    progress("published runs", len(cases), len(cases))
    return found


def _measurable_bytes(case: Case, total: int) -> int:
    """Of the fullest rank, what a source's memory column measures."""
    if case.source.memory in ("", "device") or case.measured_GiB is None:
        return total
    allocated = case.source.memory == "allocated"
    ranks = memory_of(case.job, case.layout)
    return max(rank.proved_bytes if allocated else _reserved_bytes(rank) for rank in ranks)


def _reserved_bytes(rank: MemoryBreakdown) -> int:
    return rank.proved_bytes + rank.assumed["allocator margin"]
