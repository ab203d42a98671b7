"""FLOPs against published numbers."""

from __future__ import annotations

import pytest

from shardwise.account.compute import flops_per_token
from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model

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
