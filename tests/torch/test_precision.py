"""bf16 products with fp32 sums: how far the gradients are from float64, beside torch's own bf16."""

from __future__ import annotations

import pytest
import torch

from shardwise.collective import Labels
from shardwise.plan.layout import parse
from shardwise.train.comm import Comm
from shardwise.train.rank import build_rank, gradients
from shardwise.train.threads import run_threads
from tests.support import plain
from tests.support.models import job, tiny
from tests.support.parity import assemble, batches, run_rank, whole_weights

torch.set_num_threads(1)
MODEL = tiny(3, hidden=64, ffn=96, vocab=128)


def exact_of(rounded: torch.dtype) -> dict[str, torch.Tensor]:
    """float64 gradients at weights that were rounded so."""
    return plain_gradients(torch.float64, rounded)


def plain_gradients(dtype: torch.dtype, rounded: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Plain torch's gradients with weights and activations in one dtype."""
    weights = {n: w.to(rounded).to(dtype).requires_grad_() for n, w in whole_weights(MODEL).items()}
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


LAYOUTS = (
    "tp=4 mb=2",
    "pp=2 dp=2 zero=3 schedule=zb-h1 mb=1",
    "dp=4 zero=1 mb=1 recompute=full",
    "tp=2 pp=2 dp=2 mb=1",
)


def cut_run(text: str, precision: str) -> dict[str, torch.Tensor]:
    """Whole gradients of a layout's first step on threads, as its ranks' pieces make them up."""
    layout = parse(text)
    work = job(MODEL, f"{layout.world_size}xcpu", precision=precision)
    traces = run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, False))
    return {n: g.double() for n, g in assemble([t.gradients[0] for t in traces], like(precision)).items()}


def like(precision: str) -> dict[str, torch.Tensor]:
    wide = {"fp32": torch.float32, "bf16": torch.float32}[precision]
    return {n: w.to(wide) for n, w in whole_weights(MODEL).items()}


@pytest.mark.parametrize("text", LAYOUTS)
def test_cut_runs_are_as_exact_as_their_dtype(text: str) -> None:
    """fp32: to its rounding. bf16: as a whole no further from float64 than one bf16 process, up to a quarter.

    A single weight may be up to twice as far: partial products are rounded before they are summed over tp.
    """
    wanted = exact_of(torch.float64)
    assert max(errors(cut_run(text, "fp32"), wanted).values()) < 5e-6
    one = errors(cut_run("mb=2", "bf16"), exact_of(torch.bfloat16))
    cut = errors(cut_run(text, "bf16"), exact_of(torch.bfloat16))
    assert sum(cut.values()) <= 1.25 * sum(one.values())
    assert not {n: (cut[n], one[n]) for n in cut if cut[n] > 2 * one[n]}


def test_bf16_gradients_are_as_near_to_float64_as_torchs_own() -> None:
    wanted = exact_of(torch.bfloat16)
    (found,) = run_threads(1, ours)
    mine, torchs = errors(found, wanted), errors(plain_gradients(torch.bfloat16), wanted)
    assert max(mine.values()) < 0.05
    worse = {n: (mine[n], torchs[n]) for n in mine if mine[n] > 1.25 * torchs[n]}
    assert not worse
