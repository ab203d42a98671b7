"""What our own runtime runs: every rule has a layout that is legal and planned only, and a change that makes it run."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from shardwise.cluster import parse_cluster
from shardwise.model.hf import from_config, load_model, to_config
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import PRECISIONS, Job
from shardwise.plan.layout import parse
from shardwise.plan.rules import findings, legal
from shardwise.plan.runs import RUNS, runs_here
from shardwise.plan.stack import SHARDWISE
from tests.support.drawn import attempts

DENSE = Job(load_model("llama-3.1-8b"), parse_cluster("2x8xh100"), 8192, 64)


@dataclass(frozen=True)
class Case:
    """`text` is legal and breaks the rule alone; with `mended` (and `better`, another job) the runtime takes it."""

    job: Job
    text: str
    mended: str
    said: str
    better: Job | None = None


GPT = load_model("gpt:L=8,h=1024,a=8,V=51200,s=2048")
YARN = from_config(to_config(load_model("qwen3-8b")) | {"rope_scaling": {"rope_type": "yarn"}}, "stretched")
PLAIN = "tp=8 dp=2 zero=1 mb=1"
PLANNED = {
    "runs-model": Case(replace(DENSE, model=load_model("mixtral-8x7b")), PLAIN, PLAIN, "family mixtral", DENSE),
    "runs-form": Case(replace(DENSE, model=YARN), PLAIN, PLAIN, "'yarn'", DENSE),
    "runs-positions": Case(
        Job(GPT, parse_cluster("2x8xh100"), 8192, 64),
        PLAIN,
        PLAIN,
        "2,048 learned positions",
        replace(DENSE, model=GPT, seq_len=2048),
    ),
    "runs-stack": Case(
        replace(DENSE, stack=replace(SHARDWISE, name="other", title="another stack")),
        PLAIN,
        PLAIN,
        "another stack",
        DENSE,
    ),
    "runs-precision": Case(replace(DENSE, precision=PRECISIONS["fp8"]), PLAIN, PLAIN, "precision fp8", DENSE),
    "runs-context": Case(DENSE, "tp=8 cp=2 mb=1", PLAIN, "cp=2"),
    "runs-order": Case(DENSE, "tp=4 pp=2 dp=2 mb=1 order=dp", "tp=4 pp=2 dp=2 mb=1", "order=dp"),
}


@pytest.mark.parametrize("rule", PLANNED)
def test_what_is_planned_only_is_named_with_its_numbers(rule: str) -> None:
    case = PLANNED[rule]
    layout = parse(case.text)
    assert not findings(layout, case.job)
    (found,) = runs_here(layout, case.job)
    assert found.rule == rule
    assert case.said in found.message
    assert found.fix
    better, work = parse(case.mended), case.better or case.job
    assert not [*findings(better, work), *runs_here(better, work)]


def test_every_rule_has_a_case() -> None:
    assert {r.id for r in RUNS} == PLANNED.keys()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_the_mask_of_a_batch_agrees_with_each(name: str) -> None:
    work = replace(DENSE, model=load_model(name), global_batch=192)
    layouts = attempts(work, 200, random.Random(3))
    mask = legal(LayoutBatch.of(layouts), work, RUNS)
    assert mask.tolist() == [not runs_here(x, work) for x in layouts]
    assert np.any(mask) == (name == "llama-3.1-8b")
