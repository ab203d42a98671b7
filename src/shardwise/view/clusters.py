"""Clusters: the known devices as a list, one of them in detail, and any cluster as it is understood."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.cluster import Cluster
from shardwise.cluster.catalog import known_devices
from shardwise.cluster.device import Device
from shardwise.cluster.survey import Part, describe, known_parts, questions
from shardwise.plan.plan import load_cluster
from shardwise.units import GB, format_count, format_seconds, gib
from shardwise.view.tables import plain, section


def read(spec: str) -> tuple[Cluster, Part | None]:
    """A known device's name, a cluster's spelling or a file. Raises ClusterError, PlanError or OSError."""
    known = spec.strip().lower() in known_devices()
    cluster = load_cluster(describe(spec.strip().lower()).example if known else spec)
    return cluster, describe(cluster.device.name) if cluster.device.name in known_devices() else None


def list_page(width: int) -> Group:
    """A line each."""
    table = plain(1)
    table.add_column("\nname", no_wrap=True)
    if width >= 110:
        table.add_column("\ndevice", ratio=1)
    heads = ("TFLOP/s\n16-bit", "memory\nGiB", "memory\nGB/s", "inside\nGB/s", "between\nGB/s", "devices\ntogether")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("\nsuch as", no_wrap=True)
    for p in known_parts():
        wide = (p.title,) if width >= 110 else ()
        rates = (p.memory_bytes_per_s, p.inside_bytes_per_s, p.between_bytes_per_s)
        numbers = (_rate(p.peak_flops_per_s / 1e12), f"{gib(p.usable_bytes):,.1f}", *(_gb(x) for x in rates))
        table.add_row(p.name, *wide, *numbers, format_count(p.domain_devices), p.example)
    notes = (
        "GB/s: per device, one way; inside and between the devices joined together. GiB: usable.",
        "Spell a cluster as 64x8xh100 (nodes, devices, name), v5p:16x20x28 (a slice of a torus), "
        "64xC=4.6e14,W=1.8e11,M=95e9 (a device of your own), or write a TOML file. "
        "In detail: shardwise clusters NAME, or shardwise clusters 64x8xh100.",
    )
    return Group(table, Text(), *(Text(note, "dim") for note in notes))


def list_data() -> dict[str, Any]:
    return {"devices": [asdict(p) for p in known_parts()]}


def page(of: Cluster, part: Part | None) -> Group:
    """The levels of its network and its device's figures; `part` is its entry in the catalogue, if it has one."""
    device = of.device
    parts: list[RenderableType] = [
        Text(f"{of.name}: {format_count(of.world_size)} x {device.title}", "bold"),
        section("Network, from the inside out", _levels(of)),
        section("Each device", _device(device)),
    ]
    if part is not None:
        parts += [Text(), Text(f"source: {part.source}", "dim")]
    asked = questions(of)
    if asked:
        parts += [Text(), *(Text(f"warning: {one}", "yellow") for one in asked)]
    return Group(*parts)


def data(of: Cluster, part: Part | None) -> dict[str, Any]:
    """The tables of a cluster's file, with what looks mistaken in them."""
    from shardwise.cluster import to_dict

    return {
        "cluster": to_dict(of),
        "devices": of.world_size,
        "part": None if part is None else asdict(part),
        "questions": questions(of),
    }


def _levels(of: Cluster) -> Table:
    table = plain()
    table.add_column("level", no_wrap=True)
    for head in ("joins", "GB/s a device", "latency", "kind"):
        table.add_column(head, justify="left" if head == "kind" else "right", no_wrap=True)
    table.add_column("adds up in the switch", justify="right")
    for level in of.levels:
        kind = f"{level.kind} {'x'.join(map(str, level.torus))}" if level.torus else level.kind
        efficiency = level.in_network_reduction_efficiency
        added = f"at {100 * efficiency:.0f} % of the rate" if efficiency else "-"
        rate = f"{level.bandwidth_GBps_per_device:,.1f}"
        table.add_row(level.name, format_count(level.size), rate, format_seconds(level.latency_s), kind, added)
    return table


def _device(device: Device) -> Table:
    table = plain()
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    table.show_header = False
    table.add_row(
        "usable memory", f"{gib(device.usable_bytes):,.1f} GiB", "GiB is 2^30 bytes; data sheets say GB, 10^9"
    )
    table.add_row("memory bandwidth", f"{_gb(device.memory_bytes_per_s)} GB/s", "")
    for dtype, peak in device.peak_flops.items():
        table.add_row(f"peak, {dtype}", f"{peak / 1e12:,.0f} TFLOP/s", "dense, of the data sheet")
    for name, value in asdict(device.efficiency).items():
        shown = format_seconds(value) if name.endswith("_s") else f"{100 * value:.0f} %"
        table.add_row(f"prior, {name.removesuffix('_s').replace('_', ' ')}", shown, "uncalibrated")
    assumed = device.assumed_memory
    table.add_row("assumed, context", f"{assumed.context_GiB_per_device:g} GiB", "CUDA context or the like")
    table.add_row("assumed, communicators", f"{assumed.communicator_GiB_per_group:g} GiB", "each group of ranks")
    table.add_row("assumed, allocator", f"{100 * assumed.allocator_margin:.0f} %", "of the tensors")
    if device.power_W_per_device:
        table.add_row("power", f"{device.power_W_per_device:,.0f} W", "")
    return table


def _gb(bytes_per_s: float) -> str:
    return _rate(bytes_per_s / GB)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
