"""Seconds of one kernel and of one collective: a roofline, and alpha-beta over the levels of the network.

Every constant is a number of the device's or the cluster's file; a new collective algorithm is one function here.
Overlapped work is not slowed by what it overlaps with, and a product's efficiency depends on the alignment of its
sizes alone: waves and tiles of a kernel are left to calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.account.compute import Moved, Product
from shardwise.cluster.device import Cluster, Device
from shardwise.cluster.topology import IntLike, bandwidths, group_placement
from shardwise.collective import Kind
from shardwise.plan.job import JobError

Floats = npt.NDArray[np.float64]

_TREE = 0.92
"""Bandwidth of a double binary tree against the ring's (NCCL graph/tuning.cc)."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a rank computes with: the peaks and efficiencies of one device in one dtype."""

    flops_per_s: float
    """Of a large, well-aligned product."""
    attention_f_flops_per_s: float
    attention_b_flops_per_s: float
    bytes_per_s: float
    launch_s: float
    element_bytes: int

    def moved_s(self, moved: Moved) -> float:
        """Memory-bound kernels."""
        return moved.bytes / self.bytes_per_s + moved.kernels * self.launch_s

    def product_s(self, product: Product) -> float:
        """One matrix product; forward, dgrad and wgrad read and write the same three matrices."""
        tokens, rows, columns = product
        moved = (tokens * rows + rows * columns + tokens * columns) * self.element_bytes
        rate = self.flops_per_s * min(_alignment(rows), _alignment(columns))
        return max(product.flops / rate, moved / self.bytes_per_s) + self.launch_s


def kernels(device: Device, dtype: str, element_bytes: int) -> Kernels:
    """The device's rates for products in `dtype`. Raises JobError where its file has no peak for it."""
    if dtype not in device.peak_flops:
        known = ", ".join(sorted(device.peak_flops))
        raise JobError([f"{device.name} has no peak for {dtype} products (known: {known}): choose another precision"])
    peak, efficiency = device.peak_flops[dtype], device.efficiency
    return Kernels(
        flops_per_s=peak * efficiency.matmul,
        attention_f_flops_per_s=peak * efficiency.attention_forward,
        attention_b_flops_per_s=peak * efficiency.attention_backward,
        bytes_per_s=device.memory_bytes_per_s * efficiency.memory,
        launch_s=efficiency.launch_s,
        element_bytes=element_bytes,
    )


def _alignment(size: int) -> float:
    """Share of a product's rate that a dim leaves: kernels want multiples of 64 (fitted to published throughputs)."""
    return 1.0 if size % 64 == 0 else 0.75 if size % 8 == 0 else 0.56


@dataclass(frozen=True, slots=True)
class Links:
    """How groups are joined, a column each: `[...]` groups of `size` ranks.

    `ring_s` is the latency of going once round (size - 1 hops, each at the level that it crosses), `tree_s` that of
    going up a tree whose nodes are chains of the ranks of a node (NCCL graph/tuning.cc).
    """

    size: npt.NDArray[np.int64]
    ring_s: Floats
    tree_s: Floats
    bytes_per_s: Floats


def links(cluster: Cluster, *factors: tuple[IntLike, IntLike]) -> Links:
    """The groups `[(stride, size), ...]`, innermost factor first; columns broadcast.

    With several factors the bandwidth is that of the innermost: such groups only carry scalars here.
    """
    stride, inner = factors[0]
    size = np.ones((), dtype=np.int64)
    for _, n in factors:
        size = size * np.asarray(n, dtype=np.int64)
    before, ring, tree = size, np.zeros(size.shape), np.zeros(size.shape)
    for i, level in enumerate(cluster.levels):
        outermost = i == len(cluster.levels) - 1
        domains = np.ones_like(size)
        for s, n in () if outermost else factors:
            domains = domains * group_placement(s, n, level.size)[1]
        domains = np.minimum(domains, before)
        ring = ring + (before - domains) * level.latency_s
        within = before / domains
        tree = tree + (within - 1 if i == 0 else np.log2(within)) * level.latency_s
        before = domains
    return Links(size, ring, tree, bandwidths(cluster, stride, inner))


def collective_s(kind: Kind, payload_bytes: npt.ArrayLike, group: Links) -> Floats:
    """Seconds of one collective; `payload_bytes` as of a `Collective`. Nothing in a group of one rank.

    Rings for gathers and scatters (Chan et al. 2007, section 4); of ring and double binary tree (Sanders et al. 2009)
    the faster one for an all-reduce. In an all-to-all each rank sends all of its input but the n-th part it keeps.
    """
    payload = np.asarray(payload_bytes, dtype=np.float64)
    sent = payload * (group.size - 1) / group.size
    match kind:
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER | Kind.ALL_TO_ALL:
            return group.ring_s + sent / group.bytes_per_s
        case Kind.ALL_REDUCE:
            ring = 2 * (group.ring_s + sent / group.bytes_per_s)
            tree = 2 * (group.tree_s + payload / (_TREE * group.bytes_per_s))
            return np.where(group.size > 1, np.minimum(ring, tree), 0.0)
        case Kind.SEND | Kind.RECV:
            return group.ring_s + payload / group.bytes_per_s


def transfer_s(cluster: Cluster, payload_bytes: npt.ArrayLike, stride: IntLike, pp: IntLike) -> Floats:
    """One message between neighbouring stages, `stride` ranks apart, over the slowest border of the pipeline."""
    payload = np.asarray(payload_bytes, dtype=np.float64)
    seconds = payload / cluster.levels[0].bytes_per_s + cluster.levels[0].latency_s
    for inner, outer in zip(cluster.levels, cluster.levels[1:], strict=False):
        crosses = group_placement(stride, pp, inner.size)[1] > 1
        seconds = np.where(crosses, payload / outer.bytes_per_s + outer.latency_s, seconds)
    return np.where(np.asarray(pp) > 1, seconds, 0.0)


def pair_s(cluster: Cluster, payload_bytes: float, source: int, target: int, stride: int) -> float:
    """One message from pipeline rank `source` to `target`, for the worst placed of their `stride` pairs of ranks."""
    first, distance = source * stride, (target - source) * stride
    for level in cluster.levels[:-1]:
        ranks = range(first, first + min(stride, level.size))
        if all(r // level.size == (r + distance) // level.size for r in ranks):
            return payload_bytes / level.bytes_per_s + level.latency_s
    return payload_bytes / cluster.levels[-1].bytes_per_s + cluster.levels[-1].latency_s
