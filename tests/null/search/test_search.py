"""The space and the search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.account.memory import peak_bytes
from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rules import findings, legal
from shardwise.search.solve import evaluate, family, solve
from shardwise.search.space import SCHEDULES, divisors, enumerate_layouts
from shardwise.simulate.step import step_time

JOB = Job(load_model("llama-3.1-8b"), parse_cluster("8xh100"), 8192, 128)


def test_divisors() -> None:
    assert divisors(1) == [1]
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_every_layout_is_written_once_and_as_it_would_be_read() -> None:
    layouts: list[Layout] = []
    for batch in enumerate_layouts(JOB):
        rows = [batch.row(i) for i in range(len(batch))]
        assert [x.zero for x in rows] == batch.zero.tolist()
        assert [x.sp for x in rows] == batch.sp.astype(bool).tolist()
        layouts += rows
    assert len(layouts) == len(set(layouts))
    assert {x.world_size for x in layouts} == {8}
    assert {x.zero for x in layouts} == {0, 1, 3}
    assert max(x.tp for x in layouts) == 8


def test_every_choice_is_there_at_every_pipeline() -> None:
    """Schedules, recomputation, ZeRO over every cut of the data-parallel ranks, with and without cut activations."""
    job = replace(JOB, cluster=parse_cluster("16x8xh100"))
    for batch in enumerate_layouts(job):
        layouts = [batch.row(i) for i in range(len(batch))]
        tp, pp, dp = layouts[0].tp, layouts[0].pp, layouts[0].dp
        assert {x.schedule for x in layouts} == ({"1f1b"} if pp == 1 else set(SCHEDULES))
        assert {x.recompute for x in layouts} == {"none", "full"}
        assert {x.sp for x in layouts} == ({False} if tp == 1 else {False, True})
        cuts = {(zero, dp // shard, shard) for zero in (1, 3) for shard in divisors(dp)[1:]}
        assert {(x.zero, x.dp_replicate, x.dp_shard) for x in layouts} == cuts | {(0, dp, 1)}
        assert {x.mb for x in layouts} == {mb for mb in divisors(128 // dp) if mb <= 16}


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
    assert {what for what, _, _ in told} == {"memory", "schedules"}
    assert all(done <= total for _, done, total in told)


def test_nothing_that_fits_is_faster() -> None:
    """Against walking everything, on a job small enough for it."""
    job = replace(JOB, cluster=parse_cluster("4xh100"), global_batch=16, seq_len=2048)
    best = solve(job, keep=3).best
    kept = [b.take(legal(b, job)) for b in enumerate_layouts(job)]
    layouts = [b.row(i) for b in kept for i in range(len(b))]
    peaks = peak_bytes(job, LayoutBatch.of(layouts))
    fitting = [x for x, p in zip(layouts, peaks, strict=True) if p <= job.cluster.device.usable_bytes]
    times = np.sort([step_time(job, x).total_s for x in fitting])
    assert [c.step.total_s for c in best] == pytest.approx(times[: len(best)])


def test_what_does_not_fit_is_said() -> None:
    result = solve(replace(JOB, model=load_model("llama-3.1-405b")))
    assert (result.fitting, result.best) == (0, ())
    assert result.closest is not None
    assert not result.closest.fits


def test_no_layout_is_legal() -> None:
    """One sequence cannot feed the two data-parallel ranks that tp=8 and 34 stages leave of 512."""
    result = solve(replace(JOB, cluster=parse_cluster("64x8xh100"), global_batch=1))
    assert (result.legal, result.best, result.closest) == (0, (), None)
