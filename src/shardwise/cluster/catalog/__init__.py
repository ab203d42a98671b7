"""The known devices, one TOML file each: what was measured, read or assumed, with its source beside it.

A file may say `like = "h100"`: it then holds only what differs from that one.
"""

# No `from __future__ import annotations` here: cattrs reads the Bounds off the fields, and drops them from texts.

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Annotated, Any

from shardwise.cluster.convert import structure
from shardwise.cluster.device import (
    MAX_AXES,
    MAX_DEVICES,
    Bounds,
    ClusterError,
    Count,
    Device,
    GBps,
    Kind,
    ReductionShare,
    Seconds,
)


@dataclass(frozen=True, slots=True)
class Link:
    """A level of the network, before it is known how many devices lie under it; the keys are those of `Level`."""

    name: str
    bandwidth_GBps_per_device: GBps
    latency_s: Seconds
    kind: Kind = "switch"
    in_network_reduction_efficiency: ReductionShare = 0


@dataclass(frozen=True, slots=True)
class Slices:
    """How the devices of a torus are handed out, and which axes of a slice are rings."""

    axes: Annotated[int, Bounds(1, MAX_AXES, "")]
    wrap_multiple: Count
    """An axis is a ring if its length is a multiple of this."""
    wraps_together: bool = False
    """All axes are rings, or none is."""

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which axes of a slice of that shape are rings."""
        found = [length % self.wrap_multiple == 0 for length in shape]
        return (all(found),) * len(shape) if self.wraps_together else tuple(found)


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the catalog: a device, and the networks that it usually comes with."""

    source: str
    """Where the figures were read that no comment beside them gives another source for."""
    max_devices_per_node: Count
    """One domain of the innermost network: a node, a rack of one NVLink domain, a pod of a torus."""
    device: Device
    inside_node: Link
    between_nodes: Link
    devices_per_host: Annotated[int, Bounds(0, MAX_DEVICES, "")] = 0
    """Where a host has fewer than a domain; 0: it has as many."""
    slices: Slices | None = None


@cache
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
        raise ClusterError([f"no device is named {name[:40]!r}{hint} (known: {', '.join(known)})"])
    return structure(_tables(name), Entry)


def _tables(name: str) -> dict[str, Any]:
    """The file of a device, laid over the one that it is like."""
    tables = tomllib.loads((resources.files(__name__) / f"{name}.toml").read_text("utf-8"))
    base = tables.pop("like", None)
    return _over(_tables(base), tables) if base else tables


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    return merged | {key: _over(below[key], above[key]) for key in below.keys() & above if isinstance(above[key], dict)}
