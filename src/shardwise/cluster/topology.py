"""Where a group's ranks sit, and so what bandwidth it has.

A group along mesh axes is an arithmetic progression of ranks, or a few nested ones: `[(stride, size), ...]`, never a
list of 16,384 numbers. Its bandwidth follows from how many members share each domain of the network: a ring enters
and leaves a node once for every member in it, so k members bring k network cards.

Groups that start inside a node at different places (3 ranks to a group, 8 to a node) are not all placed alike; the
worst placed one counts, since every step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import numpy as np

from shardwise.cluster.device import Cluster, Level
from shardwise.cluster.torus import Factor, Floats, IntLike, Ints, footprint, members_of


def group_placement(stride: IntLike, size: IntLike, devices_per_node: IntLike) -> tuple[Ints, Ints]:
    """(members_per_node, nodes) of the groups `start + stride * [0, size)`; arguments broadcast, results are int64.

    A group that does not fill its nodes evenly is given by the fewest members that any node of any such group holds,
    and by the most nodes that any such group touches. Raises ValueError for a value below 1.
    """
    s, n, g = np.broadcast_arrays(*(np.asarray(value, dtype=np.int64) for value in (stride, size, devices_per_node)))
    if s.size and min(s.min(), n.min(), g.min()) < 1:
        raise ValueError("stride, size and devices_per_node of a group are all at least 1")
    members = np.clip(g // s, 1, n)
    nodes = -(-n // members)
    even = (g % (s * n) == 0) | (s >= g) | ((g % s == 0) & (s * n % g == 0))
    if not even.all():
        members, nodes = np.array(members), np.array(nodes)
        rows, inverse = np.unique(np.stack([s[~even], n[~even], g[~even]]), axis=1, return_inverse=True)
        worst = np.array([_worst_placement(*row) for row in rows.T.tolist()])
        members[~even], nodes[~even] = worst[inverse.ravel()].T
    return np.asarray(members), np.asarray(nodes)


@lru_cache(maxsize=4096)
def _worst_placement(s: int, n: int, g: int) -> tuple[int, int]:
    """Over every place inside a node where a group of a mesh can start; stride < devices_per_node."""
    period = gcd(s * n, g)  # blocks of s * n ranks start at multiples of it
    start = np.arange(g)
    start = start[start % period < s]
    first = np.minimum(n, -(-(g - start) // s))
    end = start + (n - 1) * s
    last = np.where(end < g, n, end % g // s + 1)
    between = np.where(end // g >= 2, g // s, n)
    return int(np.minimum.reduce([first, last, between]).min()), int((end // g).max()) + 1


def placements(cluster: Cluster, *factors: Factor) -> list[tuple[Ints, Ints]]:
    """(members in a domain, domains) of the groups `[(stride, size), ...]`, for each level of the network.

    Ranks that a group has under one domain of the level, fewest, and the domains that it touches, most; the outermost
    level holds every group whole. Columns broadcast. Factors that continue each other count as one.
    """
    joined, found = _joined(factors), list[tuple[Ints, Ints]]()
    size = members_of(joined)
    for level in cluster.levels[:-1]:
        members, domains = np.ones_like(size), np.ones_like(size)
        for stride, n in joined:
            inside, touched = group_placement(stride, n, level.size)
            members, domains = members * inside, domains * touched
        found.append((members, domains))
    return [*found, (size, np.ones_like(size))]


def level_of_group(cluster: Cluster, group: Sequence[tuple[int, int]]) -> Level:
    """The innermost level that holds the group `[(stride, size), ...]` in one domain.

    Raises ValueError if the group reaches beyond the cluster.
    """
    placed = placements(cluster, *_merged(cluster, group))
    return next(level for level, (_, domains) in zip(cluster.levels, placed, strict=True) if domains == 1)


def bandwidth(cluster: Cluster, group: Sequence[tuple[int, int]]) -> float:
    """Bytes/s, one way, of a ring through the group `[(stride, size), ...]`, seen by each rank (bus bandwidth).

    Inside a node: the node's own network. Over nodes with k members in each: k network cards, at most what the node's
    network carries. Sibling groups run at the same time on cards of their own. Raises ValueError if the group reaches
    beyond the cluster.
    """
    return float(bandwidths(cluster, *_merged(cluster, group)))


def bandwidths(cluster: Cluster, *factors: Factor) -> Floats:
    """`bandwidth` of many groups at once, in bytes/s; columns broadcast."""
    placed = placements(cluster, *factors)
    rate = inside_rate(cluster, factors, placed[0][1])
    for (members, domains), outer in zip(placed, cluster.levels[1:], strict=False):
        crossed = np.minimum(rate, members * outer.bytes_per_s)
        rate = np.where(domains > 1, crossed, rate)
    return rate


def inside_rate(cluster: Cluster, factors: Sequence[Factor], domains: Ints) -> Floats:
    """Bytes/s, one way, that the innermost level brings a rank of groups that touch so many of its domains.

    All of a switch; the links to the other members in a mesh, which do not bound a group with one member in each; the
    links of the axes of a torus.
    """
    level = cluster.levels[0]
    if level.kind == "torus":
        return footprint(level, *within(level, factors)).ports * level.bytes_per_s
    if level.kind == "switch":
        return np.full(domains.shape, level.bytes_per_s)
    peers = np.maximum(members_of(within(level, factors)) - 1, 1)
    return np.where(domains < members_of(factors), peers * level.bytes_per_s, np.inf)


def within(level: Level, factors: Sequence[Factor]) -> list[Factor]:
    """The part of each factor that lies under one domain of the level."""
    return [(stride, group_placement(stride, n, level.size)[0]) for stride, n in _joined(factors)]


def _joined(factors: Sequence[Factor]) -> list[Factor]:
    """Neighbours that continue each other joined, where all of their groups do."""
    joined: list[Factor] = []
    for stride, size in factors:
        if joined and np.array_equal(np.asarray(joined[-1][0]) * np.asarray(joined[-1][1]), np.asarray(stride)):
            joined[-1] = (joined[-1][0], np.asarray(joined[-1][1]) * np.asarray(size))
        else:
            joined.append((stride, size))
    return joined


def _merged(cluster: Cluster, group: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending strides, factors of one rank dropped, neighbours that continue each other joined."""
    factors: list[tuple[int, int]] = []
    for stride, size in sorted(group):
        if stride < 1 or size < 1:
            raise ValueError(f"({stride}, {size}) is no factor of a group: stride and size are at least 1")
        if factors and size > 1 and stride == factors[-1][0] * factors[-1][1]:
            factors[-1] = (factors[-1][0], factors[-1][1] * size)
        elif size > 1:
            factors.append((stride, size))
    reach = 1 + sum(stride * (size - 1) for stride, size in factors)
    if reach > cluster.world_size:
        raise ValueError(
            f"a group {list(group)} spans {reach:,} ranks, but {cluster.name} has {cluster.world_size:,} devices"
        )
    return factors
