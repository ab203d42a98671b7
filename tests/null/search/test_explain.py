"""Why a search came out as it did: every number in a sentence is the model's, every layout in it was evaluated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from shardwise.account.memory import peak_bytes
from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rules import findings
from shardwise.plan.stack import load_stack, under
from shardwise.search.explain import Explanation, explain
from shardwise.search.limits import Limits, read_limits
from shardwise.search.loss import time_to_loss
from shardwise.search.neighbours import ALONE, PIPELINES, STATE, Field, changed, closed_step
from shardwise.search.phrases import difference, percent, place
from shardwise.search.solve import SearchResult, evaluate, solve
from shardwise.simulate.step import BUBBLE, OPTIMIZER, TRANSFER, step_seconds, step_time

DENSE = ("llama-3.1-8b", "2x8xh100", 8192, 64)
ROUTED = ("mixtral-8x7b", "4x8xh100", 4096, 256)
TORUS = ("gemma-2-9b", "v5e:8x8", 8192, 64)
ASKED = (DENSE, ROUTED, TORUS)


@cache
def job_of(asked: tuple[str, str, int, int]) -> Job:
    model, cluster, seq_len, batch = asked
    return Job(load_model(model), parse_cluster(cluster), seq_len, batch)


@cache
def told(asked: tuple[str, str, int, int]) -> tuple[Job, SearchResult, Explanation]:
    job = job_of(asked)
    found = solve(job, keep=2)
    return job, found, explain(job, found)


@pytest.mark.parametrize("asked", ASKED)
def test_alternatives_are_evaluated_as_any_other_layout(asked: tuple[str, str, int, int]) -> None:
    job, found, said = told(asked)
    winner = found.best[0]
    alternatives = [(one, one.alternative) for one in said.advice if one.alternative is not None]
    assert len(alternatives) >= 3
    for one, other in alternatives:
        assert not findings(other.layout, job)
        assert other.layout != winner.layout
        assert other == evaluate(job, other.layout)
        assert difference(other.layout, winner.layout) in one.text
        gap = other.step.total_s / winner.step.total_s - 1
        assert abs(gap) < 0.0005 or percent(gap) in one.text
        assert other.fits or "more than a device has" in one.text
        if other.fits and gap >= 0.0005:
            assert one.text.endswith(f"{'Following' if one.followed else 'Breaking'} the rule saves that.")


def test_each_rule_speaks_where_it_means_something() -> None:
    ids = [[one.id for one in told(asked)[2].advice] for asked in ASKED]
    both = ["long-context", "data-parallel-last", "batch-and-memory"]
    assert ids[0] == ["fast-domain", "across-nodes", *both]
    assert ids[1] == ["fast-domain", "across-nodes", "experts-first", *both]
    assert ids[2] == ["fast-domain", *both]


def followed(layout: str, asked: tuple[str, str, int, int] = DENSE) -> set[str]:
    """Rules that a layout follows, taken for the winner of a search."""
    job = job_of(asked)
    one = evaluate(job, parse(layout))
    said = explain(job, SearchResult(1, 1, 1, (one,), None, 1, 0.0))
    return {advice.id for advice in said.advice if advice.followed}


def test_who_breaks_a_rule_is_told_so() -> None:
    assert "fast-domain" not in followed("tp=16 mb=1")
    assert "fast-domain" in followed("tp=8 dp=2 mb=1")
    assert "long-context" not in followed("tp=4 cp=4 zero=1 mb=1")
    assert "across-nodes" not in followed("tp=8 pp=2 mb=1")
    assert "data-parallel-last" not in followed("tp=8 dp=2 zero=1 mb=1")
    assert "batch-and-memory" not in followed("tp=8 dp=2 zero=1 mb=1 recompute=full")
    assert "experts-first" not in followed("tp=8 dp=4 ep=2 etp=4 zero=1 mb=1", ROUTED)


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_rejected_lacks_what_is_said(asked: tuple[str, str, int, int]) -> None:
    job, found, said = told(asked)
    base = step_seconds(job, LayoutBatch.of([found.best[0].layout]))[0]
    assert said.rejected
    for one in said.rejected:
        assert tuple(findings(one.layout, job)) == one.findings
        if one.findings:
            assert one.gap is None
            assert one.findings[0].message in one.text
            continue
        assert one.gap is not None
        batch = LayoutBatch.of([one.layout])
        assert one.over_bytes == peak_bytes(job, batch)[0] - job.cluster.device.usable_bytes > 0
        assert one.gap == pytest.approx(step_seconds(job, batch)[0] / base - 1)
        assert one.gap < 0


@pytest.mark.parametrize("asked", ASKED)
def test_the_step_is_taken_apart_and_the_batch_is_used_up(asked: tuple[str, str, int, int]) -> None:
    job, found, said = told(asked)
    winner = found.best[0]
    shares = {c: s / winner.step.total_s for c, s in winner.step.parts_s.items()}
    assert all(percent(share) in said.limit for share in shares.values() if share >= 0.01)
    layout = winner.layout
    assert layout.dp * layout.mb * job.micro_batches(layout) == job.global_batch
    use = f"dp {layout.dp} x micro-batch {layout.mb} x {job.micro_batches(layout)} accumulated"
    assert use in said.batch
    assert f"at most dp={job.global_batch:,}" in said.batch


@pytest.mark.parametrize("asked", ASKED)
def test_the_recipe_is_compared(asked: tuple[str, str, int, int]) -> None:
    job, found, said = told(asked)
    assert said.recipe is not None
    assert said.recipe.candidate == evaluate(job, said.recipe.candidate.layout)
    assert said.recipe.gap == pytest.approx(said.recipe.candidate.step.total_s / found.best[0].step.total_s - 1)
    assert said.recipe.gap > -0.01
    assert str(said.recipe.candidate.layout) in said.recipe.text


def test_what_the_limits_forbid_is_said_to_be_beyond_them() -> None:
    job, limits = job_of(DENSE), read_limits(["tp=8"], [])
    said = explain(job, solve(job, keep=1, limits=limits), limits)
    better = [one for one in said.advice if "less time" in one.text and one.alternative and one.alternative.fits]
    assert better
    assert all("beyond the limits" in one.text for one in better)
    free = explain(job, solve(job, keep=1, limits=limits), Limits())
    assert not any("beyond the limits" in one.text for one in free.advice)


def test_under_another_stack() -> None:
    """One that hides communication, and has no ZeRO-1."""
    stack = load_stack("torchtitan")
    job = replace(job_of(DENSE), model=under(job_of(DENSE).model, stack), stack=stack)
    said = explain(job, solve(job, keep=1))
    levels = {one.alternative.layout.zero for one in said.advice if one.alternative is not None}
    assert levels <= {0, *stack.zero}
    assert said.recipe is not None


def test_there_is_nothing_to_explain_where_nothing_fits() -> None:
    with pytest.raises(ValueError, match="nothing fits"):
        explain(job_of(DENSE), SearchResult(0, 0, 0, (), None, 0, 0.0))


@pytest.mark.parametrize(
    ("model", "cluster"),
    [("qwen3-0.6b", "1xh100"), ("qwen3-0.6b", "4xcpu"), ("mlp:D=4096,F=16384,L=8", "64xC=4.6e14,W=1.8e11,M=95e9")],
)
def test_small_worlds_and_models_of_the_whiteboard(model: str, cluster: str) -> None:
    job = Job(load_model(model), parse_cluster(cluster), 1024, 64)
    said = explain(job, solve(job, keep=1))
    assert said.limit
    assert said.batch


# ---------------------------------------------------------------------------------------------------------- neighbours


def test_neighbours_are_on_all_devices() -> None:
    job, layout = job_of(DENSE), parse("tp=2 pp=2 dp=4 zero=1 mb=2")
    for options in (ALONE, STATE, PIPELINES):
        found = changed(job, layout, {"tp": 4}, options)
        assert len(found) == len(set(found)) > 0
        assert {x.tp for x in found} == {4}
        assert {x.world_size for x in found} == {16}
    assert changed(job, layout, {"tp": 3}) == []
    assert changed(job, layout, {"tp": 32}) == []


@pytest.mark.parametrize(
    "text", ["tp=2 pp=4 dp=2 zero=1 schedule=interleaved:2 mb=1", "pp=4 dp=4 schedule=dualpipe mb=1"]
)
def test_a_step_without_a_walk_has_the_causes_of_one_with(text: str) -> None:
    job, layout = job_of(DENSE), parse(text)
    walked = step_time(job, layout)
    closed = closed_step(job, layout, walked.total_s)
    assert closed.total_s == pytest.approx(walked.total_s)
    assert closed.walked == 0
    late = (BUBBLE, TRANSFER, OPTIMIZER, "reduce gradients", "gather parameters")
    for cause, seconds in walked.parts_s.items():
        if cause not in late:
            assert closed.parts_s[cause] == pytest.approx(seconds)


def test_a_long_walk_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(DENSE)
    center = evaluate(job, parse("tp=2 pp=4 dp=2 zero=1 schedule=interleaved:2 mb=1"))
    monkeypatch.setattr("shardwise.search.neighbours.MAX_WALKED", 1)
    near = Field(job, center)
    assert near.candidate(near.screen([center.layout])[0]) is center
    other = near.screen([parse("tp=2 pp=2 dp=4 zero=1 schedule=interleaved:2 mb=1")])[0]
    found = near.candidate(other)
    assert found.step.walked == 0
    base = step_seconds(job, LayoutBatch.of([center.layout]))[0]
    assert found.step.total_s == pytest.approx(other.seconds * center.step.total_s / base)


def test_differences_are_words_of_the_layouts() -> None:
    def said(wanted: str, given: str) -> str:
        return difference(parse(wanted), parse(given))

    assert said("tp=16 dp=2 mb=1", "tp=8 dp=4 mb=1") == "tp=16 dp=2"
    assert said("dp=8 mb=1", "pp=2 dp=4 schedule=gpipe mb=1 recompute=full") == "dp=8 pp=1 schedule=1f1b recompute=none"
    assert said("dp_replicate=2 dp_shard=4 zero=3 mb=1", "dp=8 mb=1") == "dp_replicate=2 dp_shard=4 zero=3"
    assert difference(Layout(), Layout()) == "the same layout"


def test_where_a_group_lies() -> None:
    """Eight cards of 50 GB/s carry a ring through two nodes, one of them what is not in a ring."""
    cluster = parse_cluster("4x8xh100")
    assert place(cluster, [(1, 8)]) == "stays inside a node (NVLink, 370 GB/s)"
    assert place(cluster, [(1, 16)]) == "crosses nodes (InfiniBand, 370 GB/s)"
    assert place(cluster, [(1, 16)], ring=False) == "crosses nodes (InfiniBand, 50 GB/s)"
    assert place(cluster, [(8, 4)]) == "crosses nodes (InfiniBand, 50 GB/s)"
    assert place(parse_cluster("v5p:4x4x4"), [(1, 4)]) == "stays inside a slice (ICI, 180 GB/s)"


# ------------------------------------------------------------------------------------------------------- time to loss


def test_time_to_loss() -> None:
    """At the critical batch, twice the steps of an endless batch and twice the tokens of the smallest (McCandlish et
    al. 1812.06162, section 2.3)."""
    at = time_to_loss(2.0, 1 << 20, float(1 << 20), min_steps=1000)
    assert (at.steps_factor, at.tokens_factor, at.relative_s, at.total_s) == (2.0, 2.0, 4.0, 4000.0)
    large = time_to_loss(2.0, 1 << 30, 1.0)
    assert large.steps_factor == pytest.approx(1)
    assert large.total_s is None
    with pytest.raises(ValueError, match="above 0"):
        time_to_loss(2.0, 0, 1.0)
