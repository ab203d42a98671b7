"""The cluster of a published run: devices of the catalogue, in the fullest nodes, racks or slices that are alike."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Final

from shardwise.cluster import Cluster, ClusterError, parse_cluster
from shardwise.cluster.catalog import entry
from shardwise.score.facts import Source, words
from shardwise.score.skip import SkipError
from shardwise.score.table import Published

_FABRIC: Final = re.compile(r"\b(\d{2,5}) Gbps (?:node-node|inter-node)")
_SLICES: Final = re.compile(r"\b(\d{1,4})(?:x v\d| slice)")


def cluster_of(row: Published, source: Source) -> Cluster:
    """The cluster that a row ran on. Raises SkipError."""
    device = words().accelerators.get(row.accelerator)
    if device is None or row.devices is None:
        raise SkipError("device", f"{row.devices or 'an unknown number'} of {row.accelerator or 'a nameless device'}")
    slices = _SLICES.search(row.notes)
    fabric = _FABRIC.search(row.notes)
    Gbps = float(fabric[1]) if fabric else source.between_nodes_Gbps_per_node
    try:
        return _cluster(device, row.devices, int(slices[1]) if slices else 1, Gbps)
    except ClusterError as error:
        raise SkipError("device", error.faults[0]) from None


@lru_cache(maxsize=1024)
def _cluster(device: str, devices: int, slices: int, Gbps_per_node: float | None) -> Cluster:
    part = entry(device)
    if devices % slices:
        slices = 1
    per_domain = max(n for n in range(1, part.max_devices_per_node + 1) if devices // slices % n == 0)
    domains = devices // per_domain
    if part.slices:
        shape = "x".join(map(str, _cube(per_domain, part.slices.axes)))
        return parse_cluster(f"{domains}x{device}:{shape}")
    cluster = parse_cluster(f"{domains}x{per_domain}x{device}" if domains > 1 else f"{per_domain}x{device}")
    if Gbps_per_node is None or domains == 1:
        return cluster
    inside, between = cluster.levels
    GBps = Gbps_per_node / 8 / per_domain
    return replace(cluster, levels=(inside, replace(between, bandwidth_GBps_per_device=GBps)))


def _cube(devices: int, axes: int) -> list[int]:
    """Axes that multiply to the devices, as near to a cube as they come: slices are handed out like that."""
    shape: list[int] = []
    for axis in range(axes, 0, -1):
        near = devices ** (1 / axis)
        shape.append(min((n for n in range(1, devices + 1) if devices % n == 0), key=lambda n: abs(n - near)))
        devices //= shape[-1]
    return sorted(shape)
