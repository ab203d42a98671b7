"""Seconds of one collective: alpha-beta over the levels of the network.

Every constant is a number of the cluster's file; a new algorithm is one function here, and where there is a choice
the fastest one is taken, as the libraries do. Collectives do not slow each other, but for siblings: all groups along
the same axes run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.cluster.device import Cluster, Level
from shardwise.cluster.topology import bandwidths, group_placement, inside_rate, placements, within
from shardwise.cluster.torus import Bools, Factor, Floats, Footprint, IntLike, Ints, footprint, message
from shardwise.collective import Kind

_TREE = 0.92
"""Bandwidth of a double binary tree against the ring's (NCCL graph/tuning.cc)."""

_IN_SWITCH_S = 25e-6
"""Latency of an all-reduce that the switch adds up (NCCL graph/tuning.cc, NVLS)."""


class Tier(NamedTuple):
    """What one level of the network does for the groups, a column each."""

    level: Level
    parts: Floats
    """What it joins in one of its domains: ranks at the innermost level, else domains of the level below."""
    members: Ints
    """Ranks of the group in each part, fewest."""
    rate: Floats
    """Bytes/s, one way, of a rank."""


@dataclass(frozen=True, slots=True)
class Links:
    """How groups are joined, a column each: `[...]` groups of `size` ranks.

    `ring_s` is the latency of going once round (size - 1 hops, each at the level that it crosses), `tree_s` that of
    going up a tree whose nodes are chains of the ranks of a node (NCCL graph/tuning.cc); `bytes_per_s` what such a
    ring reaches. On a torus rings follow the axes: `torus` says how, and the tiers above it start at index 1.
    """

    size: Ints
    ring_s: Floats
    tree_s: Floats
    bytes_per_s: Floats
    tiers: tuple[Tier, ...]
    torus: Footprint | None = None


def links(cluster: Cluster, *factors: Factor) -> Links:
    """The groups `[(stride, size), ...]`, innermost factor first; columns broadcast."""
    placed = placements(cluster, *factors)
    size = placed[-1][0]
    inside = cluster.levels[0]
    below, before, tiers = np.ones_like(size), size, list[Tier]()
    ring, tree = np.zeros(size.shape), np.zeros(size.shape)
    for level, (members, touched) in zip(cluster.levels, placed, strict=True):
        innermost = level is inside
        domains = np.minimum(touched, before)
        parts = before / domains
        ring = ring + (before - domains) * level.latency_s
        tree = tree + (parts - 1 if innermost else np.log2(parts)) * level.latency_s
        own = inside_rate(cluster, factors, touched) if innermost else np.full(size.shape, level.bytes_per_s)
        tiers.append(Tier(level, parts, below, own))
        below, before = members, domains
    torus = footprint(inside, *within(inside, factors)) if inside.kind == "torus" else None
    return Links(size, ring, tree, bandwidths(cluster, *factors), tuple(tiers), torus)


def collective_s(kind: Kind, payload_bytes: npt.ArrayLike, group: Links, copies: float = 1) -> Floats:
    """Seconds of one collective; `payload_bytes` as of a `Collective`. Nothing in a group of one rank.

    `copies`: how many rows of an all-to-all's input are one token's, for as many experts (the k of its top-k): a
    node is sent a token once, however many of its experts are wanted there. 1: every row is sent on its own.
    """
    payload = np.asarray(payload_bytes, dtype=np.float64)
    match kind:
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER:
            return _gather_s(payload, group)
        case Kind.ALL_TO_ALL:
            return _all_to_all_s(payload, group, copies)
        case Kind.ALL_REDUCE:
            return np.where(group.size > 1, _all_reduce_s(payload, group), 0.0)
        case Kind.SEND | Kind.RECV:
            return _send_s(payload, group)


