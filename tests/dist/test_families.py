"""Every family that runs: gradients against transformers' own autograd, cut and uncut; collectives and peak memory.

Layers without dropout draw no random numbers: what is computed again is held to the same gradients as what is kept.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from shardwise.plan.layout import RECOMPUTED, Layout, parse
from shardwise.prove.dryrun import prove_rank
from shardwise.train.comm import Comm
from shardwise.train.hf_weights import sources
from shardwise.train.rank import gradients
from shardwise.train.threads import run_threads
from tests.support import families
from tests.support.families import CONFIGS, Tensors
from tests.support.parity import Piece, assemble, local_data, pieces

torch.set_num_threads(1)
TOLERANCE = 1e-9
"""of what is at least 1, or of the largest element of a gradient"""

LAYOUTS = (
    "mb=4",
    "tp=2 sp=0 mb=4",
    "tp=2 mb=2",
    "tp=2 pp=2 schedule=zb-h1 mb=1",
    "tp=2 pp=2 dp=2 zero=3 mb=1 recompute=full",
)


@lru_cache(maxsize=2)
def autograd(name: str) -> tuple[Tensors, Tensors, torch.Tensor]:
    """(state dict, gradients by logical name, loss) of transformers' class in float64."""
    config = CONFIGS[name]
    with families.Exact():
        made = families.reference(config, torch.float64)
        ids, targets = families.tokens(config["vocab_size"])
        logits = made(ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    found = {n: p.grad for n, p in made.named_parameters()}
    table = sources(families.model_of(config))
    return made.state_dict(), {n: families.value_of(s, found) for n, s in table.items()}, loss.detach()


def check_gradients(name: str, layout: Layout, tolerance: float) -> None:
    state, wanted, loss = autograd(name)
    work = families.job_of(CONFIGS[name], layout, "fp64")
    ids, targets = families.tokens(work.model.vocab)

    def rank(comm: Comm) -> tuple[torch.Tensor, list[Piece]]:
        built = families.runtime(work, layout, comm, state)
        mine = [local_data(work, layout, built, x) for x in (ids, targets)]
        result = gradients(built, mine[0], mine[1])
        return result.loss.clone(), [p for s in built.states.values() for p in pieces(s, s.gradient_shard)]

    traces = run_threads(layout.world_size, rank)
    assert all(abs(found - loss) <= tolerance for found, _ in traces)
    found = assemble([held for _, held in traces], wanted)
    errors = {n: float((found[n] - g).abs().max() / g.abs().max().clamp(min=1)) for n, g in wanted.items()}
    assert not {n: e for n, e in errors.items() if e > tolerance}


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("name", families.named())
def test_gradients_equal_transformers_autograd(name: str, text: str) -> None:
    check_gradients(name, parse(text), TOLERANCE)


PROVED = (
    "mb=2",
    "mb=1 recompute=full",
    "tp=2 sp=0 mb=2",
    "tp=2 mb=2",
    "tp=2 pp=2 schedule=zb-h1 mb=1",
    "tp=2 dp=2 zero=3 mb=1 recompute=full",
)


def check_proof(name: str, layout: Layout, precision: str) -> None:
    work = families.job_of(CONFIGS[name], layout, precision)
    for rank in sorted({0, layout.world_size - 1}):
        proof = prove_rank(work, layout, rank, tensors="real")
        assert not proof.differences()
        assert abs(proof.memory_error) <= 0.001, (
            f"rank {rank}: peak predicted {proof.predicted_peak_bytes}, measured {proof.measured_peak_bytes}"
        )


@pytest.mark.parametrize("text", PROVED)
@pytest.mark.parametrize("name", families.named())
def test_collectives_and_peak_are_as_planned(name: str, text: str) -> None:
    """In two precisions, in turn."""
    turn = list(CONFIGS).index(name) + PROVED.index(text)
    check_proof(name, parse(text), ("fp64", "bf16")[turn % 2])


SETS = [",".join(some) for n in range(1, len(RECOMPUTED) + 1) for some in combinations(RECOMPUTED, n)]
"""Every set of what can be computed again by itself."""

AGAIN = ("mb=2", "tp=2 sp=0 mb=2", "tp=2 pp=2 schedule=zb-h1 mb=1", "tp=2 dp=2 zero=3 mb=1")
"""One for each family and set, in turn: each set meets all of them."""


@pytest.mark.parametrize("recompute", SETS)
@pytest.mark.parametrize("name", families.named())
def test_what_is_computed_again_is_the_same_and_is_as_planned(name: str, recompute: str) -> None:
    """Norms of queries and keys and behind sublayers, soft caps and windows inside the core, every activation."""
    turn = list(CONFIGS).index(name) + SETS.index(recompute)
    layout = parse(f"{AGAIN[turn % len(AGAIN)]} recompute={recompute}")
    check_gradients(name, layout, 1e-10)
    check_proof(name, layout, ("fp64", "bf16")[turn // len(AGAIN) % 2])
