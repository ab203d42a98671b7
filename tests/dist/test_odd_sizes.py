"""Drawn models and layouts with degrees that are no powers of two: equal to one process, and proved, or refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shardwise.model.hf import from_config
from shardwise.model.spec import Model
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rules import findings
from shardwise.plan.runs import runs_here
from shardwise.prove.dryrun import prove_rank
from shardwise.train.threads import run_threads
from tests.support.front import NAMES
from tests.support.models import job
from tests.support.parity import assert_parity, run_rank

torch.set_num_threads(1)
MOST_RANKS = 12
DRAWS = 80


def draw_model(rng: random.Random) -> Model:
    heads = rng.choice([2, 3, 4, 6])
    return from_config(
        {
            "model_type": "llama",
            "hidden_size": rng.choice([8, 10, 12, 18, 30]),
            "intermediate_size": rng.choice([6, 12, 18, 20]),
            "num_hidden_layers": rng.randint(1, 6),
            "num_loops": rng.choice([1, 1, 1, 2]),
            "num_attention_heads": heads,
            "num_key_value_heads": rng.choice([k for k in range(1, heads + 1) if heads % k == 0]),
            "head_dim": rng.choice([2, 4, 6]),
            "vocab_size": rng.choice([12, 13, 30]),
            "tie_word_embeddings": rng.random() < 0.5,
        },
        "drawn",
    )


def draw_layout(rng: random.Random, layers: int) -> Layout:
    pp, shard = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 5])
    names = ["interleaved:3", *NAMES] if pp > 1 else ["1f1b"]
    layout = Layout(
        tp=rng.choice([1, 1, 2, 3]),
        sp=rng.random() < 0.6,
        pp=pp,
        dp_replicate=rng.choice([1, 1, 2, 3]),
        dp_shard=shard,
        zero=rng.choice([1, 2, 3]) if shard > 1 else 0,
        schedule=rng.choice(names),
        mb=rng.choice([1, 2]),
        recompute=rng.choice(["none", "full"]),
    )
    return replace(layout, split=draw_split(rng, layers, layout.stages)) if rng.random() < 0.3 else layout


def draw_split(rng: random.Random, layers: int, stages: int) -> tuple[int, ...]:
    """Any split that leaves no inner stage empty, or the default where there is none."""
    if not 2 <= stages <= layers:
        return ()
    parts = [rng.choice([0, 1]), *[1] * (stages - 2), rng.choice([0, 1])]
    while sum(parts) < layers:
        parts[rng.randrange(stages)] += 1
    return tuple(parts)


def draw(seed: int) -> tuple[Layout, Job]:
    """The first composition that is legal and runs, on at most MOST_RANKS ranks that this seed draws."""
    rng = random.Random(seed)
    while True:
        model = draw_model(rng)
        layout = draw_layout(rng, model.layers)
        if layout.world_size > MOST_RANKS:
            continue
        batch = layout.dp * layout.mb * rng.choice([1, 2, 3, 5])
        work = job(model, f"{layout.world_size}xcpu", seq_len=rng.choice([4, 6, 7, 12]), batch=batch)
        if not findings(layout, work) and not runs_here(layout, work):
            return layout, work


@pytest.mark.parametrize("seed", range(DRAWS))
def test_drawn_compositions_equal_one_process_and_are_proved(seed: int) -> None:
    layout, work = draw(seed)
    masked = seed % 2 == 1 and work.global_batch > 1
    traces = run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, masked))
    assert_parity(traces, work, masked)
    for precision in ("fp64", "bf16"):
        again = job(work.model, work.cluster, work.seq_len, work.global_batch, precision)
        for rank in sorted({0, layout.world_size // 2, layout.world_size - 1}):
            proof = prove_rank(again, layout, rank, tensors="real")
            assert not proof.differences(), str(layout)
            assert abs(proof.memory_error) <= 0.005, f"{layout} at {proof.peak_at}: {proof.memory_error:.2%}"