def _send_s(payload: Floats, group: Links) -> Floats:
    """One message over the slowest level that the group crosses, by one of its links."""
    seconds = np.zeros(())
    for tier in group.tiers:
        message_s = payload / tier.level.bytes_per_s + tier.level.latency_s
        seconds = np.where(tier.parts > 1, np.maximum(seconds, message_s), seconds)
    return seconds


def _gather_s(payload: Floats, group: Links) -> Floats:
    """A ring (Chan et al. 2007, section 4); on a torus the axes' own rings, and then, one level after the other, the
    shards of the ranks that stand at the same place in each slice.
    """
    if group.torus is None:
        return group.ring_s + payload * (group.size - 1) / group.size / group.bytes_per_s
    seconds = _axes_s(payload, group.torus, group.tiers[0].level)
    for tier in group.tiers[1:]:
        seconds = seconds + _ring_s(payload / tier.members, tier)
    return seconds


def _axes_s(payload: Floats, torus: Footprint, level: Level) -> Floats:
    """A gather over axes of a torus: bound by the links or, where there is little to send, by the hops."""
    return np.maximum(torus.hops * level.latency_s, torus.part * payload / (torus.ports * level.bytes_per_s))


def _ring_s(payload: Floats, tier: Tier) -> Floats:
    """Once round the parts of one tier, each rank with the like-placed ranks of the other parts."""
    return (tier.parts - 1) * (tier.level.latency_s + payload / tier.parts / tier.rate)


def _all_reduce_s(payload: Floats, group: Links) -> Floats:
    """The fastest of a ring, a double binary tree (Sanders et al. 2009) and one level after the other."""
    by_level = sum((_tier_reduce_s(payload, tier) for tier in group.tiers[1:]), np.zeros(()))
    if group.torus is not None:
        return 2 * _axes_s(payload, group.torus, group.tiers[0].level) + by_level
    sent = payload * (group.size - 1) / group.size
    ring = 2 * (group.ring_s + sent / group.bytes_per_s)
    tree = 2 * (group.tree_s + payload / (_TREE * group.bytes_per_s))
    by_level = np.where(_even(group), by_level + _tier_reduce_s(payload, group.tiers[0]), np.inf)
    return np.minimum(np.minimum(ring, tree), by_level)


def _even(group: Links) -> Bools:
    """Whether each part has a like-placed rank in the others: what reducing one level after the other takes."""
    even, members = np.ones(group.size.shape, dtype=np.bool_), np.ones(group.size.shape)
    for tier in group.tiers:
        even &= tier.members == members
        members = members * tier.parts
    return even


def _tier_reduce_s(payload: Floats, tier: Tier) -> Floats:
    """All-reduce among the parts of one tier, of the share that the levels below leave to each rank.

    Scattered within the parts first and gathered last: 2 (g-1)/g S/B inside, 2 (N-1)/N (S/g)/B between. Or the
    switch adds: each rank sends its share once (NVLS, SHARP).
    """
    share = payload / tier.members
    ring = 2 * _ring_s(share, tier)
    efficiency = tier.level.in_network_reduction_efficiency
    if not efficiency:
        return ring
    added = np.where(tier.parts > 1, _IN_SWITCH_S + share / (efficiency * tier.rate), 0.0)
    return np.minimum(ring, added)


def _all_to_all_s(payload: Floats, group: Links, copies: float) -> Floats:
    """Each rank sends the n-th part of its payload to every other one; the busiest level counts.

    Of n ranks with m in a node, (n-m)/n of a rank's payload leaves over its own card. All but what its card's own
    rail brings crosses the node's network: (m-1)/m (NCCL's PXN). Different wires work at the same time, so the time
    is the longest one's and not the sum (DeepEP forwards what arrives while it receives). `copies` k of a token to N
    nodes at random reach N (1 - (1 - 1/N)^k) of them.
    """
    inside = group.tiers[0]
    held = group.tiers[1].members if len(group.tiers) > 1 else group.size
    if group.torus is None:
        latency, seconds = group.ring_s, payload * (held - 1) / held / inside.rate
    else:
        latency = group.torus.hops * inside.level.latency_s
        seconds = np.maximum(latency, payload * group.torus.spread / inside.level.bytes_per_s)
        latency = sum(((tier.parts - 1) * tier.level.latency_s for tier in group.tiers[1:]), np.zeros(()))
    for tier in group.tiers[1:]:
        away = (group.size - tier.members) / group.size
        seconds = np.maximum(seconds, payload * away * _distinct(group.size / tier.members, copies) / tier.rate)
    return latency + seconds


