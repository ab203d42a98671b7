"""Every rule: a layout that breaks it alone, what is said, and a fix that mends it."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job, JobError, batch_from_tokens
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rules import RULES, findings, legal
from tests.support.models import job, tiny

JOB = Job(load_model("llama-3.1-8b"), parse_cluster("2x8xh100"), 8192, 64)

BROKEN = {
    "world": ("tp=8 pp=4 mb=1", "tp=8 pp=2 mb=1", "32 ranks, the cluster has 16 devices"),
    "batch": ("dp=16 zero=1 mb=3", "dp=16 zero=1 mb=4", "64 sequences are not whole micro-batches of dp 16 x mb 3"),
    "kv-heads": ("tp=16 mb=1", "tp=8 dp=2 zero=1 mb=1", "more than the 8 kv heads"),
    "stages": ("pp=16 schedule=interleaved:4 mb=1", "pp=16 schedule=interleaved:2 mb=1", "64 stages for 32 layers"),
    "split": ("pp=16 split=32,0 mb=1", "pp=16 mb=1", "2 stages with 32 layers"),
    "schedule": ("dp=16 zero=1 schedule=zb-h1 mb=1", "dp=16 zero=1 mb=1", "schedule=zb-h1 with pp=1"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named_with_its_numbers(rule: str) -> None:
    text, mended, said = BROKEN[rule]
    (found,) = findings(parse(text), JOB)
    assert found.rule == rule
    assert said in found.message
    assert found.fix
    assert not findings(parse(mended), JOB)


@pytest.mark.parametrize(
    ("rule", "model"),
    [
        ("ffn", tiny(2, ffn=46)),
        ("vocab", tiny(2, vocab=42)),
    ],
)
def test_sizes_that_tp_does_not_divide_are_refused(rule: str, model: object) -> None:
    work = job(model, "4xcpu")  # type: ignore[arg-type]
    assert [f.rule for f in findings(parse("tp=4 mb=1"), work)] == [rule]
    assert not findings(parse("tp=2 dp=2 zero=1 mb=1"), work)


def test_a_sequence_that_tp_does_not_divide_needs_sp_0() -> None:
    work = job(tiny(2), "8xcpu", seq_len=12)
    assert [f.rule for f in findings(parse("tp=8 mb=1"), work)] == ["sequence"]
    assert not findings(parse("tp=8 sp=0 mb=1"), work)


def test_every_rule_has_a_case() -> None:
    covered = {*BROKEN, "ffn", "vocab", "sequence"}
    assert {r.id for r in RULES} - covered == {"heads"}  # tp that divides the kv heads divides the heads


def test_the_mask_of_a_batch_agrees_with_the_findings_of_each() -> None:
    texts = [t for case in BROKEN.values() for t in case[:2]]
    every: list[Layout] = [parse(t) for t in texts]
    mask = legal(LayoutBatch.of(every), JOB)
    assert mask.tolist() == [not findings(x, JOB) for x in every]
    assert mask.dtype == np.bool_


def test_tokens_that_are_no_whole_sequences_are_refused_with_the_nearest() -> None:
    assert batch_from_tokens(4 * 1024**2, 8192) == 512
    with pytest.raises(JobError, match="try 8,192 or 16,384"):
        batch_from_tokens(10_000, 8192)
