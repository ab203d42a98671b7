"""Why not this layout, what makes it fit, and what if nothing does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from shardwise.account.memory import memory_of
from shardwise.cluster import Level, parse_cluster
from shardwise.model.hf import load_model
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rules import findings
from shardwise.search.fitting import enlarged, excess, nothing_fits, remedies
from shardwise.search.limits import read_limits
from shardwise.search.neighbours import Field
from shardwise.search.path import TOGETHER, path
from shardwise.search.solve import SearchResult, evaluate, solve
from shardwise.search.whynot import why_not

JOB = Job(load_model("llama-3.1-8b"), parse_cluster("4x8xh100"), 8192, 128)
BEST = evaluate(JOB, parse("dp=32 zero=3 mb=2 recompute=norm,act"))
FOUND = SearchResult(1, 1, 1, (BEST,), None, 1, 0.0)
NOTHING = SearchResult(1, 1, 0, (), evaluate(JOB, parse("dp=32 mb=4")), 1, 0.0)


def test_every_broken_rule_is_named_with_its_fix() -> None:
    layout = parse("tp=3 dp=5 mb=1")
    said = why_not(JOB, layout, FOUND)
    assert said.findings == tuple(findings(layout, JOB))
    assert len(said.findings) > 2
    assert all(f"{fault.message}: {fault.fix}." in said.text for fault in said.findings)
    assert said.candidate is None


def test_too_large_is_told_by_part_and_place() -> None:
    layout = parse("dp=32 zero=1 mb=2")
    said = why_not(JOB, layout, FOUND)
    at = max(memory_of(JOB, layout), key=lambda memory: memory.total_bytes)
    assert said.excess is not None
    assert said.excess.memory == at
    assert said.excess.over_bytes == at.total_bytes - JOB.cluster.device.usable_bytes > 0
    parts = at.proved | at.assumed
    assert parts[said.excess.part] == max(parts.values())
    assert f"Pipeline rank {at.rank} " in said.excess.text
    assert said.remedies
    assert all(one.fits and not findings(one.layout, JOB) for one in said.remedies)
    assert not why_not(JOB, parse("pp=2 dp=16 mb=8"), FOUND).remedies


@pytest.mark.parametrize(
    "text", ["dp=32 mb=2", "tp=2 dp=16 mb=8", "pp=2 dp=16 mb=4", "dp=32 zero=1 mb=2 recompute=act"]
)
def test_remedies_change_one_thing(text: str) -> None:
    layout = parse(text)
    found = remedies(JOB, layout)
    assert found == sorted(found, key=lambda one: one.step.total_s)
    for one in found:
        assert one == evaluate(JOB, one.layout)
        changed = [keys for keys in TOGETHER if any(getattr(one.layout, k) != getattr(layout, k) for k in keys)]
        assert len([keys for keys in changed if keys[0] != "zero"] or changed) == 1


def test_slower_is_told_by_cause() -> None:
    layout = parse("tp=8 dp=4 zero=1 mb=1")
    said = why_not(JOB, layout, FOUND)
    assert said.candidate is not None
    assert said.gap == pytest.approx(said.candidate.step.total_s / BEST.step.total_s - 1)
    difference = said.candidate.step.total_s - BEST.step.total_s
    assert sum(seconds for _, seconds in said.causes) == pytest.approx(difference)
    sizes = [abs(seconds) for _, seconds in said.causes]
    assert sizes == sorted(sizes, reverse=True)
    assert said.causes[0][0] == "tp communication"
    assert [step.text for step in said.path] == list(said.text[-len(said.path) :])


def test_the_best_one_and_a_search_that_found_nothing() -> None:
    assert "best one" in why_not(JOB, BEST.layout, FOUND).text[0]
    assert "nothing within the limits" in why_not(JOB, BEST.layout, NOTHING).text[0]


@pytest.mark.parametrize(
    "text",
    [
        "tp=8 dp=4 zero=1 mb=1",
        "tp=2 pp=4 dp=4 zero=1 schedule=interleaved:2 mb=1",
        "cp=4 pp=2 dp=4 mb=1 recompute=full",
        "dp_replicate=4 dp_shard=8 zero=3 mb=1",
        "tp=2 pp=2 dp=8 split=14,18 mb=1",
        "dp=32 zero=3 mb=4 recompute=norm,act",
    ],
)
def test_the_path_leads_to_the_other_over_legal_layouts(text: str) -> None:
    start = parse(text)
    steps = list(path(Field(JOB, BEST), start, BEST.layout))
    assert steps[-1].layout == BEST.layout
    assert steps[-1].seconds == pytest.approx(BEST.step.total_s)
    layouts = [start, *(step.layout for step in steps)]
    assert len(set(layouts)) == len(layouts)
    assert not any(findings(layout, JOB) for layout in layouts)
    assert all(before != after for before, after in pairwise(layouts))


def test_the_path_takes_no_detour() -> None:
    """Recomputing less and keeping all of the state fit only one after the other, in one order."""
    steps = list(path(Field(JOB, BEST), parse("dp=32 zero=1 mb=2 recompute=full"), BEST.layout))
    assert all(step.fits for step in steps)


# ------------------------------------------------------------------------------------------------------ nothing fits


def test_where_nothing_fits_more_nodes_do() -> None:
    job = Job(load_model("llama-3.1-70b"), parse_cluster("8xh100"), 8192, 128)
    found = solve(job, keep=1)
    said = nothing_fits(job, found)
    assert said.closest == found.closest
    assert said.closest is not None
    assert said.excess == excess(job, said.closest.layout)
    assert said.ways
    for way in said.ways:
        assert evaluate(way.job, way.candidate.layout).fits
        assert str(way.candidate.layout) in way.text or way.job == job
    assert "2 times as many nodes, 16 devices" in said.ways[0].text


def test_no_more_nodes_than_it_takes() -> None:
    """Half as many could not even hold the state."""
    job = Job(load_model("llama-3.1-405b"), parse_cluster("8xh100"), 8192, 128)
    said = nothing_fits(job, solve(job, keep=1))
    assert said.excess is not None
    state = sum(said.excess.memory.proved.get(part, 0) for part in ("parameters", "gradients", "optimizer"))
    times = said.ways[0].job.cluster.nodes
    assert state / (times // 2) > job.cluster.device.usable_bytes > state / times


@pytest.mark.parametrize("text", ["pp=2 dp=16 mb=4", "pp=4 dp=8 zero=1 mb=1"])
def test_the_fullest_rank_is_the_one_that_is_over(text: str) -> None:
    totals = [memory.total_bytes for memory in memory_of(JOB, parse(text))]
    found = excess(JOB, parse(text))
    assert (found.memory.rank, found.memory.total_bytes) == (totals.index(max(totals)), max(totals))


def test_limits_that_nothing_meets_are_answered_within_the_job() -> None:
    job = replace(JOB, cluster=parse_cluster("8xh100"))
    found = solve(job, keep=1, limits=read_limits(["tp=1 pp=1 cp=1 zero=0"], []))
    said = nothing_fits(job, found)
    assert any(way.job == job for way in said.ways)
    assert all(evaluate(way.job, way.candidate.layout).fits for way in said.ways)


def test_where_no_layout_is_legal_a_rule_says_why() -> None:
    job = replace(JOB, cluster=parse_cluster("64x8xh100"), global_batch=1)
    said = nothing_fits(job, SearchResult(1, 0, 0, (), None, 0, 0.0))
    assert said.closest is None
    assert findings(Layout(dp_replicate=512), job)[0].message in said.text


@pytest.mark.parametrize(("one", "times", "more"), [("8xh100", 4, "4x8xh100"), ("2x8xh100", 2, "4x8xh100")])
def test_more_nodes_of_the_same(one: str, times: int, more: str) -> None:
    assert enlarged(parse_cluster(one), times) == parse_cluster(more)


def test_more_slices_and_unknown_networks() -> None:
    assert enlarged(parse_cluster("v5p:4x4x4"), 2) == parse_cluster("2xv5p:4x4x4")
    odd = replace(parse_cluster("8xh100"), device=replace(JOB.cluster.device, name="odd"))
    assert enlarged(odd, 2) is None
    deep = replace(odd, nodes=2, levels=(*odd.levels, Level("net", 16, 50, 1e-6)))
    larger = enlarged(deep, 2)
    assert larger is not None
    assert (larger.world_size, larger.levels[-1].size) == (32, 32)
