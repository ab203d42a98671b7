from __future__ import annotations

import itertools
from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import Cluster, Level, bandwidth, bandwidths, group_placement, level_of_group, parse_cluster

H100 = parse_cluster("2048x8xh100")
GBPS = 1e9


def enumerated(degrees: tuple[int, ...], axes: tuple[int, ...], per_node: int) -> tuple[int, int]:
    """(fewest members in a node, most nodes) over all groups of a mesh along `axes`, rank by rank; axis 0 innermost."""
    strides = [prod(degrees[:i]) for i in range(len(degrees))]
    groups: dict[tuple[int, ...], Counter[int]] = {}
    for coordinates in itertools.product(*map(range, degrees)):
        rank = sum(c * stride for c, stride in zip(coordinates, strides, strict=True))
        others = tuple(c for i, c in enumerate(coordinates) if i not in axes)
        groups.setdefault(others, Counter())[rank // per_node] += 1
    return min(min(nodes.values()) for nodes in groups.values()), max(map(len, groups.values()))


@pytest.mark.parametrize(
    ("stride", "size", "members", "nodes"),
    [
        (1, 1, 1, 1),
        (1, 8, 8, 1),  # tp=8
        (2, 4, 4, 1),
        (1, 16, 8, 2),
        (4, 4, 2, 2),
        (8, 64, 1, 64),  # dp beside tp=8: one card each
        (1, 512, 8, 64),  # ZeRO-3 over everything
        (128, 16, 1, 16),
        (12, 4, 1, 4),
        (1, 3, 1, 2),  # some groups of three straddle two nodes
        (3, 4, 1, 2),  # ranks 7, 10, 13, 16 would be three nodes, but no such mesh group starts at 7
    ],
)
def test_placement_on_nodes_of_eight(stride: int, size: int, members: int, nodes: int) -> None:
    assert tuple(map(int, group_placement(stride, size, 8))) == (members, nodes)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9))
def test_placement_is_that_of_the_worst_group_of_a_mesh(stride: int, size: int, per_node: int) -> None:
    """The outer axis is long enough for blocks to start at every place in a node that they can."""
    found = tuple(map(int, group_placement(stride, size, per_node)))
    assert found == enumerated((stride, size, per_node), (1,), per_node)


def test_placement_broadcasts() -> None:
    strides, sizes = np.array([[1], [3], [8]]), np.array([1, 2, 7, 8, 64])
    members, nodes = group_placement(strides, sizes, 8)
    assert members.shape == nodes.shape == (3, 5)
    assert members.dtype == nodes.dtype == np.int64
    for (i, stride), (j, size) in itertools.product(enumerate(strides[:, 0]), enumerate(sizes)):
        one = group_placement(int(stride), int(size), 8)
        assert (members[i, j], nodes[i, j]) == tuple(map(int, one))


def test_placement_refuses_what_is_no_group() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        group_placement(0, 8, 8)


@pytest.mark.parametrize(
    ("group", "gbps", "level"),
    [
        ([(1, 8)], 370, "nvlink"),  # a ring inside the NVLink domain
        ([(1, 4)], 370, "nvlink"),
        ([(1, 16384)], 370, "infiniband"),  # eight cards carry 400, NVLink 370
        ([(1, 16)], 370, "infiniband"),
        ([(8, 2048)], 50, "infiniband"),  # one member in each node: its own card
        ([(4, 16)], 100, "infiniband"),
        ([(2, 16)], 200, "infiniband"),
        ([(1024, 16)], 50, "infiniband"),  # pipeline stages
        ([(1, 2), (16, 4)], 100, "infiniband"),  # two axes of a mesh that do not touch
        ([(1, 2), (4, 2)], 370, "nvlink"),
        ([(8, 4), (1, 8)], 370, "infiniband"),  # they touch: one progression of 32
        ([], 370, "nvlink"),
        ([(8, 1)], 370, "nvlink"),
    ],
)
def test_bandwidth_follows_from_where_the_ranks_sit(group: list[tuple[int, int]], gbps: float, level: str) -> None:
    assert bandwidth(H100, group) == gbps * GBPS
    assert level_of_group(H100, group).name == level


