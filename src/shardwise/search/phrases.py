"""Pieces of the sentences that explain: numbers with their units, and where a group of ranks lies."""

from __future__ import annotations

from shardwise.cluster.device import Cluster, Level
from shardwise.cluster.topology import bandwidth, level_of_group
from shardwise.plan.layout import CP_KINDS, DEFAULT_SCHEDULE, ORDERS, Layout
from shardwise.simulate import stage, step, unit
from shardwise.units import GB, format_bytes, format_count, format_seconds

_NAMES = {
    "nvlink": "NVLink",
    "infiniband": "InfiniBand",
    "ethernet": "Ethernet",
    "ici": "ICI",
    "dcn": "the data-centre network",
    "xgmi": "xGMI",
}
"""How level names of the catalogue are written in a sentence; any other stands as it is."""


seconds, size = format_seconds, format_bytes

SAME = 0.0005
"""Steps that differ by a smaller share take equally long."""

CAUSES = {
    unit.COMPUTE: "computing",
    unit.RECOMPUTE: "recomputing",
    unit.TP: "tensor-parallel communication",
    unit.CP: "context-parallel communication",
    unit.EP: "expert-parallel communication",
    stage.GATHER: "gathering parameters",
    stage.REDUCE: "reducing gradients",
    step.TRANSFER: "messages between stages",
    step.BUBBLE: "waiting in the pipeline (bubble)",
    step.OPTIMIZER: "the optimizer's step",
}
"""What the parts of a step are called."""


def percent(share: float) -> str:
    """`31 %`, `2.4 %`, `less than 0.1 %`; of the absolute value."""
    size = 100 * abs(share)
    if size < 0.1:
        return "less than 0.1 %"
    return f"{size:,.0f} %" if size >= 9.95 else f"{size:.1f} %"


def slower(share: float, than: str = "") -> str:
    """`takes 31 % longer than the best one`, `takes 2.4 % less time`, `takes as long`: a step against another one."""
    if abs(share) < SAME:
        return f"takes as long{' as ' * bool(than)}{than}"
    return f"takes {percent(share)} {'longer' if share > 0 else 'less time'}{' than ' * bool(than)}{than}"


def change(share: float) -> str:
    """`31 % more`, `2.4 % less`, `no change`."""
    return "no change" if abs(share) < SAME else f"{percent(share)} {'more' if share > 0 else 'less'}"


def count(n: int, what: str) -> str:
    """`1 sequence`, `2,048 sequences`."""
    return f"{format_count(n)} {what}{'' if n == 1 else 's'}"


def listed(items: list[str], last: str = "and") -> str:
    """`a, b and c`."""
    return f" {last} ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def level_name(level: Level) -> str:
    return _NAMES.get(level.name, level.name)


def rate(bytes_per_s: float) -> str:
    """`370 GB/s`, `1.6 GB/s`: a device's, one way."""
    value = bytes_per_s / GB
    return f"{value:,.0f} GB/s" if value >= 9.95 else f"{value:.1f} GB/s"


def domain(cluster: Cluster) -> str:
    """What the fast domain is called: a node, a rack's domain, a slice."""
    return "slice" if cluster.levels[0].kind == "torus" else "node"


def place(cluster: Cluster, group: list[tuple[int, int]], ring: bool = True) -> str:
    """`stays inside a node (NVLink, 370 GB/s)` or `crosses nodes (InfiniBand, 50 GB/s)`, of a group of ranks: what a
    ring brings each of them, or not in a ring, its own link."""
    level = level_of_group(cluster, group)
    inside = level is cluster.levels[0]
    where = f"stays inside a {domain(cluster)}" if inside else f"crosses {domain(cluster)}s"
    bytes_per_s = bandwidth(cluster, group) if ring else level.bytes_per_s
    return f"{where} ({level_name(level)}, {rate(bytes_per_s)})"


def strides(layout: Layout) -> dict[str, int]:
    """Ranks between neighbours along each axis of the dense mesh."""
    found, stride = dict[str, int](), 1
    for axis, degree in reversed(layout.mesh.degrees):
        found[axis] = stride
        stride *= degree
    return found


_NEUTRAL = {
    **dict.fromkeys(("tp", "sp", "cp", "pp", "ep", "etp", "dp"), "1"),
    "cp_kind": CP_KINDS[0],
    "zero": "0",
    "schedule": DEFAULT_SCHEDULE,
    "split": "default",
    "recompute": "none",
    "order": ORDERS[0],
}
"""What a key is where a layout's text leaves it out; of the data-parallel degrees, `dp` alone says it."""


def difference(wanted: Layout, given: Layout) -> str:
    """The words that make one layout of another, as `tp=16 dp=8`; `the same layout` for none."""
    there, here = _words(wanted), _words(given)
    left_out = {key: _NEUTRAL[key] for key in here if key not in there and key in _NEUTRAL}
    if "dp_shard" in there:
        left_out.pop("dp", None)
    new = {key: value for key, value in there.items() if here.get(key) != value} | left_out
    return " ".join(f"{key}={value}" for key, value in new.items()) or "the same layout"


def _words(layout: Layout) -> dict[str, str]:
    return dict(word.split("=") for word in str(layout).split())


_ACTIONS = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "backward"}


def action(text: str) -> str:
    """`forward of stage 3`, of a MemoryBreakdown's action."""
    op, _, rest = text.partition(" ")
    return f"{_ACTIONS[op]} {rest}" if op in _ACTIONS else text
