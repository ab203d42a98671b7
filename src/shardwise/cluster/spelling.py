"""The spelling of a cluster: `64x8xh100`, `2xv5p:16x20x28`, `64xC=4.6e14,W=1.8e11,M=95e9`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite, prod
from typing import Final

from shardwise.cluster.catalog import Entry, Link, entry, known_devices
from shardwise.cluster.convert import structure
from shardwise.cluster.device import MAX_DEVICES, AssumedMemory, Cluster, ClusterError, Device, Efficiency, Level
from shardwise.units import GB, GIB

_NODES: Final = re.compile(r"(?:([+-]?[0-9]{1,9})x)?([+-]?[0-9]{1,9})x([a-z][a-z0-9_.-]*)")
_SLICES: Final = re.compile(r"(?:([+-]?[0-9]{1,9})x)?([a-z][a-z0-9_.-]*):([0-9]{1,9}(?:x[0-9]{1,9})*)")
_ABSTRACT: Final = re.compile(r"([+-]?[0-9]{1,9})x([a-z]+=.*)")
_USAGE: Final = (
    "write NODESxDEVICESxNAME, such as 64x8xh100, or DEVICESxNAME for one node, such as 8xh100; "
    "a slice of a torus as v5p:16x20x28; a device of your own as 64xC=4.6e14,W=1.8e11,M=95e9"
)

ABSTRACT: Final = "abstract"
"""Name of the device of a spelling that gives its figures."""

_FIGURES: Final[Mapping[str, tuple[str, float, float]]] = {
    "C": ("FLOP/s of BF16 products", 1e6, 1e20),
    "W": ("bytes/s to the other devices, one way", 1e6, 1e15),
    "M": ("bytes of memory", 2**21, 2**44),
    "H": ("bytes/s of the memory", 1e6, 1e15),
}
"""Keys of an abstract device: what they are, and the least and the most of it."""

_NO_LIMIT: Final = {"H": 1e15}


def parse_cluster(text: str) -> Cluster:
    """A cluster as it is spelled:

    - `64x8xh100`, `8xh100`: nodes of a known device, all in one network; `4x72xgb200`: racks of one NVLink domain;
    - `v5p:16x20x28`, `2xv5p:16x20x28`: slices of a torus, the last axis' neighbours are neighbouring ranks;
    - `64xC=4.6e14,W=1.8e11,M=95e9`: devices of C FLOP/s, W bytes/s each way and M bytes (and H bytes/s of memory) on
      one ideal switch: every peak is reached, nothing has latency, no memory is set aside.

    Raises ClusterError: what is wrong and, where it can be told, the spelling that is meant.
    """
    plain = text.strip().lower()
    if len(plain) <= 200:
        if match := _ABSTRACT.fullmatch(plain):
            return _abstract(_count(match[1], text), match[2])
        if match := _SLICES.fullmatch(plain):
            return _slices(_count(match[1] or "1", text), entry(match[2]), match[3], text)
        if match := _NODES.fullmatch(plain):
            return _nodes(_count(match[1] or "1", text), _count(match[2], text), entry(match[3]), text)
    raise ClusterError([_what_was_meant(text)])


def from_dict(data: Mapping[str, object] | str) -> Cluster:
    """A cluster as a plan file holds it: the tables of `to_dict`, or a spelling of `parse_cluster`.

    Raises ClusterError that lists every fault with the field's path and what was wanted.
    """
    return parse_cluster(data) if isinstance(data, str) else structure(data, Cluster)


def _count(number: str, text: str) -> int:
    if int(number) < 1:
        raise ClusterError([f"{text.strip()!r}: a cluster has at least 1 node of at least 1 device; {_USAGE}"])
    return int(number)


def _refuse_too_many(devices: int, text: str) -> None:
    if devices > MAX_DEVICES:
        raise ClusterError([f"{text.strip()!r} is {devices:,} devices; at most {MAX_DEVICES:,} are planned for"])


def _nodes(nodes: int, per_node: int, part: Entry, text: str) -> Cluster:
    devices, name, limit = nodes * per_node, part.device.name, part.max_devices_per_node
    _refuse_too_many(devices, text)
    if part.slices:
        meant = _times(*_as_slices(devices, limit, part.slices.axes), name)
        raise ClusterError([f"{name} comes in slices of a torus, spelled by their axes: did you mean {meant}?"])
    if per_node > limit:
        fuller, size = _evenly(devices, limit)
        meant = f"{size}x{name}" if fuller == 1 else f"{fuller}x{size}x{name}"
        raise ClusterError([f"one node holds {limit} {name.upper()}: did you mean {meant}?"])
    levels = [_level(part.inside_node, per_node)] + ([_level(part.between_nodes, devices)] if nodes > 1 else [])
    spelled = f"{per_node}x{name}" if nodes == 1 else f"{nodes}x{per_node}x{name}"
    return Cluster(spelled, nodes, per_node, part.device, tuple(levels))


def _slices(slices: int, part: Entry, axes: str, text: str) -> Cluster:
    name, limit, shape = part.device.name, part.max_devices_per_node, tuple(map(int, axes.split("x")))
    if not part.slices:
        meant = f"{limit}x{name} or 4x{limit}x{name}"
        raise ClusterError([f"{name} is not joined as a torus: write nodes and devices, such as {meant}"])
    size = prod(shape)
    if size < 1 or len(shape) > part.slices.axes:
        wanted = (
            f"1 to {part.slices.axes} axes of at least 1 device, such as {name}:{'x'.join(['4'] * part.slices.axes)}"
        )
        raise ClusterError([f"{text.strip()[:60]!r}: a slice of {name} has {wanted}"])
    _refuse_too_many(slices * size, text)
    if size > limit:
        meant = _times(*_as_slices(slices * size, limit, part.slices.axes), name)
        raise ClusterError([f"one slice of {name} has at most {limit:,} devices, not {size:,}: did you mean {meant}?"])
    shape += (1,) * (part.slices.axes - len(shape))
    inside = _level(part.inside_node, size, shape, part.slices.wraps(shape))
    levels = [inside] + ([_level(part.between_nodes, slices * size)] if slices > 1 else [])
    return Cluster(_times(slices, shape, name), slices, size, part.device, tuple(levels))


def _level(link: Link, size: int, torus: tuple[int, ...] = (), wraps: tuple[bool, ...] = ()) -> Level:
    return Level(
        name=link.name,
        size=size,
        bandwidth_GBps_per_device=link.bandwidth_GBps_per_device,
        latency_s=link.latency_s,
        kind=link.kind,
        in_network_reduction_efficiency=link.in_network_reduction_efficiency,
        torus=torus,
        wraps=wraps,
    )


def _times(slices: int, shape: tuple[int, ...], name: str) -> str:
    spelled = f"{name}:{'x'.join(map(str, shape))}"
    return spelled if slices == 1 else f"{slices}x{spelled}"


def _abstract(devices: int, figures: str) -> Cluster:
    given, faults = _read_figures(figures)
    if devices > MAX_DEVICES:
        faults.append(f"found {devices:,} devices; at most {MAX_DEVICES:,} are planned for")
    if faults:
        raise ClusterError([f"a device of your own: {fault}" for fault in faults])
    name = f"{devices}x" + ",".join(f"{key}={_figure(given[key])}" for key in _FIGURES if key in given)
    device = Device(
        name=ABSTRACT,
        title="a device of your own",
        usable_GiB_per_device=given["M"] / GIB,
        memory_bandwidth_GBps_per_device=given.get("H", _NO_LIMIT["H"]) / GB,
        efficiency=Efficiency(matmul=1, memory=1, attention_forward=1, attention_backward=1, launch_s=0),
        assumed_memory=AssumedMemory(0, 0, 0),
        peak_flops={"bfloat16": given["C"], "float16": given["C"]},
    )
    return Cluster(name, 1, devices, device, (Level("links", devices, given["W"] / GB, 0),))


def _figure(value: float) -> str:
    """As short as it can be read back: 4.6e14."""
    short = f"{value:g}".replace("e+", "e")
    return short if float(short) == value else f"{value:.15g}"


def _read_figures(text: str) -> tuple[dict[str, float], list[str]]:
    """`c=4.6e14,w=...` as values by key, and all that is wrong with them."""
    given, faults = dict[str, float](), list[str]()
    for item in text.split(","):
        key, _, number = item.strip().partition("=")
        key = key.strip().upper()
        if key not in _FIGURES:
            faults.append(
                f"found {item.strip()[:30]!r}; wanted {', '.join(f'{k}= {_FIGURES[k][0]}' for k in _FIGURES)}"
            )
            continue
        what, least, most = _FIGURES[key]
        value = _number(number)
        if key in given:
            faults.append(f"{key} is given twice")
        elif not least <= value <= most:
            faults.append(f"{key} is {number.strip()[:30]!r}; wanted {what}, from {least:g} to {most:g}")
        given[key] = value
    missing = [key for key in _FIGURES if key not in given and key not in _NO_LIMIT]
    return given, faults + [f"{key} is missing; wanted {_FIGURES[key][0]}" for key in missing]


def _number(text: str) -> float:
    """Not a number for anything but plain digits."""
    if not re.fullmatch(r"\s*[+-]?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]{1,3})?\s*", text):
        return float("nan")
    value = float(text)
    return value if isfinite(value) else float("nan")


def _evenly(devices: int, limit: int) -> tuple[int, int]:
    """(nodes, devices per node) for that many devices, with the fullest nodes that are all alike."""
    per_node = max(size for size in range(1, limit + 1) if devices % size == 0)
    return devices // per_node, per_node


def _as_slices(devices: int, limit: int, axes: int) -> tuple[int, tuple[int, ...]]:
    """(slices, shape): the fullest slices that are all alike, as near to a cube as they come."""
    slices, left = _evenly(devices, limit)
    shape: list[int] = []
    for axis in range(axes, 0, -1):
        near = left ** (1 / axis)
        shape.append(min((n for n in range(1, left + 1) if left % n == 0), key=lambda n: abs(n - near)))
        left //= shape[-1]
    return slices, tuple(sorted(shape))


def _what_was_meant(text: str) -> str:
    plain = text.strip().lower()
    for name in known_devices():
        if plain == name:
            of = entry(name)
            meant = (
                f"{name}:{'x'.join(['4'] * of.slices.axes)} is a slice" if of.slices else f"8x{name} is eight of them"
            )
            return f"{text.strip()!r} does not say how many: {meant}"
        turned = re.fullmatch(rf"{re.escape(name)}x([0-9]{{1,6}})", plain)
        if turned:
            return f"{text.strip()!r}: the device comes last: did you mean {turned[1]}x{name}?"
    return f"{text.strip()[:60]!r} is not a cluster: {_USAGE}"
