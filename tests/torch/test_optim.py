"""Optimizer and clip norm on shards of any layout, against torch's own on whole tensors."""

from __future__ import annotations

import pytest
import torch

from shardwise.collective import Labels
from shardwise.model.spec import Model
from shardwise.plan.layout import parse
from shardwise.plan.rules import findings
from shardwise.train.comm import Comm
from shardwise.train.optim import OptimizerSettings, clip_norm
from shardwise.train.rank import build_rank
from shardwise.train.threads import run_threads
from shardwise.train.unit import UnitState
from shardwise.train.weights import shard_blocks
from tests.support.models import job, tiny
from tests.support.parity import Piece, Tensors, assemble, pieces, torchs, whole_weights

torch.set_num_threads(1)

STEPS = 4
LAYOUTS = (
    "mb=1",
    "tp=2 sp=0 mb=1",
    "tp=4 mb=1",
    "dp=4 mb=1",
    "dp=3 zero=1 mb=1",
    "dp=5 zero=3 mb=1",
    "dp_replicate=2 dp_shard=2 zero=3 mb=1",
    "pp=4 mb=1",
    "tp=2 pp=2 dp=2 zero=1 mb=1",
    "pp=2 dp=2 zero=3 schedule=interleaved:2 mb=1",
)


def whole_gradients(weights: Tensors, step: int, scale: float) -> Tensors:
    """A gradient by name: the same whatever the layout."""
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(w.shape, dtype=w.dtype, generator=generator).mul_(scale) for n, w in weights.items()}


def put(state: UnitState, gradients: Tensors, tp: int) -> None:
    """Write this rank's part of whole gradients, as the reductions of a step leave it. Padding stays as it is."""
    index = state.world.index("tp")
    for r in state.storage.records:
        value = gradients[r.name]
        mine = value if r.tp_dim is None else value.chunk(tp, r.tp_dim)[index]
        padded = mine.new_zeros(state.storage.shards, r.shard_numel)
        for part, parts in shard_blocks(r, mine, padded):
            parts.copy_(part)
        state.gradient_shard[r.offset : r.offset + r.shard_numel] = padded[state.index]


def unfused(weights: Tensors, settings: OptimizerSettings, scale: float) -> tuple[list[torch.Tensor], Tensors]:
    """(norms, parameters at the end) of torch's clipping and plain AdamW."""
    own = {n: w.clone() for n, w in weights.items()}
    adamw = torchs("adamw", own.values(), settings)
    norms: list[torch.Tensor] = []
    for step in range(STEPS):
        for name, gradient in whole_gradients(weights, step, scale).items():
            own[name].grad = gradient
        norms.append(torch.nn.utils.clip_grad_norm_(own.values(), settings.clip_norm))
        adamw.step()
    return norms, own


def sharded(model: Model, text: str, settings: OptimizerSettings, scale: float) -> tuple[list[torch.Tensor], Tensors]:
    """The same by ours; norms are asserted equal on all ranks."""
    layout, weights = parse(text), whole_weights(model)
    work = job(model, f"{layout.world_size}xcpu", batch=layout.dp)
    assert not findings(layout, work)

    def rank(comm: Comm) -> tuple[list[torch.Tensor], list[Piece]]:
        built = build_rank(work, layout, comm, Labels(), settings=settings)
        norms: list[torch.Tensor] = []
        for step in range(STEPS):
            gradients = whole_gradients(weights, step, scale)
            for state in built.states.values():
                put(state, gradients, layout.tp)
            norms.append(clip_norm(built.states.values(), built.world))
            built.optimizer.step(norms[-1])
        for state in built.states.values():
            assert_used_weights_follow(state)
        return norms, [piece for state in built.states.values() for piece in pieces(state, state.master)]

    found = run_threads(layout.world_size, rank)
    for norms, _ in found:
        assert all(map(torch.equal, norms, found[0][0]))
    return found[0][0], assemble([held for _, held in found], weights)


def assert_used_weights_follow(state: UnitState) -> None:
    """Where weights are kept beside the master, this rank's rows of them equal it."""
    if state.weights is None:
        return
    for r in state.storage.records:
        padded = state.master.new_zeros(state.storage.shards, r.shard_numel)
        for part, parts in shard_blocks(r, state.slots[r.name].parameter.detach(), padded):
            parts.copy_(part)
        assert torch.equal(padded[state.index], state.master[r.offset : r.offset + r.shard_numel]), r.name


@pytest.mark.parametrize("scale", [10.0, 1e-4], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("text", LAYOUTS)
def test_norm_and_adamw_equal_torchs_on_whole_tensors(text: str, tied: bool, scale: float) -> None:
    """Sharded, replicated and tied parameters, padded rows, some ranks with no row of some parameters."""
    model, settings = (
        tiny(3, tied, hidden=36, ffn=40, vocab=24),
        OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5),
    )
    norms, parameters = sharded(model, text, settings, scale)
    wanted_norms, wanted = unfused(whole_weights(model), settings, scale)
    torch.testing.assert_close(norms, wanted_norms, rtol=1e-13, atol=0)
    assert (wanted_norms[0] > settings.clip_norm) == (scale > 1)
    for name, value in parameters.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-13, msg=name)
