"""Wherever the tokens lie that count, loss, gradients and norm are those of one process over the whole batch.

Published failures all divided by a count that was only a part: of a micro-batch, of a rank, of one axis (Megatron-LM
7452 findings 3 and 9, torchtitan 2206 and 2366, transformers 34242, torchtune 1875 and 1917, verl 5993).
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from shardwise.collective import Labels
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rules import findings
from shardwise.train.comm import Comm
from shardwise.train.rank import build_rank, gradients
from shardwise.train.threads import run_threads
from tests.support import plain
from tests.support.models import job, tiny
from tests.support.parity import Piece, Tensors, assemble, assert_close, local_data, pieces, whole_weights

torch.set_num_threads(1)

SEQ_LEN, BATCH = 16, 8
MODEL = tiny(3, tied=True)

VALID = {
    "all": (16,) * 8,
    "one token of all": (0, 0, 0, 0, 0, 1, 0, 0),
    "1 against 9": (1, 9) * 4,
    "a data-parallel rank without any": (0, 16) * 4,
    "micro-batches without any": (0, 0, 0, 0, 16, 3, 16, 16),
    "none": (0,) * 8,
}
"""Tokens that count at the start of each sequence. Neighbours lie on different data-parallel ranks, where there are."""

LAYOUTS = (
    "mb=8",
    "mb=1",
    "dp=2 mb=1",
    "dp=4 zero=2 mb=2",
    "dp_replicate=2 dp_shard=2 zero=3 mb=1",
    "tp=2 pp=2 mb=2",
    "pp=4 schedule=zb-h1 mb=1",
    "pp=2 dp=2 zero=1 schedule=zb-v mb=1",
    "pp=2 dp=2 zero=3 schedule=dualpipe mb=1",
)


def data(valid: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, targets) [b, s]"""
    drawn = torch.randint(MODEL.vocab, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(5))
    counts = torch.arange(SEQ_LEN) < torch.tensor(valid)[:, None]
    return drawn[:, :-1].contiguous(), drawn[:, 1:].masked_fill(~counts, -100)


@lru_cache(maxsize=2)
def one_process(valid: tuple[int, ...]) -> tuple[torch.Tensor, Tensors]:
    """Loss and gradients of plain torch; of no token at all they are 0, where torch divides by 0."""
    weights = {name: value.requires_grad_() for name, value in whole_weights(MODEL).items()}
    if not any(valid):
        return torch.zeros((), dtype=torch.float64), {name: torch.zeros_like(value) for name, value in weights.items()}
    loss = plain.loss(MODEL, weights, *data(valid))
    return loss.detach(), dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def sharded(layout: Layout, valid: tuple[int, ...]) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Tensors]:
    """(loss, norm) of each rank, and the gradients."""
    work = job(MODEL, f"{layout.world_size}xcpu", SEQ_LEN, BATCH)
    assert not findings(layout, work)
    ids, targets = data(valid)

    def rank(comm: Comm) -> tuple[tuple[torch.Tensor, torch.Tensor], list[Piece]]:
        built = build_rank(work, layout, comm, Labels())
        result = gradients(built, local_data(work, layout, built, ids), local_data(work, layout, built, targets))
        held = [piece for state in built.states.values() for piece in pieces(state, state.gradient_shard)]
        return (result.loss.clone(), result.norm.clone()), held

    found = run_threads(layout.world_size, rank)
    return [scalars for scalars, _ in found], assemble([held for _, held in found], whole_weights(MODEL))


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("mask", VALID)
def test_loss_and_gradients_do_not_depend_on_where_the_valid_tokens_lie(mask: str, text: str) -> None:
    loss, wanted = one_process(VALID[mask])
    scalars, found = sharded(parse(text), VALID[mask])
    norm = torch.stack([value.square().sum() for value in wanted.values()]).sum().sqrt()
    for rank, (own_loss, own_norm) in enumerate(scalars):
        assert_close(own_loss, loss, f"loss on rank {rank}")
        assert_close(own_norm, norm, f"norm on rank {rank}")
    for name, value in wanted.items():
        assert_close(found[name], value, f"gradient of {name}")


def test_a_mean_of_means_would_be_seen() -> None:
    """Or the masks above would tell nothing apart."""
    valid = VALID["1 against 9"]
    whole, _ = one_process(valid)
    weights, (ids, targets) = whole_weights(MODEL), data(valid)
    means = [plain.loss(MODEL, weights, ids[i : i + 1], targets[i : i + 1]) for i in range(BATCH)]
    assert abs(torch.stack(means).mean() - whole) > 1e-3
