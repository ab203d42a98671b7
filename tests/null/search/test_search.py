"""The space and the search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.account.memory import peak_bytes
from shardwise.cluster import parse_cluster
from shardwise.model.hf import from_config, load_model, to_config
from shardwise.model.spec import Model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rules import findings, legal
from shardwise.search.limits import Limits
from shardwise.search.solve import evaluate, family, solve
from shardwise.search.space import MB, RECOMPUTE, SCHEDULES, VIRTUAL, divisors, enumerate_layouts
from shardwise.simulate.step import step_time

JOB = Job(load_model("llama-3.1-8b"), parse_cluster("8xh100"), 8192, 128)


def test_divisors() -> None:
    assert divisors(1) == [1]
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_every_layout_is_written_once_and_as_it_would_be_read() -> None:
    """Every fifth number of sequences a micro-batch is enough: rows are slow to read."""
    layouts: list[Layout] = []
    for batch in enumerate_layouts(JOB, Limits(forbids={"mb": ("2", "4", "8", "16")})):
        rows = [batch.row(i) for i in range(len(batch))]
        assert [x.zero for x in rows] == batch.zero.tolist()
        assert [x.sp for x in rows] == batch.sp.astype(bool).tolist()
        layouts += rows
    assert len(layouts) == len(set(layouts))
    assert {x.world_size for x in layouts} == {8}
    assert {x.zero for x in layouts} == {0, 1, 2, 3}
    assert max(x.tp for x in layouts) == 8


def test_every_choice_is_there_at_every_pipeline() -> None:
    """Schedules, recomputation, ZeRO over every cut of the data-parallel ranks, with and without cut activations."""
    job = replace(JOB, cluster=parse_cluster("4x8xh100"))
    schedules: dict[int, set[str]] = {}
    for batch in enumerate_layouts(job):
        tp, pp, cp, dp = (int(column.flat[0]) for column in (batch.tp, batch.pp, batch.cp, batch.dp))
        schedules.setdefault(pp, set()).update(batch.names[i] for i in np.unique(batch.schedule))
        assert {batch.recomputes[i] for i in np.unique(batch.recompute)} == set(RECOMPUTE)
        assert set(batch.sp.tolist()) == ({0} if tp == 1 else {0, 1})
        assert set(batch.cp_kind.tolist()) == ({0} if cp == 1 else {0, 1, 2})
        cuts = {(zero, dp // n, n) for zero in (1, 2, 3) for n in divisors(dp) if n * cp > 1}
        found = zip(batch.zero.tolist(), batch.dp_replicate.tolist(), batch.dp_shard.tolist(), strict=True)
        assert set(found) == cuts | {(0, dp, 1)}
        assert set(batch.mb.tolist()) == {mb for mb in MB if 128 // dp % mb == 0 and mb <= max(cp, 16)}
    always = {"1f1b", *(f"interleaved:{v}" for v in VIRTUAL), "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "dualpipe"}
    assert schedules.pop(1) == {"1f1b"}
    assert all(always <= found <= set(SCHEDULES) for found in schedules.values())
    assert "interleaved:5" not in schedules[2]
    assert "interleaved:3" not in schedules[4]  # neither 32 nor 34 layers are 12 alike
    assert list(schedules) == divisors(32)[1:]


def test_the_best_fit_and_are_in_order() -> None:
    told: list[tuple[str, int, int]] = []
    result = solve(JOB, lambda *x: told.append(x), keep=5)
    assert result.enumerated >= result.legal >= result.fitting > 0
    assert result.closest is None
    assert len({family(c.layout) for c in result.best}) == 5
    times = [c.step.total_s for c in result.best]
    assert times == sorted(times)
    assert all(c.fits and not findings(c.layout, JOB) for c in result.best)
    assert evaluate(JOB, result.best[0].layout) == result.best[0]
    assert {what for what, _, _ in told} == {"layouts", "schedules"}
    assert all(done <= total for _, done, total in told)


def shallow(name: str, **sizes: int) -> Model:
    return from_config({**to_config(load_model(name)), **sizes}, f"a shallow {name}")


SMALL = {
    "dense": Job(shallow("llama-3.1-8b", num_hidden_layers=6), parse_cluster("4xh100"), 1024, 4),
    "routed": Job(
        shallow("qwen3-30b-a3b", num_hidden_layers=4, num_experts=8, num_experts_per_tok=2),
        parse_cluster("4xh100"),
        512,
        4,
    ),
}
FEW = Limits(forbids={"recompute": ("act", "norm,act"), "zero": ("2",), "mb": ("4",)})
"""Small enough to walk all that fits."""


@pytest.mark.parametrize("kind", SMALL)
def test_nothing_that_fits_is_faster(kind: str) -> None:
    """Against walking everything."""
    job = SMALL[kind]
    best = solve(job, keep=3, limits=FEW).best
    kept = [b.take(legal(b, job)) for b in enumerate_layouts(job, FEW)]
    layouts = [b.row(i) for b in kept for i in range(len(b))]
    peaks = peak_bytes(job, LayoutBatch.of(layouts))
    fitting = [x for x, p in zip(layouts, peaks, strict=True) if p <= job.cluster.device.usable_bytes]
    assert len(fitting) > 300
    times = np.sort([step_time(job, x).total_s for x in fitting])
    assert [c.step.total_s for c in best] == pytest.approx(times[: len(best)])


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "nemotron-3-nano", "gemma-2-9b"])
def test_what_is_found_is_legal_fits_and_is_told_as_it_is(name: str) -> None:
    """Peaks and steps of what is returned are those of the layout alone, to the byte."""
    job = Job(load_model(name), parse_cluster("2x8xh100"), 4096, 64)
    result = solve(job, keep=5)
    assert len(result.best) >= 5
    for c in result.best:
        assert not findings(c.layout, job)
        assert c.step == step_time(job, c.layout)
        exact = int(peak_bytes(job, LayoutBatch.of([c.layout]))[0])
        assert exact <= c.peak_bytes <= c.capacity_bytes


def test_what_does_not_fit_is_said() -> None:
    result = solve(replace(JOB, model=load_model("llama-3.1-405b")))
    assert (result.fitting, result.best) == (0, ())
    assert result.closest is not None
    assert not result.closest.fits


def test_no_layout_is_legal() -> None:
    """One short sequence cannot feed the two data-parallel ranks that 32 heads and 34 stages leave of 2,048."""
    result = solve(replace(JOB, cluster=parse_cluster("256x8xh100"), seq_len=512, global_batch=1))
    assert (result.legal, result.best, result.closest) == (0, (), None)
