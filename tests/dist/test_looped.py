"""A looped block: one set of parameters, run several times over, each run a unit of its own."""

from __future__ import annotations

import pytest
import torch

from shardwise.account.comm import predict_ledger
from shardwise.collective import Phase
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rules import findings
from shardwise.plan.runs import runs_here
from shardwise.train.threads import run_threads
from tests.support.models import job, tiny
from tests.support.parity import assert_parity, run_rank
from tests.support.proof import assert_exact

torch.set_num_threads(1)

LAYOUTS = (
    "mb=2",
    "mb=4 recompute=full",
    "tp=2 mb=2",
    "tp=4 sp=0 mb=2 recompute=full",
    "dp=2 mb=1",
    "dp=2 zero=1 mb=1",
    "dp=3 zero=2 mb=1",
    "dp=3 zero=3 mb=2",
    "dp=2 zero=3 mb=1 recompute=full",
    "tp=2 dp_replicate=2 dp_shard=2 zero=3 mb=1",
)
"""All that is legal: every run of a layer lies on one rank, so there is no pipeline."""

LOOPED = {"one layer, twice": (1, 2, False), "two layers, thrice, tied": (2, 3, True)}
"""Layers, how often they run, tied ends. With one layer a run follows on itself: it keeps its gathered parameters."""


def made(text: str, name: str, precision: str = "fp64") -> tuple[Job, Layout]:
    layers, loops, tied = LOOPED[name]
    layout = parse(text)
    model = tiny(layers, tied, vocab=41, kv_heads=2, loops=loops)
    work = job(model, f"{layout.world_size}xcpu", batch=12, precision=precision)
    assert not [*findings(layout, work), *runs_here(layout, work)]
    return work, layout


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("text", LAYOUTS)
def test_a_looped_block_equals_one_process(text: str, name: str) -> None:
    """The gradient of a layer is the sum over its runs; loss, clip norm and three steps of AdamW follow."""
    work, layout = made(text, name)
    assert_parity(run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, True)), work, True)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("text", LAYOUTS)
def test_a_looped_block_is_proved(text: str, name: str, precision: str) -> None:
    work, layout = made(text, name, precision)
    for rank in sorted({0, layout.world_size - 1}):
        assert_exact(work, layout, rank)


@pytest.mark.parametrize(
    ("zero", "phase", "one", "two"),
    [(0, Phase.REDUCE, 1, 1), (1, Phase.REDUCE, 1, 1), (2, Phase.REDUCE, 3, 3), (3, Phase.UNSHARD, 2, 6)],
)
def test_gradients_are_summed_once_unless_they_are_cut(zero: int, phase: Phase, one: int, two: int) -> None:
    """Collectives of one micro-batch over the data axis, of each layer's storage, where the block runs three times:
    those that are cut are reduced in each run, those that are not with all the model's, in one bucket. Parameters are
    gathered for each run, forward and backward, but those of one layer stay from run to run."""
    layout = parse(f"dp=2 zero={zero} mb=4")
    for layers, times in ((1, one), (2, two)):
        work = job(tiny(layers, loops=3), "2xcpu")
        ledger = predict_ledger(work, layout, 0)
        for layer in range(layers):
            module = f"layers.{layer}" if zero else "embedding..head"
            assert sum(n for c, n in ledger.items() if c.key[:2] == (module, phase)) == times
