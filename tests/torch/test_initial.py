"""Initial weights are bit-equal on every layout, also where a rank's rows cross the chunks of the generators."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.collective import Labels
from shardwise.plan.layout import parse
from shardwise.plan.rules import findings
from shardwise.train.comm import Comm
from shardwise.train.initial import CHUNK_ROWS
from shardwise.train.rank import build_rank
from shardwise.train.threads import run_threads
from tests.support.models import job, tiny
from tests.support.parity import Piece, assemble, pieces, whole_weights

torch.set_num_threads(1)

ROWS = 600
"""Of the vocabulary and the MLP: three chunks, the last one short; 150 a rank cross a border under tp 4."""

LAYOUTS = (
    "mb=1",
    "tp=2 sp=0 mb=1",
    "tp=4 mb=1",
    "tp=8 mb=1",
    "dp=3 zero=1 mb=1",
    "dp=7 zero=3 mb=1",
    "dp_replicate=2 dp_shard=2 zero=3 mb=1",
    "pp=4 mb=1",
    "tp=2 pp=2 dp=2 zero=3 schedule=interleaved:2 mb=1",
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("text", LAYOUTS)
def test_every_layout_starts_from_the_same_bits(text: str, tied: bool) -> None:
    layout, model = parse(text), tiny(3, tied, ffn=ROWS, vocab=ROWS)
    work = job(model, f"{layout.world_size}xcpu", batch=layout.dp, precision="bf16")
    assert not findings(layout, work)

    def rank(comm: Comm) -> tuple[list[Piece], dict[str, torch.Tensor]]:
        states = build_rank(work, layout, comm, Labels(), seed=5).states.values()
        used = {n: s.parameter.detach().clone() for state in states if layout.zero < 3 for n, s in state.slots.items()}
        return [piece for state in states for piece in pieces(state, state.master)], used

    found = run_threads(layout.world_size, rank)
    wanted = {name: value.float() for name, value in whole_weights(model, seed=5).items()}
    assert max(len(value) for value in wanted.values()) > 2 * CHUNK_ROWS
    masters = assemble([held for held, _ in found], wanted)
    for name, value in masters.items():
        assert torch.equal(value, wanted[name]), name
    for _, used in found:  # what the products see is the master, rounded once
        for name, value in used.items():
            if layout.tp == 1:
                assert torch.equal(value, wanted[name].bfloat16()), name


def test_the_values_are_those_of_gpt_2() -> None:
    layers = 2
    weights = whole_weights(tiny(layers, ffn=ROWS, vocab=ROWS, hidden=64), seed=1)
    for name, value in weights.items():
        if value.ndim == 1:
            assert torch.equal(value, torch.ones_like(value)), name
            continue
        deviation = 0.02
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            deviation /= math.sqrt(2 * layers)
        spread = 5 * deviation / math.sqrt(2 * value.numel())  # five standard errors
        assert value.std().item() == pytest.approx(deviation, abs=spread), name
        assert abs(value.mean().item()) < 5 * deviation / math.sqrt(value.numel()), name


def test_no_two_tensors_chunks_or_seeds_are_alike() -> None:
    model = tiny(2, ffn=ROWS, vocab=ROWS)
    one, other = whole_weights(model, seed=1), whole_weights(model, seed=2)
    rows = [row for weights in (one, other) for value in weights.values() if value.ndim > 1 for row in value[:, :8]]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
