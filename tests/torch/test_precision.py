"""bf16 products with fp32 sums: how far the gradients are from float64, beside torch's own bf16."""

from __future__ import annotations

import torch

from shardwise.collective import Labels
from shardwise.plan.layout import parse
from shardwise.train.comm import Comm
from shardwise.train.rank import build_rank, gradients
from shardwise.train.threads import run_threads
from tests.support import plain
from tests.support.models import job, tiny
from tests.support.parity import batches, whole_weights

torch.set_num_threads(1)
MODEL = tiny(3, hidden=64, ffn=96, vocab=128)


def exact() -> dict[str, torch.Tensor]:
    return plain_gradients(torch.float64)


def plain_gradients(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Plain torch's gradients with weights and activations in one dtype."""
    weights = {n: w.to(torch.bfloat16).to(dtype).requires_grad_() for n, w in whole_weights(MODEL).items()}
    ids, targets = batches(MODEL.vocab, 16, 8, False)[0]
    plain.loss(MODEL, weights, ids, targets).backward()
    return {n: w.grad.double() for n, w in weights.items() if w.grad is not None}


def ours(comm: Comm) -> dict[str, torch.Tensor]:
    """The runtime's, from the same weights rounded to bf16."""
    rank = build_rank(job(MODEL, "1xcpu", precision="bf16"), parse("mb=2"), comm, Labels())
    ids, targets = batches(MODEL.vocab, 16, 8, False)[0]
    gradients(rank, ids.view(4, -1), targets.view(4, -1))
    return {
        s.record.name: s.destination().view(s.record.shape).double()
        for state in rank.states.values()
        for s in state.slots.values()
    }


def errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    return {n: float((found[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted}


def test_bf16_gradients_are_as_near_to_float64_as_torchs_own() -> None:
    wanted = exact()
    (found,) = run_threads(1, ours)
    mine, torchs = errors(found, wanted), errors(plain_gradients(torch.bfloat16), wanted)
    assert max(mine.values()) < 0.05
    worse = {n: (mine[n], torchs[n]) for n in mine if mine[n] > 1.25 * torchs[n]}
    assert not worse
