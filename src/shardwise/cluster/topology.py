"""Where a group's ranks sit, and so what bandwidth it has.

A group along mesh axes is an arithmetic progression of ranks, or a few nested ones: `[(stride, size), ...]`, never a
list of 16,384 numbers. Its bandwidth follows from how many members share each domain of the network: a ring enters
and leaves a node once for every member in it, so k members bring k network cards.

Groups that start inside a node at different places (3 ranks to a group, 8 to a node) are not all placed alike; the
worst placed one counts, since every step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from shardwise.cluster.device import Cluster, Level

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
IntLike = int | npt.NDArray[np.integer]


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
        members[~even], nodes[~even] = _worst_placement(s[~even], n[~even], g[~even])
    return np.asarray(members), np.asarray(nodes)


def _worst_placement(s: Ints, n: Ints, g: Ints) -> tuple[Ints, Ints]:
    """Over every place inside a node where a group of a mesh can start; stride < devices_per_node."""
    fewest, most = n.copy(), np.ones_like(n)
    period = np.gcd(s * n, g)  # blocks of s * n ranks start at multiples of it
    for start in range(int(g.max())):
        reached = (start < g) & (start % period < s)
        first = np.minimum(n, -(-(g - start) // s))
        end = start + (n - 1) * s
        last = np.where(end < g, n, end % g // s + 1)
        between = np.where(end // g >= 2, g // s, n)
        fewest = np.where(reached, np.minimum.reduce([fewest, first, last, between]), fewest)
        most = np.where(reached, np.maximum(most, end // g + 1), most)
    return fewest, most


def level_of_group(cluster: Cluster, group: Sequence[tuple[int, int]]) -> Level:
    """The innermost level that holds the group `[(stride, size), ...]` in one domain.

    Raises ValueError if the group reaches beyond the cluster.
    """
    factors = _merged(cluster, group)
    for level in cluster.levels[:-1]:
        if all(group_placement(stride, size, level.size)[1] == 1 for stride, size in factors):
            return level
    return cluster.levels[-1]


def bandwidth(cluster: Cluster, group: Sequence[tuple[int, int]]) -> float:
    """Bytes/s, one way, of a ring through the group `[(stride, size), ...]`, seen by each rank (bus bandwidth).

    Inside a node: the node's own network. Over nodes with k members in each: k network cards, at most what the node's
    network carries. Sibling groups run at the same time on cards of their own. Raises ValueError if the group reaches
    beyond the cluster.
    """
    factors = _merged(cluster, group)
    rate = cluster.levels[0].bytes_per_s
    for inner, outer in pairwise(cluster.levels):
        placed = [group_placement(stride, size, inner.size) for stride, size in factors]
        if any(domains > 1 for _, domains in placed):
            rate = min(rate, prod(int(members) for members, _ in placed) * outer.bytes_per_s)
    return rate


def bandwidths(cluster: Cluster, stride: IntLike, size: IntLike) -> Floats:
    """`bandwidth` of many groups at once, each one arithmetic progression; arguments broadcast, result in bytes/s."""
    rate = np.full(np.broadcast_shapes(np.shape(stride), np.shape(size)), cluster.levels[0].bytes_per_s)
    for inner, outer in pairwise(cluster.levels):
        members, domains = group_placement(stride, size, inner.size)
        rate = np.where(domains > 1, np.minimum(rate, members * outer.bytes_per_s), rate)
    return rate


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
