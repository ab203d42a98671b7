"""Groups on a torus against rank-by-rank counting, store-and-forward rounds and routed messages."""

from __future__ import annotations

import itertools
from collections import defaultdict
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import ClusterError, Level, bandwidth, parse_cluster
from shardwise.cluster.torus import Footprint, footprint, message

Coordinates = tuple[int, ...]


def torus(*lengths: int, wraps: tuple[bool, ...] | None = None) -> Level:
    return Level("ici", prod(lengths), 100, 1e-6, "torus", torus=lengths, wraps=wraps or (True,) * len(lengths))


def neighbours(at: int, n: int, ring: bool) -> set[int]:
    return {(at + d) % n if ring else at + d for d in (1, -1) if ring or 0 <= at + d < n} - {at}


def rounds_of_a_gather(n: int, ring: bool) -> int:
    """Rounds until every device has every shard; in each, every one hands a whole shard to each neighbour."""
    held, rounds = [{i} for i in range(n)], 0
    while any(len(shards) < n for shards in held):
        held = [held[i].union(*(held[j] for j in neighbours(i, n, ring))) for i in range(n)]
        rounds += 1
    return rounds


def busiest_link_of_an_all_to_all(n: int, ring: bool) -> float:
    """Messages of 1 from each to each, the shorter way round; one that is as far both ways goes half by half."""
    load: defaultdict[tuple[int, int], float] = defaultdict(float)
    for source, target in itertools.permutations(range(n), 2):
        ahead = (target - source) % n
        ways = [(1, ahead), (-1, n - ahead)] if ring else [(1 if target > source else -1, abs(target - source))]
        shortest = min(hops for _, hops in ways)
        used = [way for way in ways if way[1] == shortest]
        for direction, hops in used:
            for i in range(hops):
                load[(source + direction * i) % n, direction] += 1 / len(used)
    return max(load.values())


@pytest.mark.parametrize("n", range(2, 13))
@pytest.mark.parametrize("ring", [False, True])
def test_one_axis_is_what_its_devices_do(n: int, ring: bool) -> None:
    of = footprint(torus(n, wraps=(ring,)), (1, n))
    rounds = rounds_of_a_gather(n, ring)
    assert of.hops == rounds
    assert of.part / of.ports == pytest.approx(rounds / n)  # a shard is S / n
    assert of.spread == pytest.approx(busiest_link_of_an_all_to_all(n, ring) / n)  # a message is p / n


def groups_of_a_mesh(shape: Coordinates, stride: int, size: int) -> list[list[Coordinates]]:
    world = prod(shape)
    starts = [block + i for block in range(0, world, stride * size) for i in range(stride)]
    return [[tuple(map(int, np.unravel_index(s + stride * k, shape))) for k in range(size)] for s in starts]


