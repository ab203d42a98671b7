"""Every rule: a layout that breaks it, what is said, and the fix that is said mends it."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from shardwise.cluster import parse_cluster
from shardwise.model.hf import from_config, load_model, to_config
from shardwise.model.spec import Model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job, JobError, batch_from_tokens
from shardwise.plan.layout import KEYS, parse
from shardwise.plan.rules import RULES, divisors_near, findings, legal
from shardwise.plan.stack import SHARDWISE
from shardwise.search.limits import Limits
from shardwise.search.space import Space
from tests.support.drawn import LOOPED, MODELS, attempts, job_of, model_named, spoilt
from tests.support.models import job, tiny


def changed(name: str, **keys: Any) -> Model:
    """A model of the catalog with other sizes."""
    return from_config({**to_config(load_model(name)), **keys}, name)


def on(devices: str, model: str | Model = "llama-3.1-8b", seq_len: int = 8192, batch: int = 64) -> Job:
    found = load_model(model) if isinstance(model, str) else model
    return Job(found, parse_cluster(devices), seq_len, batch)


@dataclass(frozen=True)
class Case:
    """`text` breaks the rule, `mended` none; `also` are rules that it cannot help breaking too."""

    job: Job
    text: str
    mended: str
    said: str
    also: tuple[str, ...] = ()


DENSE, ROUTED = on("2x8xh100"), on("2x8xh100", "qwen3-30b-a3b")
NEMOTRON = on("2x8xh100", "nemotron-3-nano")
BROKEN = {
    "world": Case(DENSE, "tp=8 pp=2 dp=2 mb=1", "tp=8 pp=2 mb=1", "32 ranks, the cluster has 16 devices"),
    "batch": Case(
        DENSE, "dp=16 zero=1 mb=3", "dp=16 zero=1 mb=4", "64 sequences are not whole micro-batches of dp 16 x mb 3"
    ),
    "zero": Case(
        replace(DENSE, stack=replace(SHARDWISE, title="another stack", zero=(1, 2))),
        "dp=16 zero=3 mb=1",
        "dp=16 zero=1 mb=1",
        "zero=3 is not what another stack offers (1, 2)",
    ),
    "heads": Case(job(tiny(2), "16xcpu"), "tp=16 mb=1", "tp=8 dp=2 mb=1", "tp=16 does not divide 8 heads"),
    "kv-heads": Case(
        on("24xcpu", changed("llama-3.1-8b", num_attention_heads=24, num_key_value_heads=8, head_dim=128)),
        "tp=12 dp=2 mb=1 sp=0",
        "tp=8 sp=0 pp=3 mb=1",
        "neither divides 8 kv heads nor is a multiple",
        ("ffn",),
    ),
    "ffn": Case(
        job(tiny(2, ffn=46), "4xcpu"), "tp=4 mb=1", "tp=2 dp=2 zero=1 mb=1", "tp=4 does not divide 46 feed-forward rows"
    ),
    "shared-experts": Case(
        on("4xcpu", changed("deepseek-v3", moe_intermediate_size=2050)),
        "tp=4 mb=1",
        "tp=2 dp=2 mb=1",
        "tp=4 does not divide 2,050 rows of the shared experts",
    ),
    "ssm-heads": Case(
        on("16xcpu", changed("nemotron-3-nano", mamba_num_heads=8, n_groups=8)),
        "tp=16 mb=1",
        "tp=8 dp=2 mb=1",
        "tp=16 does not divide 8 state-space heads",
        ("ssm-groups",),
    ),
    "ssm-groups": Case(NEMOTRON, "tp=16 mb=1", "tp=8 dp=2 mb=1", "tp=16 does not divide 8 state-space groups"),
    "sequence": Case(
        job(tiny(2), "8xcpu", seq_len=12), "tp=8 mb=1", "tp=8 sp=0 mb=1", "12 tokens of a micro-batch into tp=8"
    ),
    "context": Case(
        job(tiny(2), "8xcpu", seq_len=24), "cp=8 mb=1", "cp=4 dp=2 mb=1", "24 tokens into 16 parts unevenly"
    ),
    "ulysses": Case(
        on("8x8xh100"),
        "tp=8 cp=8 cp_kind=ulysses mb=1",
        "tp=8 cp=4 cp_kind=ulysses dp=2 mb=1",
        "32 heads into tp 8 x cp 8",
    ),
    "scan": Case(NEMOTRON, "tp=8 cp=2 mb=1", "tp=8 dp=2 mb=1", "cp=2: a state-space layer's scan"),
    "dense": Case(DENSE, "ep=2 dp=16 zero=1 mb=1", "dp=16 zero=1 mb=1", "llama-3.1-8b has no routed experts"),
    "experts": Case(
        on("48xcpu", "qwen3-30b-a3b", batch=48),
        "ep=48 dp=48 mb=1",
        "ep=16 dp=48 mb=1",
        "ep=48 does not divide 128 experts",
    ),
    "expert-ffn": Case(
        on("10xcpu", "qwen3-30b-a3b", batch=10),
        "etp=5 dp=10 mb=1",
        "dp=10 mb=1",
        "etp=5 does not divide an expert's 768 rows",
    ),
    "folding": Case(
        ROUTED,
        "ep=8 dp_replicate=4 dp_shard=4 zero=1 mb=1",
        "ep=4 dp_replicate=4 dp_shard=4 zero=1 mb=1",
        "dp_shard 4 x cp 1 x tp 1 = 4",
    ),
    "routing": Case(ROUTED, "tp=4 sp=0 dp=4 mb=1", "tp=4 dp=4 mb=1", "every rank would route all tokens"),
    "stages": Case(
        DENSE, "pp=16 schedule=interleaved:4 mb=1", "pp=16 schedule=interleaved:2 mb=1", "64 stages for 32 layers"
    ),
    "split": Case(DENSE, "pp=16 split=32,0 mb=1", "pp=16 mb=1", "2 stages with 32 layers"),
    "schedule": Case(DENSE, "dp=16 zero=1 schedule=zb-h1 mb=1", "dp=16 zero=1 mb=1", "schedule=zb-h1 with pp=1"),
    "rows": Case(on("3xcpu"), "pp=3 schedule=dualpipe mb=1", "pp=3 mb=1", "pp=3 must be even"),
    "loops": Case(
        on("2x8xh100", model_named(LOOPED)), "tp=8 pp=2 mb=1", "tp=8 dp=2 mb=1", "pp=2: the 4 runs of a layer"
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named_with_its_numbers(rule: str) -> None:
    case = BROKEN[rule]
    found = {f.rule: f for f in findings(parse(case.text), case.job)}
    assert found.keys() == {rule, *case.also}
    assert case.said in found[rule].message
    assert not findings(parse(case.mended), case.job)


def test_every_rule_has_a_case() -> None:
    assert {r.id for r in RULES} == BROKEN.keys()


def follow(fix: str, text: str, work: Job) -> tuple[str, Job]:
    """A layout and a job after doing what a fix says first."""
    words = dict(word.split("=") for word in text.split())
    if left_out := re.match(r"leave (\w+)(?: and (\w+))? out", fix):
        words = {k: v for k, v in words.items() if k not in left_out.groups()}
    elif batch := re.match(r"use a batch of ([\d,]+)", fix):
        work = replace(work, global_batch=int(batch[1].replace(",", "")))
    elif sequence := re.match(r"use a sequence of ([\d,]+)", fix):
        work = replace(work, seq_len=int(sequence[1].replace(",", "")))
    elif stages := re.match(r"use at most (\d+) stages", fix):
        words["schedule"] = f"interleaved:{int(stages[1]) // int(words['pp'])}"
    elif folded := re.match(r"use ep x etp of (\d+)", fix):
        words["ep"] = folded[1]
    elif split := re.match(r"name (\d+) stages with (\d+) layers", fix):
        most = int(split[1])
        words["split"] = ",".join(str(int(split[2]) // most) for _ in range(most))
    else:
        key, value = re.findall(r"(\w+)=(\w+)", fix)[0]
        words[key] = value
    return " ".join(f"{k}={words[k]}" for k in KEYS if k in words), work


@pytest.mark.parametrize("rule", BROKEN)
def test_a_fix_mends_what_it_says(rule: str) -> None:
    case = BROKEN[rule]
    (found,) = (f for f in findings(parse(case.text), case.job) if f.rule == rule)
    text, work = follow(found.fix, case.text, case.job)
    assert text != case.text or work != case.job
    assert rule not in {f.rule for f in findings(parse(text), work)}, (found.fix, text)


@pytest.mark.parametrize("name", MODELS)
def test_the_mask_of_a_batch_agrees_with_the_findings_of_each(name: str) -> None:
    work = job_of(name)
    rng = random.Random(1)
    layouts = [*attempts(work, 20, rng), *spoilt(attempts(work, 150, rng), rng)]
    batch = LayoutBatch.of(layouts)
    mask = legal(batch, work)
    assert mask.dtype == np.bool_
    assert mask.tolist() == [not findings(x, work) for x in layouts]
    assert 0 < mask.sum() < len(mask)
    for rule in RULES:
        broken = np.broadcast_to(rule.broken(batch, work), batch.shape).tolist()
        assert broken == [any(f.rule == rule.id for f in findings(x, work, (rule,))) for x in layouts]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_the_mask_of_a_grid_is_that_of_its_rows(name: str) -> None:
    """Axes that broadcast give, place by place, what the flat batch does."""
    work = job_of(name, "4x8xh100", batch=48)
    space = Space(work, Limits())
    batch = next(iter(space.cuts(4)))
    grid, _ = space.grid(batch.take(np.arange(len(batch))[::3]))
    rows = grid.take(np.arange(len(grid)))
    assert legal(grid, work).ravel().tolist() == legal(rows, work).tolist()
    for rule in RULES:
        assert (
            np.broadcast_to(rule.broken(grid, work), grid.shape).ravel().tolist()
            == np.broadcast_to(rule.broken(rows, work), rows.shape).tolist()
        )


def test_every_finding_has_a_fix() -> None:
    """Of whatever is wrong with whatever layout: no explanation fails, and none is empty."""
    seen: set[str] = set()
    for name in MODELS:
        work = job_of(name, seq_len=4096 + 8, batch=190)
        rng = random.Random(2)
        for layout in spoilt(attempts(work, 60, rng), rng):
            for found in findings(layout, work):
                assert found.message and found.fix
                seen.add(found.rule)
    assert len(seen) >= 20


@pytest.mark.parametrize(("n", "wanted", "said"), [(8, 3, "2 or 4"), (8, 16, "8"), (12, 4, "3 or 6"), (7, 7, "1")])
def test_divisors_near(n: int, wanted: int, said: str) -> None:
    assert divisors_near(n, wanted) == said


def test_tokens_that_are_no_whole_sequences_are_refused_with_the_nearest() -> None:
    assert batch_from_tokens(4 * 1024**2, 8192) == 512
    with pytest.raises(JobError, match="try 8,192 or 16,384"):
        batch_from_tokens(10_000, 8192)
