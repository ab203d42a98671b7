"""Every optimizer on shards of any layout against torch's own on whole tensors, and what it keeps against torch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.collective import Labels
from shardwise.plan.layout import parse
from shardwise.plan.optimizer import ADAMW, OPTIMIZERS, OptimizerSpec
from shardwise.plan.settings import TrainSettings
from shardwise.train import optim
from shardwise.train.comm import Comm
from shardwise.train.optim import OptimizerSettings, clip_norm, kernel_of
from shardwise.train.rank import Rank, build_rank
from shardwise.train.threads import run_threads
from tests.support.models import job, tiny
from tests.support.parity import Piece, Tensors, assemble, pieces, torchs, whole_weights
from tests.torch.test_optim import put, whole_gradients

torch.set_num_threads(1)

MODEL = tiny(3, tied=True, hidden=36, ffn=40, vocab=24)
SETTINGS = OptimizerSettings(1e-2, 0.1, 0.5, betas=(0.8, 0.9), eps=1e-6, momentum=0.7)
RATES = (1e-2, 3e-2, 0.0, 5e-3)
"""A rate of its own for each step."""

LAYOUTS = ("mb=1", "tp=2 pp=2 dp=2 zero=1 mb=1", "dp=5 zero=3 mb=1", "dp_replicate=2 dp_shard=2 zero=2 mb=1")
EVERY = [pytest.param(spec, id=spec.name) for spec in OPTIMIZERS.values()]


def built(comm: Comm, spec: OptimizerSpec, text: str) -> Rank:
    layout = parse(text)
    work = replace(job(MODEL, f"{layout.world_size}xcpu", batch=layout.dp), optimizer=spec)
    return build_rank(work, layout, comm, Labels(), settings=SETTINGS)


def whole(spec: OptimizerSpec) -> Tensors:
    """By torch in one process, a tensor at a time."""
    own = {n: w.clone() for n, w in whole_weights(MODEL).items()}
    optimizer = torchs(spec.name, own.values(), SETTINGS)
    for step, rate in enumerate(RATES):
        for name, gradient in whole_gradients(own, step, 10.0).items():
            own[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.nn.utils.clip_grad_norm_(own.values(), SETTINGS.clip_norm)
        optimizer.step()
    return own


def sharded(spec: OptimizerSpec, text: str) -> Tensors:
    """The same by ours."""
    weights = whole_weights(MODEL)

    def rank(comm: Comm) -> list[Piece]:
        one = built(comm, spec, text)
        for step, rate in enumerate(RATES):
            gradients = whole_gradients(weights, step, 10.0)
            for state in one.states.values():
                put(state, gradients, one.layout.tp)
            one.optimizer.set_learning_rate(rate)
            one.optimizer.step(clip_norm(one.states.values(), one.world))
        return [piece for state in one.states.values() for piece in pieces(state, state.master)]

    return assemble(run_threads(parse(text).world_size, rank), weights)


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("spec", EVERY)
def test_updates_equal_torchs_on_whole_tensors(spec: OptimizerSpec, text: str) -> None:
    wanted, start = whole(spec), whole_weights(MODEL)
    for name, value in sharded(spec, text).items():
        assert not torch.equal(value, start[name]), f"{name} has not moved"
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-13, msg=name)


def test_without_its_one_kernel_adamw_is_torchs_foreach(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a type of device that torch has no fused step for; and nowhere else."""
    assert [kernel_of(ADAMW, device) for device in ("cpu", "cuda", "meta", "vulkan")] == [*["fused"] * 3, "foreach"]
    used: list[dict[str, Any]] = []
    torchs_own = torch.optim.AdamW

    def recorded(groups: Any, **settings: Any) -> torch.optim.AdamW:
        used.append(settings)
        return torchs_own(groups, **settings)

    monkeypatch.setattr(torch.optim, "AdamW", recorded)
    monkeypatch.setattr(optim, "kernel_of", lambda spec, device: "foreach")
    found = sharded(ADAMW, "mb=1")
    assert [s.get("foreach") for s in used] == [True]
    monkeypatch.undo()
    for name, value in whole(ADAMW).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-13, msg=name)


@pytest.mark.parametrize("spec", EVERY)
def test_what_it_keeps_is_what_torch_keeps(spec: OptimizerSpec) -> None:
    """The names and the number of the states that the account adds up and a checkpoint carries, by torch's own."""
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    parameter.grad = torch.ones(4, 3)
    optimizer = torchs(spec.name, [parameter])
    optimizer.step()
    state = {name: value for name, value in optimizer.state[parameter].items() if value is not None}
    assert tuple(name for name, value in state.items() if value.shape == parameter.shape) == spec.states
    assert sum(v.numel() * v.element_size() for v in state.values() if v.shape == ()) == spec.counter_bytes


@pytest.mark.parametrize("spec", EVERY)
def test_the_first_step_makes_no_state(spec: OptimizerSpec) -> None:
    """The buffers are there before it: those of the rank, which the account counts and checkpoints read."""

    def rank(comm: Comm) -> None:
        one = built(comm, spec, "mb=1")
        before = {n: (m.data_ptr(), m.clone()) for s in one.states.values() for n, m in s.moments.items()}
        for state in one.states.values():
            state.gradient_shard.fill_(0.1)
        one.optimizer.step(torch.tensor(1.0, dtype=torch.float64))
        after = {n: m for s in one.states.values() for n, m in s.moments.items()}
        assert set(after) == set(spec.states)
        assert all(m.data_ptr() == before[n][0] and not torch.equal(m, before[n][1]) for n, m in after.items())

    run_threads(1, rank)


def test_the_step_count_is_adamws_bias_correction() -> None:
    """A fresh optimizer that is told of three steps goes on as one that has made them."""

    def rank(comm: Comm) -> None:
        first, second = (built(comm, ADAMW, "mb=1") for _ in range(2))
        for step in range(4):
            if step == 3:
                for a, b in zip(first.states.values(), second.states.values(), strict=True):
                    b.master.copy_(a.master)
                    for name, moment in a.moments.items():
                        b.moments[name].copy_(moment)
                second.optimizer.set_steps(3)
            for one in (first, second)[: 1 + (step == 3)]:
                for state in one.states.values():
                    state.gradient_shard.fill_(0.1 * (step + 1))
                one.optimizer.step(torch.tensor(1.0, dtype=torch.float64))
        for a, b in zip(first.states.values(), second.states.values(), strict=True):
            assert torch.equal(a.master, b.master)

    run_threads(1, rank)


def test_the_recipes_numbers_reach_the_optimizer() -> None:
    recipe = TrainSettings(
        learning_rate=0.5, weight_decay=0.25, clip_norm=2.0, beta1=0.1, beta2=0.2, eps=1e-3, momentum=0
    )
    assert OptimizerSettings.of(recipe) == OptimizerSettings(0.5, 0.25, 2.0, (0.1, 0.2), 1e-3, 0)
