"""`zero1` on real gloo ranks: bit for bit the optimizer without sharding, and torch's interface whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.train.comm import Comm
from shardwise.train.wrap.zero1 import zero1
from tests.dist.pool import run_gloo

torch.set_num_threads(1)
pytestmark = pytest.mark.dist


def module(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 1)).to(dtype)
    made[3].bias.requires_grad_(False)
    return made


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    p = next(model.parameters())
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step)).to(p.dtype)
    return model(x).square().mean()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


OPTIMIZERS: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "AdamW": lambda make, m: make(m.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.3),
    "fused": lambda make, m: make(m.parameters(), torch.optim.AdamW, lr=0.1, fused=True),
    "foreach": lambda make, m: make(m.parameters(), torch.optim.AdamW, lr=0.1, foreach=True, amsgrad=True),
    "SGD": lambda make, m: make(list(m.parameters()), torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda make, m: make(m.parameters(), torch.optim.Adafactor, lr=0.1),
    "named": lambda make, m: make(m.named_parameters(), torch.optim.Adam, lr=0.1),
    "groups": lambda make, m: make(
        [{"params": m[0].parameters()}, {"params": [*m[2].parameters(), *m[4].parameters()], "lr": 0.01}],
        torch.optim.AdamW,
        lr=0.1,
    ),
}


def plainly(params: Any, kind: type[torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
    return kind(params, **settings)


def steps(comm: Comm) -> None:
    for dtype in (torch.float32, torch.float64):
        steps_of(comm, dtype)


def steps_of(comm: Comm, dtype: torch.dtype) -> None:
    """Every optimizer, with a scheduler, a group added on the way, closures, frozen parameters."""
    calls: list[int] = []
    for name, make in OPTIMIZERS.items():
        calls.clear()
        ours, plain = module(dtype), module(dtype)
        a, b = make(zero1, ours), make(plainly, plain)
        assert isinstance(a, torch.optim.Optimizer)
        assert [set(g) for g in a.param_groups] == [set(g) for g in b.param_groups]
        schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (a, b)]
        for step in range(5):
            if step == 2 and name == "groups":
                for model, optimizer in ((ours, a), (plain, b)):
                    optimizer.add_param_group({"params": model.get_submodule("3").parameters(), "lr": 0.2})
            for model, optimizer in ((ours, a), (plain, b)):

                def closure(model: nn.Module = model, optimizer: Any = optimizer, step: int = step) -> Any:
                    optimizer.zero_grad()
                    assert all(p.grad is None for g in optimizer.param_groups for p in g["params"])
                    loss = loss_of(model, step)
                    loss.backward()
                    calls.append(step)
                    return loss

                if step % 2:
                    closure()
                    assert optimizer.step() is None
                else:
                    assert optimizer.step(closure) is not None
            for schedule in schedules:
                schedule.step()
            assert same(ours, plain), (name, step)
        assert calls == [step for step in range(5) for _ in range(2)]
        held: list[Any] = [None] * comm.world_size
        dist.all_gather_object(held, len(a.state))
        assert sum(held) == len(b.state) and max(held) < len(b.state), name


def test_steps_are_those_of_the_optimizer_to_the_bit() -> None:
    run_gloo(2, "tests.dist.test_wrap_zero1:steps")


def saving(comm: Comm, path: str | None) -> None:
    """A saved state loads into torch's own optimizer and back, then all step alike."""
    first, plain, second = module(), module(), module()
    a = zero1(first.parameters(), torch.optim.AdamW, lr=0.1)
    for step in range(2):
        a.zero_grad()
        loss_of(first, step).backward()
        a.step()
    state = a.state_dict()
    b, c = torch.optim.AdamW(plain.parameters(), lr=0.7), zero1(second.parameters(), torch.optim.AdamW, lr=0.7)
    for model in (plain, second):
        model.load_state_dict(first.state_dict())
    b.load_state_dict(copy.deepcopy(state))  # torch keeps the tensors it is given
    c.load_state_dict(copy.deepcopy(b.state_dict()))
    reached = c.state_dict()
    assert reached["param_groups"] == b.state_dict()["param_groups"] == state["param_groups"]
    assert reached["state"].keys() == state["state"].keys() == b.state_dict()["state"].keys()
    for key, entries in state["state"].items():
        assert all(torch.equal(value, reached["state"][key][k]) for k, value in entries.items())
    for model, optimizer in ((first, a), (plain, b), (second, c)):
        optimizer.zero_grad()
        loss_of(model, 9).backward()
        optimizer.step()
    assert same(first, plain) and same(first, second)
    if comm.rank == 0 and path is not None:
        torch.save((state, module().state_dict()), path)


def resumed(comm: Comm, path: str) -> None:
    """The state of two ranks on another number of ranks."""
    state, _ = torch.load(path)
    ours, plain = module(), module()
    a, b = zero1(ours.parameters(), torch.optim.AdamW, lr=0.7), torch.optim.AdamW(plain.parameters(), lr=0.7)
    for model, optimizer in ((ours, a), (plain, b)):
        optimizer.load_state_dict(copy.deepcopy(state))
        loss_of(model, 3).backward()
        optimizer.step()
    assert same(ours, plain)


def test_state_is_that_of_one_process_and_moves_to_other_world_sizes(tmp_path: Any) -> None:
    path = str(tmp_path / "state.pt")
    run_gloo(2, "tests.dist.test_wrap_zero1:saving", path)
    for n in (1, 3):
        run_gloo(n, "tests.dist.test_wrap_zero1:resumed", path)


def oracle(comm: Comm) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # not above: every rank of every test would import it

    ours, theirs = module(), module()
    a = zero1(ours.parameters(), torch.optim.AdamW, lr=0.1)
    b = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.AdamW, lr=0.1)
    for step in range(3):
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert same(ours, theirs)


def test_equals_torch() -> None:
    run_gloo(2, "tests.dist.test_wrap_zero1:oracle")


def faults(comm: Comm) -> None:
    model = module()
    optimizer = zero1(model.parameters(), torch.optim.AdamW, lr=0.1)
    with pytest.raises(ValueError, match="LBFGS calls its closure several times"):
        zero1(model.parameters(), torch.optim.LBFGS)
    with pytest.raises(ValueError, match="empty parameter list"):
        zero1([], torch.optim.AdamW)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model.parameters()})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    few = zero1([nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=1.0)  # a rank that owns nothing
    few.param_groups[0]["params"][0].grad = torch.ones(1)
    few.step()
    assert few.param_groups[0]["params"][0].item() == 0
    assert few.state_dict()["param_groups"][0]["lr"] == 1.0


def test_faults_are_named() -> None:
    run_gloo(2, "tests.dist.test_wrap_zero1:faults")
    with pytest.raises(RuntimeError, match="init_process_group"):
        zero1([nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=1.0)
