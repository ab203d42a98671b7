"""Devices, their networks, and where the ranks of a group sit on them."""

from shardwise.cluster.catalog import from_dict, known_devices, parse_cluster
from shardwise.cluster.convert import to_dict
from shardwise.cluster.device import AssumedMemory, Cluster, ClusterError, Device, Efficiency, Level
from shardwise.cluster.topology import bandwidth, bandwidths, group_placement, level_of_group

__all__ = [
    "AssumedMemory",
    "Cluster",
    "ClusterError",
    "Device",
    "Efficiency",
    "Level",
    "bandwidth",
    "bandwidths",
    "from_dict",
    "group_placement",
    "known_devices",
    "level_of_group",
    "parse_cluster",
    "to_dict",
]