def enumerated(level: Level, stride: int, size: int) -> tuple[float, bool] | None:
    """Links of the worst group, siblings sharing theirs, and whether any are shared; None where a group is no product
    of its coordinates.
    """
    worst, shared = np.inf, False
    for group in groups_of_a_mesh(level.torus, stride, size):
        along = [sorted(set(axis)) for axis in zip(*group, strict=True)]
        if prod(map(len, along)) != size:
            return None
        links = 0.0
        for at, length, wraps in zip(along, level.torus, level.wraps, strict=True):
            gaps = set(np.diff(at).tolist())
            if len(gaps) > 1:
                return None
            step = gaps.pop() if gaps else 1
            shared |= step > 1
            links += (2 if wraps and len(at) * step == length else 1) / step if len(at) > 1 else 0
        worst = min(worst, links)
    return worst, shared


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.booleans()), min_size=1, max_size=3),
    st.data(),
)
def test_links_are_those_of_the_worst_group_of_a_mesh(axes: list[tuple[int, bool]], data: st.DataObject) -> None:
    level = torus(*(n for n, _ in axes), wraps=tuple(wraps for _, wraps in axes))
    divisors = [d for d in range(1, level.size + 1) if level.size % d == 0]
    stride = data.draw(st.sampled_from(divisors))
    size = data.draw(st.sampled_from([d for d in divisors if d > 1 and level.size // stride % d == 0] or [1]))
    if size == 1:
        return
    of, found = footprint(level, (stride, size)), enumerated(level, stride, size)
    if found is None:  # one line in rank order, at the most
        assert of.ports <= 1 and of.hops >= size - 1
        return
    links, shared = found
    assert of.ports <= links * (1 + 1e-12)
    if not shared:
        assert of.ports == pytest.approx(links)


@pytest.mark.parametrize(
    ("group", "links"),
    [
        ([(1, 28)], 2),  # the last axis, whole: a ring
        ([(28, 20)], 2),
        ([(560, 16)], 2),
        ([(1, 560)], 4),  # two axes
        ([(1, 8960)], 6),
        ([(1, 28), (560, 16)], 4),  # two axes that do not touch
        ([(1, 4)], 1),  # a part of an axis: a line
        ([(28, 4)], 1),
        ([(4, 7)], 0.5),  # every fourth device: four siblings share the ring
        ([(1, 8)], 1),  # 8 on an axis of 28: some straddle rows
        ([(14, 4)], 4 / 7),  # two of a row and two rows: what crosses within the rows takes 1.75 S / W
    ],
)
def test_bandwidth_on_a_pod(group: list[tuple[int, int]], links: float) -> None:
    assert bandwidth(parse_cluster("v5p:16x20x28"), group) == pytest.approx(links * 90e9)


def test_slices_over_the_network_between_them() -> None:
    """A host's 25 GB/s are a quarter for each of its four chips; one member in a slice has its own share alone."""
    cluster = parse_cluster("4xv5p:4x4x4")
    assert bandwidth(cluster, [(64, 4)]) == 6.25e9
    assert bandwidth(cluster, [(16, 16)]) == 25e9
    assert bandwidth(cluster, [(1, 256)]) == pytest.approx(400e9)


def test_many_at_once_equal_one_by_one() -> None:
    level = torus(4, 6, 8, wraps=(True, False, True))
    pairs = [(s, n) for s in (1, 2, 8, 16, 48) for n in (1, 2, 3, 4, 6, 8) if s * n <= level.size]
    many = footprint(level, tuple(np.array(pairs).T))
    for i, (stride, size) in enumerate(pairs):
        one = footprint(level, (stride, size))
        for name in Footprint.__slots__:
            assert getattr(many, name)[i] == getattr(one, name)


def test_messages() -> None:
    level = torus(4, 4, 8, wraps=(True, False, True))
    for source, target, block, links, hops in [
        (0, 1, 1, 1, 1),
        (0, 7, 1, 1, 1),  # round the ring
        (0, 127, 1, 3, 1 + 3 + 1),  # the middle axis is a line; one way out along each axis
        (0, 8, 8, 1, 1),  # a whole row to the next row
        (0, 2, 2, 1 / 2, 2),  # two ranks two hops on: each link carries both
        (0, 4, 4, 1 / 4, 4),
        (24, 32, 8, 1 / 1, 1 + 3),  # from the last row of a line to the first of the next plane
    ]:
        found = message(level, source, target, block)
        assert (float(found[0]), int(found[1])) == (pytest.approx(links), hops), (source, target, block)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"torus": (4, 4)}, "torus: found 4x4; wanted axes that multiply to 8"),
        ({"torus": ()}, "torus: found 0 axes; wanted 1 to 6"),
        ({"torus": (1,) * 5000}, "torus: found 5,000 axes"),
        ({"wraps": (True,)}, "wraps: found 1 values; wanted one for each of 2 axes"),
        ({"kind": "switch"}, "torus: found on a level of kind 'switch'"),
        ({"in_network_reduction_efficiency": 0.5}, "only a switch adds"),
    ],
)
def test_what_is_no_torus(wrong: dict[str, object], said: str) -> None:
    fields = {"kind": "torus", "torus": (2, 4), "wraps": (True, True)} | wrong
    with pytest.raises(ClusterError, match=said):
        Level("ici", 8, 100, 1e-6, **fields)  # type: ignore[arg-type]
