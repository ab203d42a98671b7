"""Devices, their networks, and where the ranks of a group sit on them."""

from shardwise.cluster.catalog import known_devices
from shardwise.cluster.convert import to_dict
from shardwise.cluster.device import AssumedMemory, Cluster, ClusterError, Device, Efficiency, Level
from shardwise.cluster.spelling import from_dict, parse_cluster
from shardwise.cluster.survey import Part, describe, known_parts, questions
from shardwise.cluster.topology import bandwidth, bandwidths, group_placement, level_of_group

__all__ = [
    "AssumedMemory",
    "Cluster",
    "ClusterError",
    "Device",
    "Efficiency",
    "Level",
    "Part",
    "bandwidth",
    "bandwidths",
    "describe",
    "from_dict",
    "group_placement",
    "known_devices",
    "known_parts",
    "level_of_group",
    "parse_cluster",
    "questions",
    "to_dict",
]
