"""Attention's kernels: which one is taken, and what torch's for GPUs is given and gives back, on tensors without data.

Autograd itself needs a driver, so that forward and backward are called as it would.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.collective import Labels
from shardwise.plan.layout import parse
from shardwise.train import attention
from shardwise.train.attention import Scores, kernel_of
from shardwise.train.comm import Comm
from shardwise.train.rank import build_rank
from shardwise.train.threads import run_threads
from tests.support.models import job, tiny

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("device", "dtype", "scores", "wanted"),
    [
        ("cuda", BF16, Scores(64, 128), "flash on a GPU"),
        ("cuda", FP16, Scores(64, 256, scale=0.1), "flash on a GPU"),
        ("cuda", BF16, Scores(64, 8), "flash on a GPU"),
        ("cuda", BF16, Scores(64, 264), "blocked"),
        ("cuda", BF16, Scores(64, 4), "blocked"),
        ("cuda", BF16, Scores(64, 128, window=8), "blocked"),
        ("cuda", BF16, Scores(64, 128, cap=50.0), "blocked"),
        ("cuda", FP32, Scores(64, 128), "blocked"),
        ("cuda", FP64, Scores(64, 128), "blocked"),
        ("cpu", BF16, Scores(64, 128), "flash on a CPU"),
        ("cpu", FP64, Scores(64, 4), "flash on a CPU"),
        ("cpu", FP32, Scores(64, 128, window=8), "blocked"),
        ("cpu", FP32, Scores(64, 128, cap=50.0), "blocked"),
        ("meta", BF16, Scores(64, 128), "flash on a CPU"),
        ("meta", BF16, Scores(64, 128, window=8), "blocked"),
    ],
)
def test_kernels_by_device_dtype_and_form(device: str, dtype: torch.dtype, scores: Scores, wanted: str) -> None:
    assert kernel_of(device, dtype, scores) == wanted


class Context(SimpleNamespace):
    """What autograd hands to a function."""

    saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (3, 1, 256), (6, 2, 24)])
def test_torchs_kernel_for_gpus_has_our_forms(
    heads: int, kv_heads: int, head_dim: int, rotated: bool, dtype: torch.dtype
) -> None:
    """Shapes, dtypes and strides are those of torch's own rules for the operator: 2 sequences of 32."""
    b, s = 2, 32
    scores, tokens = Scores(s, head_dim), b * s
    with FakeTensorMode():
        q, k, v, g = (
            torch.empty(tokens, n * head_dim, dtype=dtype, device="cuda") for n in (heads, kv_heads, kv_heads, heads)
        )
        table = torch.empty(s, 1, head_dim // 2, dtype=dtype, device="cuda")
        ctx: Any = Context()
        o = attention._Attention.forward(ctx, q, k, v, (table, table) if rotated else None, scores)
        made = attention._Attention.backward(ctx, g)
    assert (o.shape, o.dtype, o.device.type, o.is_contiguous()) == (q.shape, dtype, "cuda", True)
    lse = ctx.saved_tensors[4]
    assert [x is y for x, y in zip(ctx.saved_tensors, (q, k, v, o), strict=False)] == [True] * 4
    assert (lse.numel(), lse.dtype) == (tokens * heads, FP32)
    assert len(ctx.saved_tensors) == 5
    assert sum(x.numel() for x in ctx.random) <= 3  # beside what is saved
    assert made[3:] == (None, None)
    for gradient, x in zip(made[:3], (q, k, v), strict=True):
        assert (gradient.shape, gradient.dtype, gradient.device) == (x.shape, dtype, x.device)
        assert gradient.is_contiguous()


@pytest.mark.parametrize("recompute", ["none", "core", "full"])
def test_what_a_kernel_wants_beside_its_sums_reaches_its_backward(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's kernel for GPUs does, here on a CPU; also where the sums alone are made a second time."""
    own = attention._KERNELS["flash on a CPU"]
    seen: list[int] = []

    def forward(*args: Any) -> tuple[torch.Tensor, ...]:
        return *own.forward(*args), torch.tensor([7]), torch.tensor(8)

    def backward(gradient: torch.Tensor, saved: tuple[torch.Tensor, ...], scores: Scores) -> Any:
        *saved_too, seed, offset = saved
        seen.extend((int(seed), int(offset)))
        return own.backward(gradient, tuple(saved_too), scores)

    def gradient(comm: Comm) -> torch.Tensor:
        layout = parse(f"mb=2 recompute={recompute}")
        built = build_rank(job(tiny(2), "1xcpu", precision="bf16"), layout, comm, Labels())
        x = torch.randn(built.executor.shape, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_()
        state = built.states["layers.0"]
        state.zero_gradient()
        y = built.executor.modules["layers.0"].layer(x)
        (made,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return torch.cat((made.flatten().float(), state.gradient_shard))

    (plain,) = run_threads(1, gradient)
    monkeypatch.setitem(attention._KERNELS, "flash on a CPU", attention._Kernel(forward, backward))
    (found,) = run_threads(1, gradient)
    assert seen == [7, 8]
    assert torch.equal(found, plain)
