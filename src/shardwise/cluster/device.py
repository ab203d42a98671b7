"""What a cluster is made of: `Device`, `Level`, `Cluster`.

A network without a short spelling is written as levels in a file, innermost first. Two data centres of 64 nodes, each
with a spine that carries a quarter of what its leaves could send, joined by 100 Gb/s a node:

    [[levels]]
    name = "nvlink"
    size = 8
    bandwidth_GBps_per_device = 370
    latency_s = 3.4e-6

    [[levels]]
    name = "leaf"
    size = 128
    bandwidth_GBps_per_device = 50
    latency_s = 14e-6

    [[levels]]
    name = "spine"
    size = 512
    bandwidth_GBps_per_device = 50
    latency_s = 18e-6
    oversubscription = 4

    [[levels]]
    name = "wan"
    size = 1024
    bandwidth_GBps_per_device = 1.5625
    latency_s = 5e-3

A torus is the innermost level: `kind = "torus"`, `torus = [16, 20, 28]`, `wraps = [true, true, true]`; its bandwidth
is that of one link, one way, of which an axis that wraps has two at each device.

The fields are the keys of a cluster file, so they carry the unit and "per what"; the properties give the same in SI
base units, which is what the program computes with. Every number is one that a person measured, read in a data sheet
or assumed: `catalog/*.toml` says which.
"""

# No `from __future__ import annotations` here: cattrs reads the Bounds off the fields, and drops them from texts.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Annotated, Final, Literal, NamedTuple

from shardwise.units import DTYPE_BYTES, GB, GIB

MAX_DEVICES: Final = 2**20
"""More devices than any cluster has: beyond it, a count is taken for a slip of the pen."""

MAX_LEVELS: Final = 8
MAX_AXES: Final = 6


class ClusterError(ValueError):
    """A cluster that cannot be: all faults at once, each with its place, what was found and what was wanted."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


class Bounds(NamedTuple):
    """Limits of a field in a file, wide enough for every known part: outside, the unit was mistaken."""

    low: float
    high: float
    unit: str


Count = Annotated[int, Bounds(1, MAX_DEVICES, "")]
FlopsPerS = Annotated[float, Bounds(1e6, 1e20, "FLOP/s")]
GiB = Annotated[float, Bounds(0, 16384, "GiB")]
UsableGiB = Annotated[float, Bounds(0.001, 16384, "GiB")]
GBps = Annotated[float, Bounds(1e-3, 1e6, "GB/s")]
Seconds = Annotated[float, Bounds(0, 0.1, "s")]
Efficiency01 = Annotated[float, Bounds(0.001, 1, "of the peak")]
Margin = Annotated[float, Bounds(0, 2, "of the tensor bytes")]
Watts = Annotated[float, Bounds(0, 50_000, "W")]
Oversubscription = Annotated[float, Bounds(1, 1024, "to 1")]
ReductionShare = Annotated[float, Bounds(0, 1, "of the bandwidth")]
Kind = Literal["switch", "mesh", "torus"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What is reached of the peaks; priors until `calibrate` has measured them."""

    matmul: Efficiency01
    """Of `peak_flops`, by a large product with well-aligned dims."""
    memory: Efficiency01
    """Of the memory bandwidth, by an elementwise kernel."""
    attention_forward: Efficiency01
    """Of `peak_flops`, by a fused attention kernel."""
    attention_backward: Efficiency01
    launch_s: Seconds
    """Time from one kernel's end to the next one's start, at the least."""


