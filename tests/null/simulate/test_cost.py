"""Kernels and collectives against the formulas by hand."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.account.compute import Moved, Product
from shardwise.cluster import parse_cluster
from shardwise.collective import Kind
from shardwise.plan.job import JobError
from shardwise.simulate.cost import collective_s, kernels, links, pair_s, transfer_s

CLUSTER = parse_cluster("64x8xh100")
DEVICE = CLUSTER.device
NVLINK, NETWORK = CLUSTER.levels


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


def test_rings() -> None:
    """Inside a node 7 hops and 7/8 of the payload; over 16 nodes of 8, 15 of the 127 hops cross the network."""
    payload = 1e9
    inside = links(CLUSTER, (1, 8))
    assert collective_s(Kind.ALL_GATHER, payload, inside) == pytest.approx(7 * 3.4e-6 + 7 / 8 * payload / 370e9)
    wide = links(CLUSTER, (1, 128))
    expected = 112 * NVLINK.latency_s + 15 * NETWORK.latency_s + 127 / 128 * payload / 370e9
    assert collective_s(Kind.REDUCE_SCATTER, payload, wide) == pytest.approx(expected)
    one_per_node = links(CLUSTER, (8, 16))
    expected = 15 * NETWORK.latency_s + 15 / 16 * payload / 50e9
    assert collective_s(Kind.ALL_GATHER, payload, one_per_node) == pytest.approx(expected)
    assert collective_s(Kind.ALL_REDUCE, payload, one_per_node) == pytest.approx(2 * expected)


def test_an_all_to_all_sends_all_but_its_own_part() -> None:
    expected = 7 * NVLINK.latency_s + 7 / 8 * 1e9 / 370e9
    assert collective_s(Kind.ALL_TO_ALL, 1e9, links(CLUSTER, (1, 8))) == pytest.approx(expected)


def test_a_scalar_goes_up_a_tree() -> None:
    """7 hops in the node and log2 of 64 nodes, up and down: microseconds, where a ring needs milliseconds."""
    tree = 2 * (7 * NVLINK.latency_s + 6 * NETWORK.latency_s)
    assert collective_s(Kind.ALL_REDUCE, 4, links(CLUSTER, (1, 512))) == pytest.approx(tree, rel=1e-3)


def test_a_nested_group_touches_the_product_of_its_nodes() -> None:
    nested, flat = links(CLUSTER, (1, 64), (128, 4)), links(CLUSTER, (1, 256))
    assert (int(nested.size), float(nested.ring_s)) == (256, float(flat.ring_s))


def test_a_group_of_one_costs_nothing() -> None:
    alone = links(CLUSTER, (np.array([1, 8]), 1))
    for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL):
        assert collective_s(kind, 1e9, alone) == pytest.approx([0.0, 0.0])


def test_messages_cross_the_network_only_between_nodes() -> None:
    near, far = (1e6 / level.bytes_per_s + level.latency_s for level in CLUSTER.levels)
    assert pair_s(CLUSTER, 1e6, 0, 1, stride=4) == pytest.approx(near)
    assert pair_s(CLUSTER, 1e6, 1, 2, stride=4) == pytest.approx(far)
    assert pair_s(CLUSTER, 1e6, 1, 0, stride=4) == pytest.approx(near)
    assert pair_s(CLUSTER, 1e6, 0, 1, stride=16) == pytest.approx(far)
    assert transfer_s(CLUSTER, 1e6, np.array([4, 4, 64]), np.array([2, 4, 8])) == pytest.approx([near, far, far])
    assert transfer_s(CLUSTER, 1e6, 512, 1) == 0