def _distinct(nodes: Floats, copies: float) -> Floats:
    """Distinct nodes among the `copies` that are sent, as a share of them."""
    return nodes * (1 - (1 - 1 / nodes) ** copies) / copies


def transfer_s(cluster: Cluster, payload_bytes: npt.ArrayLike, stride: IntLike, pp: IntLike) -> Floats:
    """One message between neighbouring stages, `stride` ranks apart, over the slowest border of the pipeline."""
    payload, s, n = np.broadcast_arrays(
        np.asarray(payload_bytes, dtype=np.float64), np.asarray(stride, dtype=np.int64), np.asarray(pp, dtype=np.int64)
    )
    seconds = _inside_transfer_s(cluster.levels[0], payload, s, n)
    for inner, outer in pairwise(cluster.levels):
        crosses = (group_placement(s, n, inner.size)[1] > 1) & (s < outer.size)
        seconds = np.where(crosses, np.maximum(seconds, payload / outer.bytes_per_s + outer.latency_s), seconds)
    return np.where(n > 1, seconds, 0.0)


def _inside_transfer_s(level: Level, payload: Floats, stride: Ints, pp: Ints) -> Floats:
    """The slowest border between two stages of one domain of the innermost level; 0 where none is."""
    if level.kind != "torus":
        return np.where(stride < level.size, payload / level.bytes_per_s + level.latency_s, 0.0)
    keys, inverse = np.unique(np.stack([stride.ravel(), pp.ravel()]), axis=1, return_inverse=True)
    slowest = np.array([_slowest_border(level, *key) for key in keys.T.tolist()])[inverse.ravel()]
    per_byte, latency = (slowest[:, i].reshape(payload.shape) for i in (0, 1))
    return np.maximum(payload * per_byte, latency)


@lru_cache(maxsize=4096)
def _slowest_border(level: Level, stride: int, pp: int) -> tuple[float, float]:
    """(seconds a byte, seconds of latency) at most, of the first and the last pair of each border of a torus."""
    stages = np.arange(min(pp, level.size // stride) - 1)
    if not stages.size:
        return 0.0, 0.0
    sources = np.concatenate([stages * stride, (stages + 1) * stride - 1])
    alone, hops = message(level, sources, sources + stride, stride)
    return float(1 / (alone.min() * level.bytes_per_s)), float(hops.max() * level.latency_s)


def pair_s(cluster: Cluster, payload_bytes: float, source: int, target: int, stride: int) -> float:
    """One message from pipeline rank `source` to `target`, for the worst placed of their `stride` pairs of ranks."""
    first, distance = source * stride, (target - source) * stride
    for level in cluster.levels[:-1]:
        ranks = first + np.arange(min(stride, level.size))
        if np.array_equal(ranks // level.size, (ranks + distance) // level.size):
            return _message_s(level, payload_bytes, first, distance, stride)
    return _message_s(cluster.levels[-1], payload_bytes, first, distance, stride)


def _message_s(level: Level, payload_bytes: float, first: int, distance: int, stride: int) -> float:
    if level.kind != "torus":
        return payload_bytes / level.bytes_per_s + level.latency_s
    sources = np.array([first, first + stride - 1]) % level.size
    alone, hops = message(level, sources, sources + distance, stride)
    return max(payload_bytes / (float(alone.min()) * level.bytes_per_s), float(hops.max()) * level.latency_s)