@dataclass(frozen=True, slots=True)
class AssumedMemory:
    """Bytes that no tensor accounts for: counted when fit is judged, never compared with a measurement."""

    context_GiB_per_device: GiB
    """Driver context and library handles."""
    communicator_GiB_per_group: GiB
    """Buffers of each communicator that a rank joins."""
    allocator_margin: Margin
    """Reserved but unused by tensors, as a share of the tensor bytes at the peak."""

    @property
    def context_bytes(self) -> int:
        return round(self.context_GiB_per_device * GIB)

    @property
    def communicator_bytes(self) -> int:
        return round(self.communicator_GiB_per_group * GIB)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: what a rank runs on."""

    name: str
    """As spelled after `--on 8x`."""
    title: str
    usable_GiB_per_device: UsableGiB
    """What the driver reports, never the marketing figure: an "80 GB" part has 79.2 GiB."""
    memory_bandwidth_GBps_per_device: GBps
    efficiency: Efficiency
    assumed_memory: AssumedMemory
    peak_flops: Mapping[str, FlopsPerS] = field(hash=False)
    """FLOP/s of dense products in each dtype, from the data sheet (multiply and add are two)."""
    power_W_per_device: Watts = 0
    """Thermal design power, or the device's share of its system; 0: not known. The file says which."""

    def __post_init__(self) -> None:
        unknown = [dtype for dtype in self.peak_flops if dtype not in DTYPE_BYTES]
        if unknown or not self.peak_flops:
            found = ", ".join(map(repr, unknown)) if unknown else "nothing"
            raise ClusterError([f"peak_flops: found {found}; wanted some of {', '.join(DTYPE_BYTES)}"])

    @property
    def usable_bytes(self) -> int:
        return round(self.usable_GiB_per_device * GIB)

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak of the memory; multiply by `efficiency.memory` for what a kernel reaches."""
        return self.memory_bandwidth_GBps_per_device * GB


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network: domains of `size` neighbouring ranks, joined by links of one kind."""

    name: str
    size: Count
    """Devices under one such domain; rank r is in domain r // size."""
    bandwidth_GBps_per_device: GBps
    """One way, never the sum of both directions. By `kind`: all that a ring brings through a switch (bus bandwidth);
    the link of one pair in a mesh; one link of a torus."""
    latency_s: Seconds
    """Of one hop: the alpha of a collective's cost."""
    kind: Kind = "switch"
    """`mesh`: each pair of the devices has a link of its own; `torus`: neighbours along each axis have one."""
    oversubscription: Oversubscription = 1
    """Divides the bandwidth of the groups that cross this level."""
    in_network_reduction_efficiency: ReductionShare = 0
    """Share of the bandwidth at which the switch itself adds (NVLS, SHARP); 0: it does not."""
    torus: tuple[Count, ...] = ()
    """Devices along each axis, of a torus alone. Rank order is row-major: neighbours on the last axis come first."""
    wraps: tuple[bool, ...] = ()
    """Which axes of the torus are rings; the others are lines."""

    def __post_init__(self) -> None:
        faults: list[str] = []
        if self.kind != "torus" and (self.torus or self.wraps):
            faults.append(f"torus: found on a level of kind {self.kind!r}; wanted kind = 'torus', or no axes")
        elif self.kind == "torus" and not 1 <= len(self.torus) <= MAX_AXES:
            faults.append(f"torus: found {len(self.torus):,} axes; wanted 1 to {MAX_AXES}, such as [16, 20, 28]")
        elif self.kind == "torus":
            if prod(self.torus) != self.size:
                faults.append(
                    f"torus: found {'x'.join(map(str, self.torus))}; wanted axes that multiply to {self.size}"
                )
            if len(self.wraps) != len(self.torus):
                faults.append(f"wraps: found {len(self.wraps):,} values; wanted one for each of {len(self.torus)} axes")
        if self.kind != "switch" and self.in_network_reduction_efficiency:
            faults.append("in_network_reduction_efficiency: only a switch adds; wanted 0, or kind = 'switch'")
        if faults:
            raise ClusterError(faults)

    @property
    def bytes_per_s(self) -> float:
        """Per device, one way, of a group that crosses this level."""
        return self.bandwidth_GBps_per_device * GB / self.oversubscription


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal devices. Rank r is device r % devices_per_node of node r // devices_per_node."""

    name: str
    nodes: Count
    devices_per_node: Count
    device: Device
    levels: tuple[Level, ...]
    """Innermost first; the innermost is a node's own network, the outermost holds all devices."""

    def __post_init__(self) -> None:
        faults: list[str] = []
        sizes = [level.size for level in self.levels]
        if self.world_size > MAX_DEVICES:
            faults.append(f"nodes: {self.world_size:,} devices in all; at most {MAX_DEVICES:,} are planned for")
        if not sizes:
            faults.append("levels: empty; wanted at least the network inside a node")
        elif len(sizes) > MAX_LEVELS:
            raise ClusterError([*faults, f"levels: found {len(sizes):,}; at most {MAX_LEVELS} are planned for"])
        elif sizes[0] != self.devices_per_node or sizes[-1] != self.world_size:
            faults.append(
                f"levels: sizes are {sizes}; wanted the first to be devices_per_node = {self.devices_per_node} "
                f"and the last to be nodes * devices_per_node = {self.world_size}"
            )
        for i, (inner, outer) in enumerate(pairwise(sizes)):
            if outer <= inner or outer % inner:
                faults.append(f"levels[{i + 1}].size: found {outer}; wanted a larger multiple of the {inner} inside it")
        faults += [
            f"levels[{i}].kind: found {level.kind!r}; wanted 'switch': only levels[0], a node's own network, is another"
            for i, level in enumerate(self.levels)
            if i and level.kind != "switch"
        ]
        if faults:
            raise ClusterError(faults)

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node
