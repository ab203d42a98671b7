"""A survey by two processes is the survey of one."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest

from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model
from shardwise.plan.job import Job
from shardwise.search import halves as of_halves
from shardwise.search.halves import halves
from shardwise.search.limits import Limits, read_limits
from shardwise.search.solve import Front, Progress, solve, survey

JOB = Job(load_model("llama-3.1-70b"), parse_cluster("32x8xh100"), 4096, 256)
LIMITS = read_limits(["cp=1 mb=1", "recompute=none"], ["schedule=dualpipe"])


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_halves, "_can_fork", lambda: True)


def seen(front: Front) -> tuple[object, ...]:
    found = list(front.layouts()), front.seconds.tolist(), front.peaks.tolist(), front.places.tolist()
    counts = front.enumerated, front.legal, front.fitting
    return counts, found, front.closest and (front.closest[0], front.closest[1].row(front.closest[2]))


def joined(job: Job, limits: Limits) -> Front:
    with halves(job, limits) as both:
        assert both is not survey
        return both(job, limits, lambda *_: None)


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        replace(JOB, model=load_model("llama-3.1-8b")),
        replace(JOB, model=load_model("qwen3-30b-a3b"), seq_len=8192),
    ],
    ids=lambda job: job.model.name,
)
def test_two_processes_find_what_one_finds(job: Job) -> None:
    alone = survey(job, LIMITS)
    assert len(alone.found) > 50
    assert seen(joined(job, LIMITS)) == seen(alone)


def test_equally_fast_layouts_keep_their_order() -> None:
    alone = survey(JOB, LIMITS)
    assert len(set(alone.seconds.tolist())) < len(alone.found)
    assert list(joined(JOB, LIMITS).layouts()) == list(alone.layouts())


def test_where_nothing_fits_the_closest_is_found() -> None:
    job = replace(JOB, model=load_model("llama-3.1-405b"), cluster=parse_cluster("32x8xa100-40gb"), seq_len=65536)
    alone = survey(job, LIMITS)
    assert alone.closest is not None
    assert not alone.fitting
    assert seen(joined(job, LIMITS)) == seen(alone)


def test_the_search_is_the_same() -> None:
    with halves(JOB, LIMITS) as both:
        found = solve(JOB, keep=3, limits=LIMITS, surveyed=both)
    assert replace(found, seconds=0.0) == replace(solve(JOB, keep=3, limits=LIMITS), seconds=0.0)


def test_a_process_that_fails_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed or out of memory, say: its half is surveyed here."""
    here = multiprocessing.current_process().pid

    def failing(job: Job, limits: Limits, tell: Progress = lambda *_: None, share: slice = slice(None)) -> Front:
        if multiprocessing.current_process().pid != here:
            raise MemoryError
        return survey(job, limits, tell, share)

    monkeypatch.setattr(of_halves, "survey", failing)
    assert seen(joined(JOB, LIMITS)) == seen(survey(JOB, LIMITS))


def test_it_ends_with_the_block() -> None:
    with halves(JOB, Limits()):
        (other,) = multiprocessing.active_children()
        assert other.is_alive()
    assert other.exitcode is not None


def test_small_clusters_and_single_cores_fork_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with halves(replace(JOB, cluster=parse_cluster("8xh100")), LIMITS) as one:
        assert one is survey
    monkeypatch.setattr(of_halves, "_can_fork", lambda: False)
    with halves(JOB, LIMITS) as one:
        assert one is survey