def test_a_half_filled_node_has_half_the_cards() -> None:
    assert bandwidth(parse_cluster("4x4xh100"), [(1, 16)]) == 200 * GBPS


def test_one_node_is_one_level() -> None:
    assert bandwidth(parse_cluster("8xa100"), [(1, 8)]) == 240 * GBPS


def test_a_third_level_is_crossed_with_as_many_links_as_the_group_has_members_under_it() -> None:
    leaf = Level("leaf", 32, 50, 14e-6)
    spine = Level("spine", 512, 12.5, 20e-6)
    two = parse_cluster("64x8xh100")
    three = Cluster("fat tree", 64, 8, two.device, (two.levels[0], leaf, spine))
    assert level_of_group(three, [(8, 4)]).name == "leaf"
    assert level_of_group(three, [(8, 64)]).name == "spine"
    assert bandwidth(three, [(8, 4)]) == 50 * GBPS
    assert bandwidth(three, [(8, 64)]) == 50 * GBPS  # four members under a leaf bring 4 x 12.5
    assert bandwidth(three, [(32, 16)]) == 12.5 * GBPS
    assert bandwidth(three, [(1, 512)]) == 370 * GBPS
    assert bandwidths(three, (np.array([8, 8, 32, 1]), np.array([4, 64, 16, 512]))).tolist() == [
        bandwidth(three, group) for group in ([(8, 4)], [(8, 64)], [(32, 16)], [(1, 512)])
    ]


@settings(deadline=None)
@given(
    degrees=st.lists(st.sampled_from([1, 2, 4]), min_size=4, max_size=4).map(tuple),
    axes=st.sets(st.integers(0, 3), min_size=1),
)
def test_nested_groups_agree_with_counting_ranks(degrees: tuple[int, ...], axes: set[int]) -> None:
    world = prod(degrees)
    cluster = parse_cluster("8xh100" if world <= 8 else f"{world // 8}x8xh100")
    group = [(prod(degrees[:axis]), degrees[axis]) for axis in axes]
    members, nodes = enumerated(degrees, tuple(axes), cluster.devices_per_node)
    assert bandwidth(cluster, group) == (370 if nodes == 1 else min(370, 50 * members)) * GBPS
    assert (level_of_group(cluster, group) is cluster.levels[0]) == (nodes == 1)


@settings(deadline=None)
@given(
    degrees=st.lists(st.integers(1, 4), min_size=4, max_size=4).map(tuple),
    axes=st.sets(st.integers(0, 3), min_size=1),
)
def test_uneven_nested_groups_are_never_promised_too_much(degrees: tuple[int, ...], axes: set[int]) -> None:
    world = prod(degrees)
    cluster = parse_cluster(f"{-(-world // 8)}x8xh100")
    group = [(prod(degrees[:axis]), degrees[axis]) for axis in axes]
    members, nodes = enumerated(degrees, tuple(axes), 8)
    assert bandwidth(cluster, group) <= (370 if nodes == 1 else min(370, 50 * members)) * GBPS


@given(st.integers(0, 11), st.integers(0, 11))
def test_many_at_once_equal_one_by_one(stride: int, size: int) -> None:
    if stride + size > 14:
        return
    many = bandwidths(H100, (np.array([1 << stride, 1]), 1 << size))
    assert many.tolist() == [bandwidth(H100, [(1 << stride, 1 << size)]), bandwidth(H100, [(1, 1 << size)])]


def test_a_group_beyond_the_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="spans 16 ranks, but 8xh100 has 8 devices"):
        bandwidth(parse_cluster("8xh100"), [(1, 16)])
    with pytest.raises(ValueError, match="no factor of a group"):
        level_of_group(H100, [(0, 4)])
