"""The check that deepseek-ai/DualPipe publishes (examples/example_dualpipe.py at 7cb1e5e), on our units.

One process runs the same micro-batches one after the other, the whole model in one autograd graph. The loss of every
micro-batch is equal bit by bit, and every gradient to 1e-13 by the published measure, 1 - 2 <x, y> / (<x, x> + <y, y>),
in float32 with 20 micro-batches of 3 sequences as published (there on an even number of GPUs), and in float64. Where
each stage is held once, which is everywhere but in DualPipe, gradients are equal bit by bit, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import pytest
import torch

from shardwise.collective import Labels
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rows import lowered_row
from shardwise.schedule.lowering import Instruction
from shardwise.schedule.table import Op
from shardwise.train.comm import Comm
from shardwise.train.optim import report, token_scale
from shardwise.train.pipeline import Data
from shardwise.train.rank import Rank, build_rank
from shardwise.train.threads import run_threads
from tests.dist.pool import run_gloo
from tests.support.models import job, tiny
from tests.support.parity import Piece, Tensors, assemble, batches, pieces

torch.set_num_threads(1)

MICRO_BATCHES, SEQUENCES, SEQ_LEN = 20, 3, 16
ALLOWED = 1e-13


@dataclass(frozen=True)
class Step:
    """One rank's view: `losses` of the micro-batches whose last stage is here; `told` is the step's loss."""

    losses: dict[int, torch.Tensor]
    told: torch.Tensor
    gradients: list[Piece]


def tokens(work: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, targets) [micro-batches, T]"""
    ids, targets = batches(work.model.vocab, SEQ_LEN, work.global_batch, False)[0]
    return ids.view(MICRO_BATCHES, -1), targets.view(MICRO_BATCHES, -1)


def one_process(comm: Comm, work: Job) -> Step:
    """Unit after unit, one backward a micro-batch: no executor, no schedule."""
    rank = build_rank(work, parse(f"mb={SEQUENCES}"), comm, Labels())
    modules, states = rank.executor.modules, rank.states
    leaf = next(iter(states["embedding"].slots.values())).parameter
    ids, targets = tokens(work)
    scale = token_scale(targets, rank.wide, rank.world)
    losses: dict[int, torch.Tensor] = {}
    for mb in range(MICRO_BATCHES):
        x = modules["embedding"].embedding(ids[mb])
        for layer in range(work.model.layers):
            x = modules[f"layers.{layer}"].layer(x)
        loss = modules["head"].head(x, targets[mb], scale)
        losses[mb] = loss.detach()
        torch.autograd.grad(loss, leaf, allow_unused=True)  # the slots take the gradients
    return Step(losses, in_order(losses.values()), gradients_of(rank))


def in_order(losses: Iterable[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, losses)


def pipelined(comm: Comm, work: Job, layout: Layout) -> Step:
    rank = build_rank(work, layout, comm, Labels())
    ids, targets = tokens(work)
    scale = torch.zeros((), dtype=rank.wide)
    if rank.needs_targets:
        scale = token_scale(targets, rank.wide, rank.world)
    row = lowered_row(work.model, layout, MICRO_BATCHES, rank.world.coordinates["pp"])
    losses = rank.executor.run(row, Data(ids, targets, scale))
    order = [x.micro_batch for x in row if isinstance(x, Instruction) and (x.unit, x.do) == ("head", Op.F)]
    told = report(losses, rank.wide, rank.device, rank.world)
    return Step(dict(zip(order, losses, strict=True)), told, gradients_of(rank))


def gradients_of(rank: Rank) -> list[Piece]:
    return [piece for state in rank.states.values() for piece in pieces(state, state.gradient_shard)]


def whole(found: list[Step]) -> Tensors:
    """Gradients by name, from all ranks; copies are bit-equal."""
    held = [step.gradients for step in found]
    shapes = {p.name: p.value.new_empty([cut.stop for cut in p.box]) for rank in held for p in rank}
    return assemble(held, shapes)


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """The published measure: half the squared relative distance, where that is small."""
    x, y = x.double(), y.double()
    return 1 - 2 * (x * y).sum().item() / (x * x + y * y).sum().item()


CASES = [(name, pp, p) for name in ("dualpipe", "dualpipe-v") for pp in (2, 4, 8) for p in ("fp32", "fp64")]
CASES += [(name, 4, "fp32") for name in ("gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-h2", "zb-v")]


@pytest.mark.parametrize(("name", "pp", "precision"), CASES)
def test_losses_are_bit_equal_and_gradients_to_the_published_bound(name: str, pp: int, precision: str) -> None:
    check(run_threads(pp, lambda comm: case(comm, name, pp, precision)), name, pp, precision)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_so_they_are_on_processes(name: str) -> None:
    check(run_gloo(4, "tests.dist.test_dualpipe:case", name, 4, "fp32"), name, 4, "fp32")


def work_of(pp: int, precision: str) -> Job:
    """As many layers as a schedule has stages at most."""
    return job(tiny(2 * pp), f"{pp}xcpu", SEQ_LEN, MICRO_BATCHES * SEQUENCES, precision)


def case(comm: Comm, name: str, pp: int, precision: str) -> Step:
    return pipelined(comm, work_of(pp, precision), parse(f"pp={pp} schedule={name} mb={SEQUENCES}"))


def check(found: list[Step], name: str, pp: int, precision: str) -> None:
    (wanted,) = run_threads(1, lambda comm: one_process(comm, work_of(pp, precision)))
    ends = [step for step in found if step.losses]
    seen = {mb: loss for step in ends for mb, loss in step.losses.items()}
    assert sorted(seen) == sorted(mb for step in ends for mb in step.losses) == list(range(MICRO_BATCHES))
    assert all(torch.equal(seen[mb], loss) for mb, loss in wanted.losses.items())
    # The step's loss: one process's sum, or two partial sums where two ranks end one half of the micro-batches each.
    told = wanted.told if len(ends) == 1 else in_order([in_order(step.losses.values()) for step in ends])
    assert len(ends) == (2 if name == "dualpipe" else 1)
    assert all(torch.equal(step.told, told) for step in found)

    reference, gradients = whole([wanted]), whole(found)
    assert sorted(gradients) == sorted(reference)
    for parameter, gradient in gradients.items():
        assert difference(gradient, reference[parameter]) < ALLOWED, parameter
        assert len(ends) == 2 or torch.equal(gradient, reference[parameter]), parameter


def test_the_measure_sees_small_errors() -> None:
    """A micro-batch left out, or a relative error of 1e-6, is far beyond the bound."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert abs(difference(x, x)) < 1e-15
    assert difference(x, x + 1e-6 * x.flip(0)) > ALLOWED
    assert difference(x, x * (1 - 1 / MICRO_BATCHES)) > ALLOWED
