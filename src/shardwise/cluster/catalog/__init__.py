"""The known devices, one TOML file each, and the spelling of a cluster of them: `64x8xh100`."""

# No `from __future__ import annotations` here: cattrs reads the Bounds off the fields, and drops them from texts.

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Final

from shardwise.cluster.convert import structure
from shardwise.cluster.device import MAX_DEVICES, Cluster, ClusterError, Count, Device, GBps, Level, Seconds

_SPELLING: Final = re.compile(r"(?:([+-]?[0-9]{1,9})x)?([+-]?[0-9]{1,9})x([a-z][a-z0-9_.-]*)")
_USAGE: Final = "write NODESxDEVICESxNAME, such as 64x8xh100, or DEVICESxNAME for one node, such as 8xh100"


@dataclass(frozen=True, slots=True)
class Link:
    """A level of the network, before it is known how many devices lie under it."""

    name: str
    bandwidth_GBps_per_device: GBps
    latency_s: Seconds


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the catalog: a device, and the networks that it usually comes with."""

    max_devices_per_node: Count
    device: Device
    inside_node: Link
    between_nodes: Link


def known_devices() -> tuple[str, ...]:
    """Names that may stand in `64x8xNAME`, in alphabetical order."""
    return tuple(sorted(file.name[:-5] for file in resources.files(__name__).iterdir() if file.name.endswith(".toml")))


@cache
def entry(name: str) -> Entry:
    """The catalog's entry for a device. Raises ClusterError for an unknown name, with the known ones."""
    known = known_devices()
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ClusterError([f"no device is named {name!r}{hint} (known: {', '.join(known)})"])
    return structure(tomllib.loads((resources.files(__name__) / f"{name}.toml").read_text("utf-8")), Entry)


def parse_cluster(text: str) -> Cluster:
    """`64x8xh100` (64 nodes of 8), `8xh100` (one node of 8) as a Cluster of a known device.

    Raises ClusterError: what is wrong and, where it can be told, the spelling that is meant.
    """
    match = _SPELLING.fullmatch(text.strip().lower())
    if match is None:
        raise ClusterError([_what_was_meant(text)])
    nodes, per_node, part = int(match[1] or 1), int(match[2]), entry(match[3])
    if nodes < 1 or per_node < 1:
        raise ClusterError([f"{text.strip()!r}: a cluster has at least 1 node of at least 1 device; {_USAGE}"])
    if nodes * per_node > MAX_DEVICES:
        found = f"{text.strip()!r} is {nodes * per_node:,} devices"
        raise ClusterError([f"{found}; at most {MAX_DEVICES:,} are planned for"])
    limit = part.max_devices_per_node
    if per_node > limit:
        meant = _spelled(*_evenly(nodes * per_node, limit), part.device.name)
        raise ClusterError([f"one node holds {limit} {part.device.name.upper()}: did you mean {meant}?"])
    return Cluster(
        name=_spelled(nodes, per_node, part.device.name),
        nodes=nodes,
        devices_per_node=per_node,
        device=part.device,
        levels=_levels(part, nodes, per_node),
    )


def from_dict(data: Mapping[str, object] | str) -> Cluster:
    """A cluster as a plan file holds it: the tables of `to_dict`, or the spelling `64x8xh100`.

    Raises ClusterError that lists every fault with the field's path and what was wanted.
    """
    return parse_cluster(data) if isinstance(data, str) else structure(data, Cluster)


def _levels(part: Entry, nodes: int, per_node: int) -> tuple[Level, ...]:
    links = [(part.inside_node, per_node)] + ([(part.between_nodes, nodes * per_node)] if nodes > 1 else [])
    return tuple(Level(link.name, size, link.bandwidth_GBps_per_device, link.latency_s) for link, size in links)


def _spelled(nodes: int, per_node: int, name: str) -> str:
    return f"{per_node}x{name}" if nodes == 1 else f"{nodes}x{per_node}x{name}"


def _evenly(devices: int, limit: int) -> tuple[int, int]:
    """(nodes, devices per node) for that many devices, with the fullest nodes that are all alike."""
    per_node = max(size for size in range(1, limit + 1) if devices % size == 0)
    return devices // per_node, per_node


def _what_was_meant(text: str) -> str:
    plain = text.strip().lower()
    for name in known_devices():
        if plain == name:
            return f"{text.strip()!r} does not say how many: 1x{name} is one device, 8x{name} is a node of eight"
        turned = re.fullmatch(rf"{name}x([0-9]{{1,6}})", plain)
        if turned:
            return f"{text.strip()!r}: the device comes last: did you mean {turned[1]}x{name}?"
    return f"{text.strip()[:60]!r} is not a cluster: {_USAGE} (known devices: {', '.join(known_devices())})"
