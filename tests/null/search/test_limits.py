"""What a search is held to: the layouts within limits are those of the whole space that keep them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest

from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, LayoutError, parse
from shardwise.plan.runs import runs_here
from shardwise.search.limits import Limits, read_limits
from shardwise.search.solve import solve
from shardwise.search.space import SCHEDULES, enumerate_layouts

DENSE = Job(load_model("llama-3.1-8b"), parse_cluster("4xh100"), 1024, 4)
ROUTED = Job(load_model("mixtral-8x7b"), parse_cluster("4xh100"), 1024, 2)


@lru_cache(maxsize=4)
def everything(routed: bool) -> tuple[Layout, ...]:
    return tuple(within(ROUTED if routed else DENSE, Limits()))


def within(job: Job, limits: Limits) -> list[Layout]:
    return [b.row(i) for b in enumerate_layouts(job, limits) for i in range(len(b))]


@pytest.mark.parametrize("routed", [False, True])
def test_every_layout_is_distinct_fills_the_world_and_has_one_text(routed: bool) -> None:
    found = everything(routed)
    assert len(found) == len(set(found)) > 1000
    assert {x.world_size for x in found} == {4}
    for layout in found[:: max(1, len(found) // 500)]:
        assert parse(str(layout)) == layout


def test_the_whole_field_is_looked_at() -> None:
    for key, wanted in {
        "cp_kind": {"ring", "ulysses", "gather"},
        "zero": {0, 1, 2, 3},
        "sp": {False, True},
        "recompute": {"none", "act", "norm,act", "full"},
        "ep": {1, 2, 4},
        "etp": {1, 2, 4},
    }.items():
        assert {getattr(x, key) for x in everything(True)} == wanted, key
    tried = {x.schedule for x in everything(True)}
    assert {n for n in SCHEDULES if not n.startswith("interleaved")} < tried <= set(SCHEDULES)


Kept = Callable[[Layout], bool]

PINS: dict[str, Kept] = {
    "tp=2": lambda x: x.tp == 2,
    "sp=0": lambda x: not x.sp,
    "cp=2": lambda x: x.cp == 2,
    "cp=2 cp_kind=gather": lambda x: x.cp == 2 and x.cp_kind == "gather",
    "pp=4": lambda x: x.pp == 4,
    "dp=2": lambda x: x.dp == 2,
    "dp_replicate=2": lambda x: x.dp_replicate == 2,
    "dp_shard=4": lambda x: x.dp_shard == 4,
    "zero=2": lambda x: x.zero == 2,
    "zero=0": lambda x: x.zero == 0,
    "mb=2": lambda x: x.mb == 2,
    "recompute=act": lambda x: x.recompute == "act",
    "pp=2 schedule=interleaved": lambda x: x.pp == 2 and x.schedule.startswith("interleaved"),
    "pp=2 schedule=zb-v": lambda x: x.pp == 2 and x.schedule == "zb-v",
    "tp=2 dp=2 zero=1": lambda x: (x.tp, x.dp, x.zero) == (2, 2, 1),
}


@pytest.mark.parametrize("pins", PINS)
def test_a_pin_keeps_what_has_its_value(pins: str) -> None:
    assert set(within(DENSE, read_limits([pins], []))) == {x for x in everything(False) if PINS[pins](x)} != set()


FORBIDS: dict[str, Kept] = {
    "cp": lambda x: x.cp == 1,
    "tp=2 tp=4": lambda x: x.tp not in (2, 4),
    "pp": lambda x: x.pp == 1,
    "zero=3": lambda x: x.zero != 3,
    "zero": lambda x: x.zero == 0,
    "recompute": lambda x: x.recompute == "none",
    "recompute=full": lambda x: x.recompute != "full",
    "schedule=interleaved": lambda x: not x.schedule.startswith("interleaved"),
    "schedule": lambda x: x.schedule == "1f1b",
    "cp_kind=ulysses": lambda x: x.cp_kind != "ulysses",
    "dp_replicate": lambda x: x.dp_replicate == 1,
    "sp": lambda x: not x.sp,
    "mb=1": lambda x: x.mb != 1,
}


@pytest.mark.parametrize("forbids", FORBIDS)
def test_what_is_forbidden_is_left_out_and_nothing_else(forbids: str) -> None:
    assert (
        set(within(DENSE, read_limits([], [forbids]))) == {x for x in everything(False) if FORBIDS[forbids](x)} != set()
    )


@pytest.mark.parametrize(
    ("pins", "forbids", "kept"),
    [
        (["ep=4"], [], lambda x: x.ep == 4),
        ([], ["ep"], lambda x: x.ep == 1),
        (["etp=2 ep=2"], ["zero=3"], lambda x: (x.ep, x.etp) == (2, 2) and x.zero != 3),
    ],
)
def test_limits_of_experts(pins: list[str], forbids: list[str], kept: Kept) -> None:
    assert set(within(ROUTED, read_limits(pins, forbids))) == {x for x in everything(True) if kept(x)} != set()


def test_what_is_not_tried_by_itself_may_be_pinned() -> None:
    """A schedule that is slower than another of the list, a set of operations that is not in it."""
    for text, key in (("gpipe", "schedule"), ("interleaved:3", "schedule"), ("core", "recompute")):
        found = within(DENSE, read_limits([f"pp=2 {key}={text}"], []))
        assert found and {getattr(x, key) for x in found} == {text}


@pytest.mark.parametrize("pair", list(itertools.combinations(["tp=2", "cp=2", "dp=2", "pp=2"], 2)))
def test_pins_in_one_word_or_in_two_are_the_same(pair: tuple[str, str]) -> None:
    assert read_limits(list(pair), []) == read_limits([", ".join(pair)], [])


def test_the_search_keeps_its_limits() -> None:
    job = replace(DENSE, seq_len=4096, global_batch=32)
    limits = replace(read_limits(["tp=2"], ["zero=1"]), runnable=True)
    best = [c.layout for c in solve(job, limits=limits, keep=8).best]
    assert best
    assert all(x.tp == 2 and x.zero != 1 for x in best)
    assert not [(str(x), str(f)) for x in best for f in runs_here(x, job)]


@pytest.mark.parametrize(
    ("pins", "forbids", "said"),
    [
        (["tp"], [], "--pin tp: wanted key=value"),
        (["tp=2", "tp=4"], [], "--pin tp: pinned to 2 and to 4"),
        (["width=2"], [], "--pin width=2: no such key"),
        (["split=1,2"], [], "no such key"),
        (["tp=zwei"], [], "wanted a whole number from 1"),
        (["cp_kind=zigzag"], [], "wanted one of ring, ulysses, gather"),
        ([], ["schedule=fast"], "--forbid schedule=fast: wanted one of gpipe, 1f1b"),
        ([], ["recompute=some"], "no 'some'"),
        ([], ["zero=4"], "wanted one of 0, 1, 2, 3"),
        ([], ["cp=0"], "wanted a whole number from 1"),
    ],
)
def test_limits_that_cannot_be_are_named(pins: list[str], forbids: list[str], said: str) -> None:
    with pytest.raises(LayoutError) as error:
        read_limits(pins, forbids)
    assert said in str(error.value)


def test_all_faults_are_said_at_once() -> None:
    with pytest.raises(LayoutError) as error:
        read_limits(["tp=no", "what=1"], ["zero=9"])
    assert len(error.value.faults) == 3
