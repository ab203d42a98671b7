"""The field's recipe: its steps in their order, and that each is taken only when the one before does not do."""

from __future__ import annotations

import pytest

from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model
from shardwise.plan.job import Job
from shardwise.plan.rules import findings
from shardwise.plan.stack import load_stack, under
from shardwise.search.recipe import LONG_TOKENS, MICRO_BATCHES_A_STAGE, field_recipe
from shardwise.search.solve import SLACK, evaluate


def recipe(model: str, cluster: str, seq_len: int = 8192, batch: int = 128) -> tuple[Job, str]:
    job = Job(load_model(model), parse_cluster(cluster), seq_len, batch)
    found = field_recipe(job)
    if found is None:
        return job, ""
    assert not findings(found.layout, job)
    assert found.fits
    walked = evaluate(job, found.layout)
    assert found.peak_bytes == walked.peak_bytes
    assert found.step.total_s == pytest.approx(walked.step.total_s, rel=SLACK)
    assert field_recipe(job) == found
    return job, str(found.layout)


def test_what_fits_one_device_is_not_cut() -> None:
    _, text = recipe("qwen3-0.6b", "8xh100", 2048)
    assert text.startswith("dp=8 zero=1")


def test_tensor_parallelism_first_then_the_pipeline() -> None:
    """8B, 70B and 405B: a part of a node, a node, and nodes joined by a pipeline."""
    assert recipe("llama-3.1-8b", "8x8xh100")[1].startswith("tp=2 dp=32 zero=1")
    assert recipe("llama-3.1-70b", "64x8xh100", batch=512)[1].startswith("tp=8 dp=64 zero=1")
    job, text = recipe("llama-3.1-405b", "512x8xh100", batch=2048)
    assert text.startswith("tp=8 pp=")
    assert job.cluster.devices_per_node == 8


def test_experts_before_tensors() -> None:
    text = recipe("mixtral-8x7b", "8x8xh100", 4096, 1024)[1]
    assert "ep=8" in text
    assert "tp=" not in text
    assert "etp=" not in text


def test_a_torus_has_no_pipeline_and_cuts_the_state() -> None:
    text = recipe("gemma-2-27b", "v5p:8x8x8", batch=1024)[1]
    assert "pp=" not in text
    assert "zero=3" in text


def test_long_sequences_are_cut() -> None:
    text = recipe("llama-3.1-70b", "64x8xh100", 16 * LONG_TOKENS, 32)[1]
    assert "cp=16" in text
    assert "cp=" not in recipe("llama-3.1-70b", "64x8xh100", LONG_TOKENS, 512)[1]


def test_a_batch_with_few_sequences_is_met_by_further_cuts() -> None:
    """Data parallelism has no use for 64 ranks with 16 sequences."""
    _, text = recipe("qwen3-8b", "8x8xh100", 4096, 16)
    assert text.startswith("tp=4 dp=16")


def test_what_is_gathered_for_each_of_many_micro_batches_is_laid_over_a_pipeline() -> None:
    """As DeepSeek-V3 was trained (2412.19437, section 3.2): 16 stages."""
    text = recipe("deepseek-v3", "256x8xh100", 4096, 15360)[1]
    assert text.startswith("pp=16 ep=8")
    assert "zero=1" in text


def test_whole_layers_are_recomputed_last() -> None:
    assert "recompute" not in recipe("llama-3.1-8b", "8xh100")[1]
    assert "recompute=full" in recipe("llama-3.1-70b", "2x8xh100", batch=512)[1]


def test_the_micro_batch_fills_memory_but_leaves_the_pipeline_full() -> None:
    job = Job(load_model("mixtral-8x7b"), parse_cluster("8x8xh100"), 1024, 512)
    found = field_recipe(job)
    assert found is not None
    assert found.layout.mb > 1
    assert job.micro_batches(found.layout) >= MICRO_BATCHES_A_STAGE * found.layout.pp


@pytest.mark.parametrize("name", ["megatron-2021", "torchtitan", "maxtext"])
def test_a_stack_has_the_levels_that_it_has(name: str) -> None:
    """No distributed optimizer at all, none without cut gradients, FSDP alone."""
    stack = load_stack(name)
    model = under(load_model("llama-3.1-8b"), stack)
    found = field_recipe(Job(model, parse_cluster("8x8xh100"), 4096, 128, stack=stack))
    assert found is not None
    assert found.layout.zero in (0, *stack.zero)


@pytest.mark.parametrize("cluster", ["8xh100", "1xh100"])
def test_what_never_fits_has_no_recipe(cluster: str) -> None:
    assert recipe("llama-3.1-405b", cluster)[1] == ""
