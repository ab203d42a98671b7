"""Collectives against the formulas by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import Cluster, parse_cluster
from shardwise.collective import Kind
from shardwise.simulate.network import collective_s, links, pair_s, transfer_s

CLUSTER = parse_cluster("64x8xh100")
NVLINK, NETWORK = CLUSTER.levels


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


ALL = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL)
CLUSTERS = (
    "64x8xh100",
    "12x8xa100",
    "4x72xgb200",
    "8x8xmi300x",
    "v5p:4x4x8",
    "v5e:8x16",
    "4xv5p:4x4x4",
    "96xC=1e15,W=1e11,M=8e10",
)


def groups_of(cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """(strides, sizes) of every group of a mesh with two or three axes."""
    world = cluster.world_size
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    pairs = [(s, n) for s in divisors for n in divisors if world // s % n == 0]
    strides, sizes = zip(*pairs, strict=True)
    return np.array(strides), np.array(sizes)


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("kind", ALL)
def test_laws(name: str, kind: Kind) -> None:
    """More bytes take no less time, alone costs nothing, many at once are as one by one, nothing beats the wires."""
    cluster = parse_cluster(name)
    strides, sizes = groups_of(cluster)
    group = links(cluster, (strides, sizes))
    seconds = np.stack([collective_s(kind, payload, group) for payload in (0, 8, 1e3, 1e6, 1e9, 1e12)])
    assert np.isfinite(seconds).all() and (seconds >= 0).all()
    assert (np.diff(seconds, axis=0) >= 0).all()
    assert (seconds[:, sizes == 1] == 0).all() and (seconds[-1, sizes > 1] > 0).all()
    for i in range(0, len(sizes), 7):
        one = links(cluster, (int(strides[i]), int(sizes[i])))
        assert float(collective_s(kind, 1e6, one)) == pytest.approx(float(seconds[3, i]), rel=1e-12)


@pytest.mark.parametrize("name", CLUSTERS)
def test_an_all_reduce_is_no_slower_than_scattering_and_gathering(name: str) -> None:
    cluster = parse_cluster(name)
    group = links(cluster, groups_of(cluster))
    for payload in (1e3, 1e6, 1e9):
        both = collective_s(Kind.REDUCE_SCATTER, payload, group) + collective_s(Kind.ALL_GATHER, payload, group)
        assert (collective_s(Kind.ALL_REDUCE, payload, group) <= both * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", ["v5p:4x4x8", "4xv5p:4x4x4", "64x8xh100"])
def test_factors_that_continue_each_other_are_one(name: str) -> None:
    cluster = parse_cluster(name)
    for kind in ALL:
        apart = collective_s(kind, 1e8, links(cluster, (1, 4), (4, 4), (16, 4)))
        assert float(apart) == pytest.approx(float(collective_s(kind, 1e8, links(cluster, (1, 64)))))


def test_factors_apart_bring_the_cards_of_all_their_members() -> None:
    """tp stays out: two axes that do not touch, two members in each of four nodes."""
    seconds = collective_s(Kind.ALL_GATHER, 1e10, links(CLUSTER, (1, 2), (16, 4)))
    assert float(seconds) == pytest.approx(7 / 8 * 1e10 / 100e9, rel=1e-3)


def test_one_level_after_the_other() -> None:
    """4 nodes of 2 members whose cards are slow: 2 (g-1)/g S/B inside and 2 (N-1)/N (S/g)/B between, fewer hops."""
    fast, slow = replace(NVLINK, in_network_reduction_efficiency=0), replace(NETWORK, bandwidth_GBps_per_device=5)
    cluster = replace(CLUSTER, levels=(fast, slow))
    payload = 1e9
    between = 2 * 3 / 4 * payload / 2 / 5e9 + 2 * 3 * NETWORK.latency_s
    expected = 2 * 1 / 2 * payload / 370e9 + 2 * NVLINK.latency_s + between
    assert collective_s(Kind.ALL_REDUCE, payload, links(cluster, (4, 8))) == pytest.approx(expected)
    uneven = links(replace(cluster, nodes=48, levels=(fast, replace(slow, size=384))), (1, 12))  # 8 and 4 in a node
    ring = 2 * 11 / 12 * payload / 20e9
    assert float(collective_s(Kind.ALL_REDUCE, payload, uneven)) == pytest.approx(ring, rel=2e-3)


def test_a_switch_that_adds() -> None:
    """Only the level that says so, and only where it is faster: not for two ranks, not for a few bytes."""
    plain = replace(CLUSTER, levels=(replace(NVLINK, in_network_reduction_efficiency=0), NETWORK))
    for size, payload, adds in [(8, 1e9, True), (2, 1e9, False), (2, 8, False), (8, 8, True)]:
        with_it, without = (
            float(collective_s(Kind.ALL_REDUCE, payload, links(cluster, (1, size)))) for cluster in (CLUSTER, plain)
        )
        assert (with_it < without) == adds
    gathers = (collective_s(Kind.ALL_GATHER, 1e9, links(cluster, (1, 8))) for cluster in (CLUSTER, plain))
    assert len(set(map(float, gathers))) == 1


def test_a_network_that_adds() -> None:
    """SHARP between 64 nodes, one member in each; and with eight in each, behind what adds inside."""
    sharp = replace(CLUSTER, levels=(NVLINK, replace(NETWORK, in_network_reduction_efficiency=0.9)))
    one = collective_s(Kind.ALL_REDUCE, 1e9, links(sharp, (8, 64)))
    assert float(one) == pytest.approx(25e-6 + 1e9 / (0.9 * 50e9))
    eight = collective_s(Kind.ALL_REDUCE, 1e9, links(sharp, (1, 512)))
    both = 25e-6 + 1e9 / (0.74 * 370e9) + 25e-6 + 1e9 / 8 / (0.9 * 50e9)
    tree = float(collective_s(Kind.ALL_REDUCE, 1e9, links(CLUSTER, (1, 512))))
    assert float(eight) == pytest.approx(min(both, tree))


def test_an_all_to_all_over_nodes_is_bound_by_each_ranks_own_card() -> None:
    """A ring brings 370 GB/s over eight cards; here (n-m)/n of what each rank has leaves over its own 50."""
    payload = 1e9
    wide = collective_s(Kind.ALL_TO_ALL, payload, links(CLUSTER, (1, 64)))
    assert float(wide) == pytest.approx(56 / 64 * payload / 50e9 + 56 * NVLINK.latency_s + 7 * NETWORK.latency_s)
    apart = collective_s(Kind.ALL_TO_ALL, payload, links(CLUSTER, (8, 8)))
    assert float(apart) == pytest.approx(7 / 8 * payload / 50e9 + 7 * NETWORK.latency_s)


def test_a_full_mesh_gives_as_many_links_as_peers() -> None:
    """Two of eight MI300X have one link of their own between them, all eight have seven each."""
    cluster = parse_cluster("2x8xmi300x")
    for size in (2, 4, 8):
        seconds = collective_s(Kind.ALL_GATHER, 1e12, links(cluster, (1, size)))
        assert float(seconds) == pytest.approx((size - 1) / size * 1e12 / ((size - 1) * 48e9), rel=1e-4)
    across = collective_s(Kind.ALL_GATHER, 1e12, links(cluster, (8, 2)))
    assert float(across) == pytest.approx(1e12 / 2 / 50e9, rel=1e-4)


def test_oversubscription_divides_what_crosses() -> None:
    """1 to 7 above 3,072 devices (Llama 3's pods): a group with one member in each pod has a seventh of a card."""
    pod, spine = replace(NETWORK, size=3072), replace(NETWORK, size=24576, oversubscription=7)
    cluster = replace(CLUSTER, nodes=3072, levels=(NVLINK, pod, spine))
    one = collective_s(Kind.ALL_GATHER, 1e12, links(cluster, (3072, 8)))
    assert float(one) == pytest.approx(7 / 8 * 1e12 / (50e9 / 7), rel=1e-3)
    within = collective_s(Kind.ALL_GATHER, 1e12, links(cluster, (8, 384)))
    assert float(within) == pytest.approx(383 / 384 * 1e12 / 50e9, rel=1e-3)
    # Eight pods' worth of members under each spine port: the cards are the narrow place again.
    everywhere = collective_s(Kind.ALL_GATHER, 1e12, links(cluster, (8, 3072)))
    assert float(everywhere) == pytest.approx(1e12 / 50e9, rel=0.01)
    exchange = collective_s(Kind.ALL_TO_ALL, 1e9, links(cluster, (8, 3072)))
    assert float(exchange) > 0.8 * 7 * 1e9 / 50e9  # but what crosses has only a seventh


def test_slices_reduce_one_level_after_the_other() -> None:
    """Inside 4x4x4 over six links, then a 64th of it over each chip's 6.25 GB/s, and back."""
    cluster = parse_cluster("2xv5p:4x4x4")
    inside, between = 1e10 / (6 * 90e9), 1 / 2 * 1e10 / 64 / 6.25e9 + 50e-6
    gather = collective_s(Kind.ALL_GATHER, 1e10, links(cluster, (1, 128)))
    assert float(gather) == pytest.approx(inside + between)
    reduce = collective_s(Kind.ALL_REDUCE, 1e10, links(cluster, (1, 128)))
    assert float(reduce) == pytest.approx(2 * (inside + between))


def test_messages_on_a_torus() -> None:
    """A stage of a plane sends over 16 x 20 links at once; half a row has half of its hops to share."""
    cluster = parse_cluster("v5p:16x20x28")
    plane = 1e9 / 90e9
    assert float(transfer_s(cluster, 1e9, 560, 16)) == pytest.approx(plane)
    assert float(transfer_s(cluster, 1e9, 14, 2)) == pytest.approx(14 * plane)
    assert pair_s(cluster, 1e9, 0, 1, 560) == pair_s(cluster, 1e9, 15, 0, 560) == pytest.approx(plane)
    both = transfer_s(parse_cluster("2xv5p:16x20x28"), 1e9, np.array([560, 560]), np.array([16, 32]))
    assert both == pytest.approx([plane, 1e9 / 6.25e9], rel=1e-3)
    assert float(transfer_s(cluster, 1e9, 8960, 1)) == 0


@given(st.sampled_from(CLUSTERS), st.data())
@settings(deadline=None)
def test_no_pair_of_stages_is_slower_than_the_slowest_border(name: str, data: st.DataObject) -> None:
    cluster = parse_cluster(name)
    divisors = [d for d in range(2, cluster.world_size + 1) if cluster.world_size % d == 0]
    pp = data.draw(st.sampled_from(divisors))
    stride = cluster.world_size // pp
    slowest = float(transfer_s(cluster, 1e8, stride, pp))
    pairs = [pair_s(cluster, 1e8, s, s + 1, stride) for s in range(min(pp - 1, 40))]
    assert max(pairs) <= slowest * (1 + 1e-12)
    if pp <= 41:
        assert max(pairs) == pytest.approx(slowest)


def test_a_group_over_two_half_nodes_has_the_cards_of_its_worst_half() -> None:
    """Groups of sixteen on nodes of twelve start at 0, 16 and 32: 12 + 4, 8 + 8 and 4 + 12 of them."""
    base = parse_cluster("2x8xh100")
    cluster = replace(base, nodes=4, devices_per_node=12, levels=(replace(NVLINK, size=12), replace(NETWORK, size=48)))
    seconds = collective_s(Kind.ALL_GATHER, 1e12, links(cluster, (1, 16)))
    assert float(seconds) == pytest.approx(15 / 16 * 1e12 / (4 * 50e9), rel=1e-3)
    mesh = replace(cluster, levels=(replace(parse_cluster("8xmi300x").levels[0], size=12), cluster.levels[1]))
    three = collective_s(Kind.ALL_GATHER, 1e12, links(mesh, (4, 4)))  # 0 4 8 | 12: one link between three
    assert float(three) == pytest.approx(3 / 4 * 1e12 / 48e9, rel=1e-3)


def test_a_message_crosses_only_the_levels_between_its_stages() -> None:
    """Whole racks on a fast ring of their own above a slow network inside: stages of a rack never use the latter."""
    rack, ring = replace(NETWORK, size=64, bandwidth_GBps_per_device=5), replace(NETWORK, size=512)
    cluster = replace(CLUSTER, levels=(NVLINK, rack, ring))
    slow, fast = (1e9 / level.bytes_per_s + level.latency_s for level in (rack, ring))
    assert transfer_s(cluster, 1e9, np.array([8, 16, 64, 128]), 4) == pytest.approx([slow, slow, fast, fast])
