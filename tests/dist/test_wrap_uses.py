"""`fsdp` under the ways in which modules are really used, against the same module unwrapped, gradients included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.train.comm import Comm
from shardwise.train.wrap.fsdp import fsdp
from tests.dist.pool import run_gloo
from tests.dist.test_wrap_fsdp import whole_gradients
from tests.dist.test_wrap_models import differences

torch.set_num_threads(1)
pytestmark = pytest.mark.dist

WIDTH = 5


class Inner(nn.Module):
    """A backward inside the forward, while a weight that was read before is held."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.second.weight
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.first(x).sin().sum(), x)
        return F.linear(slope + self.first(x), held)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 1, 7, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def plain(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def two_forwards(model: nn.Module, x: torch.Tensor) -> None:
    (model(x).square().sum() + 2 * model(x.flip(0)).sin().sum()).backward()


def two_backwards(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def evaluation_between(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().sum()
    with torch.no_grad():
        model.eval()(x)
    model.train()
    loss.backward()


def part_alone(model: nn.Module, x: torch.Tensor) -> None:
    next(model.children())(x).square().sum().backward()


def called_by_function(model: nn.Module, x: torch.Tensor) -> None:
    torch.func.functional_call(model, dict(model.named_parameters()), (x,)).square().sum().backward()


def in_autocast(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().sum()
    loss.backward()


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 1, bias=False), nn.Linear(1, 2))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 5, 2), nn.BatchNorm1d(5), nn.Conv1d(5, 2, 1))


LINEARS = (nn.Linear, nn.Embedding)
Use = tuple[Callable[[], nn.Module], tuple[type[nn.Module], ...], Callable[[nn.Module, torch.Tensor], None]]

USES: dict[str, Use] = {
    "a backward inside a forward": (Inner, LINEARS, plain),
    "two forwards, one backward": (sequence, LINEARS, two_forwards),
    "one forward, two backwards": (sequence, LINEARS, two_backwards),
    "an evaluation between forward and backward": (sequence, LINEARS, evaluation_between),
    "a part called alone": (sequence, LINEARS, part_alone),
    "functional_call": (sequence, LINEARS, called_by_function),
    "autocast": (sequence, LINEARS, in_autocast),
    "torch's encoder": (encoder, LINEARS, plain),
    "torch's encoder, a unit a layer": (encoder, (nn.TransformerEncoderLayer,), plain),
    "convolutions": (convolutions, (nn.Conv1d,), plain),
    "a parametrized weight": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        LINEARS,
        plain,
    ),
}


def run(comm: Comm) -> dict[str, float]:
    """Greatest difference of a gradient, and of an output afterwards: every rank has the same samples."""
    found: dict[str, float] = {}
    for name, (make, types, use) in USES.items():
        torch.manual_seed(0)
        theirs = make() if use is in_autocast else make().double()
        ours: Any = fsdp(copy.deepcopy(theirs), None, types)
        x = torch.randn(4, 3, WIDTH, dtype=next(theirs.parameters()).dtype)
        for model in (theirs, ours):
            use(model, x)
        ours.finish_gradient_synchronization()
        wanted = {key: p.grad for key, p in theirs.named_parameters()}
        found[name] = max(differences(whole_gradients(ours), wanted).values())
        with torch.no_grad():
            out = (theirs.eval()(x) - ours.eval()(x)).abs().max().item()
        found[name] = max(found[name], out)
    return found


def test_uses_equal_the_module_unwrapped() -> None:
    for found in run_gloo(2, "tests.dist.test_wrap_uses:run"):
        assert len(found) == len(USES)
        assert max(found.values()) < 1e-12, found


def optimizers(comm: Comm) -> None:
    """Shards without a row step in every implementation."""
    choices: tuple[dict[str, Any], ...] = ({"fused": True}, {"foreach": True}, {"foreach": False})
    for options in choices:
        torch.manual_seed(0)
        theirs = sequence().double()
        ours: Any = fsdp(copy.deepcopy(theirs))
        for model in (theirs, ours):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
            plain(model, torch.ones(2, WIDTH, dtype=torch.float64))
            if model is ours:
                ours.finish_gradient_synchronization()
            optimizer.step()
        assert max(differences(ours.gather_full_state_dict(), dict(theirs.state_dict())).values()) < 1e-12


def test_optimizers_take_shards_without_rows() -> None:
    run_gloo(2, "tests.dist.test_wrap_uses:optimizers")
