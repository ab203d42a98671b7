"""Modules for the tests of the wrappers, and the one-process run that they are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, HIDDEN, BATCH, STEPS = 7, 5, 4, 3
"""Odd on purpose: no row count is divided by 2."""


class Plain(nn.Module):
    """Two sharded kinds, a norm that stays whole, a bias, an output with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, 9)
        self.norm = nn.LayerNorm(9)
        self.down = nn.Linear(9, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        return self.head(x + self.down(torch.tanh(self.norm(self.up(x)))))


class Tied(Plain):
    """The head is the embedding's weight: one parameter, two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.emb.weight


class Direct(Plain):
    """The head reads the embedding's weight itself."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        return F.linear(x + self.down(torch.tanh(self.up(x))), self.emb.weight)


class Twice(Plain):
    """One module runs three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for _ in range(3):
            x = torch.tanh(self.down(x))
        return self.head(x)


class Recomputed(Twice):
    """Two checkpointed parts that share a module."""

    reentrant = False

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(torch.tanh(self.norm(self.up(x)))[..., :HIDDEN]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: Any = self.emb(ids)
        for _ in range(2):
            x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.head(x)


class Reentrant(Recomputed):
    reentrant = True


class Attention(Plain):
    """MultiheadAttention reads the weight of its inner Linear without calling it."""

    def __init__(self) -> None:
        super().__init__()
        # Without a bias: the keys' has no gradient but rounding, which AdamW would blow up.
        self.attention = nn.MultiheadAttention(HIDDEN, 1, bias=False, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


class Frozen(Plain):
    """A frozen matrix between trained ones, a frozen norm, a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        for p in (self.up.weight, self.norm.weight, self.head.bias):
            p.requires_grad_(False)


class Unused(Plain):
    """A module that no forward reaches, and one that only some ranks reach."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor, through: bool = True) -> torch.Tensor:
        x = self.emb(ids)
        return self.head(torch.tanh(self.norm(self.up(x))) @ self.down.weight.T if through else x)


MODELS: dict[str, type[Plain]] = {
    kind.__name__: kind for kind in (Plain, Tied, Direct, Twice, Recomputed, Reentrant, Attention, Frozen, Unused)
}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Plain:
    """The model; ranks that pass their own seed hold different weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]().to(dtype)


def batches(world_size: int, steps: int = STEPS) -> torch.Tensor:
    """ids [steps, world_size * BATCH, 3]"""
    return torch.randint(VOCAB, (steps, world_size * BATCH, 3), generator=torch.Generator().manual_seed(1))


def loss_of(model: Callable[..., torch.Tensor], ids: torch.Tensor, **options: Any) -> torch.Tensor:
    out = model(ids, **options)
    return (torch.sin(out).square() + out).mean()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def reference(name: str, world_size: int, dtype: torch.dtype = torch.float64) -> list[dict[str, Any]]:
    """Of each step of one process on all samples: gradients and, after AdamW, parameters, by name."""
    model = build(name, dtype=dtype)
    optimizer = adamw(model.parameters())
    found: list[dict[str, Any]] = []
    for ids in batches(world_size):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        found.append({"grads": grads, "values": {n: p.detach().clone() for n, p in model.named_parameters()}})
    return found


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Name -> greatest difference of two tensors; infinite where one of them is missing or has another shape."""
    result: dict[str, float] = {}
    for name in found.keys() | wanted.keys():
        a, b = found.get(name), wanted.get(name)
        if a is None or b is None or a.shape != b.shape:
            result[name] = 0.0 if a is b else float("inf")
        else:
            result[name] = (a - b).abs().max().item() if a.numel() else 0.0
    return result


def test_differences_see_a_wrong_and_a_missing_gradient() -> None:
    steps = reference("Plain", 2)
    wrong = {**steps[0]["grads"], "up.bias": steps[0]["grads"]["up.bias"] * 1.001, "head.bias": None}
    found = differences(wrong, steps[0]["grads"])
    assert found["up.bias"] > 1e-9 and found["head.bias"] == float("inf") and found["emb.weight"] == 0
