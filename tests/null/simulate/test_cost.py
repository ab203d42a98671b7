"""Kernels against the formulas by hand."""

from __future__ import annotations

import pytest

from shardwise.account.compute import Moved, Product
from shardwise.cluster import parse_cluster
from shardwise.plan.job import JobError
from shardwise.simulate.cost import kernels

DEVICE = parse_cluster("8xh100").device


def test_a_large_product_is_bound_by_flops_and_a_thin_one_by_memory() -> None:
    device = kernels(DEVICE, "bfloat16", 2)
    launch = DEVICE.efficiency.launch_s
    large = device.product_s(Product(8192, 8192, 8192))
    assert large == pytest.approx(2 * 8192**3 / (989e12 * DEVICE.efficiency.matmul) + launch)
    moved = 2 * (16 * 8192 * 2 + 8192**2)
    thin = device.product_s(Product(16, 8192, 8192))
    assert thin == pytest.approx(moved / (3350e9 * DEVICE.efficiency.memory) + launch)
    assert device.moved_s(Moved(0, 3)) == pytest.approx(3 * launch)


def test_misaligned_sizes_are_slower() -> None:
    device = kernels(DEVICE, "bfloat16", 2)
    times = [device.product_s(Product(65536, n, 8192)) for n in (8192, 8200, 8196)]
    assert times == sorted(times) and times[2] > 1.7 * times[0]


def test_a_dtype_without_peak_is_refused() -> None:
    with pytest.raises(JobError, match="h100 has no peak for float64"):
        kernels(DEVICE, "float64", 8)
