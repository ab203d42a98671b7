"""FLOPs against published numbers."""

from __future__ import annotations

import pytest

from shardwise.account.compute import flops_per_token, unit_flops
from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model
from shardwise.model.spec import Cut

pytestmark = pytest.mark.golden

H100 = parse_cluster("8xh100").device.peak_flops["bfloat16"]


@pytest.mark.parametrize(("size", "gflops"), [("8b", 51.47), ("70b", 449.2), ("405b", 2524)])
def test_training_flops_of_a_token(size: str, gflops: float) -> None:
    """Megatron-LM's count (training.py, num_floating_point_operations) with causal attention halved, s = 8192.

    Megatron takes s/2 keys a query, we (s+1)/2: the same to four digits.
    """
    assert flops_per_token(load_model(f"llama-3.1-{size}"), 8192) / 1e9 == pytest.approx(gflops, rel=5e-4)


def test_against_published_throughput() -> None:
    """Llama 3.1 405B on 1,024 H100: 326 tokens/s per GPU and 822 TFLOP/s (NVIDIA Megatron-Bridge, FP8)."""
    flops = flops_per_token(load_model("llama-3.1-405b"), 8192)
    assert 326 * flops == pytest.approx(822e12, rel=2e-3)


@pytest.mark.parametrize(("tflops", "percent"), [(430, 43.5), (400, 40.4), (380, 38.4)])
def test_mfu_of_llama_3(tflops: float, percent: float) -> None:
    """Table 4 of the Llama 3 paper (2407.21783) prints 43, 41 and 38 % of the H100's peak."""
    assert 100 * tflops * 1e12 / H100 == pytest.approx(percent, abs=0.05)


def test_the_head_of_8b_is_two_layers() -> None:
    """2 V h against a layer's 2 (h q + 2 h k + q h + 3 h f) and its attention: 1,050.7 M and 436.2 M + core a token."""
    model, cut = load_model("llama-3.1-8b"), Cut(8192, tp=1, sp=False, compute_bytes=2, accumulate_bytes=4)
    head, layer = (sum(op.f for op in unit_flops(model, kind, cut, 8192)) / 8192 for kind in ("head", "layer"))
    assert head == pytest.approx(1050.7e6, rel=1e-4)
    assert layer - 4 * 4096 * 8193 / 2 == pytest.approx(436.2e6, rel=1e-4)
    assert head / layer == pytest.approx(2.1, abs=0.05)
