"""What is known: the catalog as plain values, and the figures of a cluster that look mistaken beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from shardwise.cluster.catalog import Entry, entry, known_devices
from shardwise.cluster.device import Cluster, Kind
from shardwise.cluster.spelling import ABSTRACT
from shardwise.units import GB

_HIGH, _LOW = 2.0, 4.0
"""A figure is asked about above so many times the highest known one, or below the lowest one by so much."""

_ORDINARY = "cpu"
"""Not an accelerator: its figures are no measure of the others'."""


@dataclass(frozen=True, slots=True)
class Part:
    """One device of the catalog, for a list of them."""

    name: str
    title: str
    example: str
    """A spelling of one domain."""
    peak_dtype: str
    peak_flops_per_s: float
    """Of 16-bit products where it has them."""
    usable_bytes: int
    memory_bytes_per_s: float
    inside: Kind
    inside_bytes_per_s: float
    """Per device, one way, of a ring through one full domain."""
    between_bytes_per_s: float
    domain_devices: int
    devices_per_host: int
    power_W: float
    """0: not known."""
    source: str


@dataclass(frozen=True, slots=True)
class _Figure:
    """A number, and what other numbers it can be held against."""

    place: str
    among: str
    value: float
    unit: str
    may_be_low: bool = False


def known_parts() -> tuple[Part, ...]:
    """All known devices, in alphabetical order."""
    return tuple(map(describe, known_devices()))


def describe(name: str) -> Part:
    """One known device. Raises ClusterError for an unknown name."""
    of = entry(name)
    device, inside, full = of.device, of.inside_node, of.max_devices_per_node
    dtype = next(d for d in ("bfloat16", "float16", *device.peak_flops) if d in device.peak_flops)
    ways = {"switch": 1, "mesh": full - 1, "torus": 2 * of.slices.axes if of.slices else 1}[inside.kind]
    return Part(
        name=name,
        title=device.title,
        example=f"{name}:{'x'.join(['4'] * of.slices.axes)}" if of.slices else f"{full}x{name}",
        peak_dtype=dtype,
        peak_flops_per_s=device.peak_flops[dtype],
        usable_bytes=device.usable_bytes,
        memory_bytes_per_s=device.memory_bytes_per_s,
        inside=inside.kind,
        inside_bytes_per_s=ways * inside.bandwidth_GBps_per_device * GB,
        between_bytes_per_s=of.between_nodes.bandwidth_GBps_per_device * GB,
        domain_devices=full,
        devices_per_host=of.devices_per_host or full,
        power_W=device.power_W_per_device,
        source=of.source,
    )


def questions(cluster: Cluster) -> list[str]:
    """Figures far from those of every known device: more than twice the highest, less than a quarter of the lowest.

    Such as a bandwidth written per node, or for both directions. Each says what was found, what is known and what may
    be meant. Nothing is asked of a device of the catalog with its own network, nor of an abstract one.
    """
    if cluster.device.name in (_ORDINARY, ABSTRACT):
        return []
    asked: list[str] = []
    for figure in _figures(cluster):
        low, high = _range(figure.among)
        if figure.value > _HIGH * high or (figure.value < low / _LOW and not figure.may_be_low):
            found = f"{figure.place} is {figure.value:,.6g} {figure.unit}; known devices have {low:,.6g} to {high:,.6g}"
            asked.append(f"{found}: is it per device, one way, in {figure.unit}?")
    return asked


def _figures(cluster: Cluster) -> Iterator[_Figure]:
    device = cluster.device
    yield _Figure("device.usable_GiB_per_device", "memory", device.usable_GiB_per_device, "GiB")
    bandwidth = device.memory_bandwidth_GBps_per_device
    yield _Figure("device.memory_bandwidth_GBps_per_device", "memory bandwidth", bandwidth, "GB/s")
    for dtype, peak in device.peak_flops.items():
        if dtype in _peaks():
            yield _Figure(f"device.peak_flops.{dtype}", dtype, peak / 1e12, "TFLOP/s")
    for i, level in enumerate(cluster.levels):
        among = "between nodes" if i else f"inside, {level.kind}"
        place = f"levels[{i}].bandwidth_GBps_per_device"
        yield _Figure(place, among, level.bandwidth_GBps_per_device, "GB/s", may_be_low=i > 1)


def _peaks() -> set[str]:
    return {dtype for of in _accelerators() for dtype in of.device.peak_flops}


def _accelerators() -> list[Entry]:
    return [entry(name) for name in known_devices() if name != _ORDINARY]


@cache
def _range(among: str) -> tuple[float, float]:
    """The lowest and the highest known figure of a kind."""
    found: list[float] = []
    for of in _accelerators():
        figures = {
            "memory": of.device.usable_GiB_per_device,
            "memory bandwidth": of.device.memory_bandwidth_GBps_per_device,
            f"inside, {of.inside_node.kind}": of.inside_node.bandwidth_GBps_per_device,
            "between nodes": of.between_nodes.bandwidth_GBps_per_device,
        } | {dtype: peak / 1e12 for dtype, peak in of.device.peak_flops.items()}
        found += [figures[among]] if among in figures else []
    return min(found), max(found)
