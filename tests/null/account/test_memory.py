"""Peaks of many layouts at once against every rank of each, state by state; what must and must not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise import schedule as schedules
from shardwise.account.memory import GridMemory, memory_of, peak_bytes
from shardwise.account.static import columns_of
from shardwise.model.hf import load_model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rules import findings, legal
from shardwise.plan.shards import rank_units
from shardwise.search.limits import Limits
from shardwise.search.space import Space
from tests.support.drawn import MODELS, drawn, job_of


def fullest(job: Job, layout: Layout) -> int:
    """The largest peak of any rank: each walks all states of its own row."""
    return max(m.total_bytes for m in memory_of(job, layout))


def survey(job: Job, layout: Layout) -> int:
    """What the search takes for the peak."""
    grid = LayoutBatch.of([layout]).expanded(2)
    return int(GridMemory(job, grid, columns_of(job, grid), exact=False).peaks(slice(None)).item())


@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_those_of_the_fullest_rank_to_the_byte(name: str) -> None:
    job = job_of(name)
    layouts = drawn(job, 14, seed=1)
    peaks = peak_bytes(job, LayoutBatch.of(layouts)).tolist()
    assert {str(x): p for x, p in zip(layouts, peaks, strict=True)} == {str(x): fullest(job, x) for x in layouts}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_peaks_of_short_steps_are_those_of_the_fullest_rank(name: str) -> None:
    """Fewer micro-batches than fill the pipeline."""
    job = job_of(name, "2x8xh100", batch=12)
    layouts = drawn(job, 14, 2, lambda x: x.pp > 1 and job.micro_batches(x) <= 2 * x.pp)
    peaks = peak_bytes(job, LayoutBatch.of(layouts)).tolist()
    assert peaks == [fullest(job, x) for x in layouts]


@pytest.mark.parametrize("batch", [6, 192])
@pytest.mark.parametrize("name", ["gemma-2-9b", "deepseek-v3"])
def test_the_survey_bounds_short_steps_and_is_exact_for_long_ones(name: str, batch: int) -> None:
    job = job_of(name, "2x8xh100", batch=batch)
    layouts = drawn(job, 14, seed=3)
    filled = 0
    for layout, exact in zip(layouts, peak_bytes(job, LayoutBatch.of(layouts)).tolist(), strict=True):
        bound, enough = survey(job, layout), schedules.saturation(layout.schedule, layout.pp)
        assert bound >= exact, str(layout)
        if enough is None or job.micro_batches(layout) >= enough:
            filled += 1
            assert bound == exact, str(layout)
    assert filled >= (10 if batch > 6 else 1)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_a_grid_is_its_layouts_one_by_one(name: str) -> None:
    """Columns that broadcast, filled a few rows at a time, give what single layouts do."""
    job = job_of(name, "2x8xh100", batch=32)
    space = Space(job, Limits())
    looked, cuts = space.legal_cuts(4)
    assert cuts is not None and looked >= len(cuts) > 6
    grid, real = space.grid(cuts.take(np.arange(0, len(cuts), max(1, len(cuts) // 7))))
    real = np.broadcast_to(real, grid.shape) & legal(grid, job)
    memory = GridMemory(job, grid, columns_of(job, grid))
    peaks = np.concatenate([memory.peaks(slice(start, start + 3)) for start in range(0, grid.shape[0], 3)])
    assert peaks.shape == grid.shape
    rows = grid.take(real.ravel())
    assert peaks[real].tolist() == peak_bytes(job, rows).tolist()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "nemotron-3-nano"])
def test_cutting_more_state_never_takes_more_static_memory(name: str) -> None:
    """ZeRO 1, 2 and 3 over the same ranks: each level keeps no more than the one before it."""
    job = job_of(name)
    layouts = drawn(job, 5, 4, lambda x: x.zero == 1 and x.shards > 1)
    for layout in layouts:
        kept = [static(job, replace(layout, zero=zero)) for zero in (1, 2, 3)]
        assert kept[0] > kept[1] > kept[2]


def static(job: Job, layout: Layout) -> int:
    """Bytes of the model state that live all the time on the first rank."""
    parts = columns_of(job, LayoutBatch.of([layout]).expanded(2))
    held = tuple(tuple(u.block.kind for u in s.units) for s in rank_units(job.model, layout, 0).stages)
    return sum(int(np.asarray(parts.static(held)[key]).item()) for key in ("parameters", "gradients", "optimizer"))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "nemotron-3-nano"])
def test_recomputing_more_never_keeps_more(name: str) -> None:
    """Each set within the next: what is kept from F to B only shrinks."""
    job = job_of(name)
    for layout in drawn(job, 4, 5, lambda x: x.recompute == "none"):
        ways = ("none", "act", "norm,act", "norm,act,core")
        columns = [columns_of(job, LayoutBatch.of([replace(layout, recompute=way)]).expanded(2)) for way in ways]
        for kind in job.model.kinds:
            saved = [int(np.asarray(c.unit[kind].saved).item()) for c in columns]
            assert saved == sorted(saved, reverse=True), (kind, str(layout))


def test_a_slanted_router_takes_more_memory() -> None:
    """A quarter more copies on the fullest rank."""
    job = job_of("qwen3-30b-a3b")
    slanted = replace(job, imbalance=1.25)
    layouts = drawn(job, 10, 6, lambda x: x.recompute == "none")
    even, uneven = (peak_bytes(j, LayoutBatch.of(layouts)) for j in (job, slanted))
    assert (uneven > even).all()


def test_a_second_copy_of_the_weights_is_counted() -> None:
    """DualPipe holds each stage twice; its half holds two stages a rank, once each."""
    job = job_of("llama-3.1-8b")
    both, half = (parse(f"tp=4 pp=4 dp=4 schedule={name} mb=1") for name in ("dualpipe", "dualpipe-v"))
    assert not [*findings(both, job), *findings(half, job)]
    weights = [sum(m.proved["parameters"] for m in memory_of(job, x)) for x in (both, half)]
    assert weights[0] == 2 * weights[1]


def test_experts_are_held_by_a_part_of_the_ranks() -> None:
    """Of DeepSeek-V3's parameters each of 64 expert-parallel ranks holds a 64-th of the routed ones, and all others."""
    model = load_model("deepseek-v3")
    job = job_of("deepseek-v3")
    (m,) = memory_of(job, parse("ep=64 dp=64 mb=1"))
    routed = sum(model.size(p) * model.count(b.kind) for b in model.blocks for p in b.parameters if p.expert)
    rest = model.parameters + model.tail_parameters - routed
    assert m.proved["parameters"] == 2 * (rest + routed // 64)
