"""Axes, degrees, rank coordinates and groups: integers only.

A mesh is an ordered list of (axis, degree), outermost first. A rank's coordinates are the mixed-radix digits of its
number, so a group along an axis is an arithmetic progression and no group is ever stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Default order, outermost first: tensor parallel ranks are neighbours, pipeline stages lie farthest apart."""

EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")
"""The same ranks as routed experts see them: edp * ep * etp = dp_shard * cp * tp of the dense view."""

DATA = ("dp_replicate", "dp_shard")
"""Axes whose ranks read different sequences."""

SHARDED = ("pp", "dp_shard", "tp")
"""Axes along which ranks may own different elements of the model state: the clip norm is summed over these."""

EXPERT_SHARDED = ("ep", "etp")
"""Axes of the expert view along which experts differ, beside SHARDED: without ZeRO data parallel ranks are among
them."""

REPORT = ("pp", *DATA)
"""Axes over which the loss is summed, so that every rank can print it."""

Axes = tuple[str, ...]

COLLECTIVES: tuple[Axes, ...] = (("tp",), ("dp_shard",), ("dp_replicate",), DATA, REPORT, SHARDED)
"""Groups in which a rank takes part in collectives, in the order in which they are made."""

EXPERT_COLLECTIVES: tuple[Axes, ...] = (("ep",), ("etp",), ("edp",))
"""The same of the expert view, beside those of the dense one."""


def with_cp(axes: Axes, cp: int) -> Axes:
    """Axes over which tokens or state are cut, and context parallelism where there is one: it cuts a sequence's
    tokens, and its ranks share the state, as data parallel ranks do."""
    if cp == 1:
        return axes
    return tuple(a for a in AXES if a in axes or a == "cp")


def communicators(parallel: Iterable[str]) -> int:
    """Distinct groups of more than one rank, if these are the axes with a degree above 1."""
    wide = set(parallel)
    cp = 2 if "cp" in wide else 1
    dense = [axes if axes == ("tp",) or axes == ("dp_replicate",) else with_cp(axes, cp) for axes in COLLECTIVES]
    ring = [("cp",)] if cp > 1 else []
    return len({frozenset(wide & set(axes)) for axes in (*dense, *ring, *EXPERT_COLLECTIVES)} - {frozenset[str]()})


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ordered (axis, degree) pairs, outermost first; `world_size` is the product of the degrees."""

    degrees: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if len({axis for axis, _ in self.degrees}) != len(self.degrees):
            raise ValueError(f"an axis is named twice: {self.degrees}")
        if any(degree < 1 for _, degree in self.degrees):
            raise ValueError(f"a degree is below 1: {self.degrees}")

    @property
    def world_size(self) -> int:
        return prod(degree for _, degree in self.degrees)

    def degree(self, axes: str | Iterable[str]) -> int:
        """Number of ranks in a group along one axis, or along several axes together."""
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        table = dict(self.degrees)
        return prod(table[axis] for axis in wanted)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> position of `rank` along it. Raises ValueError outside 0 .. world_size - 1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0 .. {self.world_size - 1}")
        found: dict[str, int] = {}
        for axis, degree in reversed(self.degrees):
            rank, found[axis] = divmod(rank, degree)
        return found

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Inverse of `coordinates`."""
        number = 0
        for axis, degree in self.degrees:
            number = number * degree + coordinates[axis]
        return number

    def neighbours(self, rank: int, axis: str, n: int) -> tuple[int, ...]:
        """Global ranks, ascending, of the n positions along `axis`, counted off from its first; `rank` is one."""
        here = self.coordinates(rank)
        first = here[axis] - here[axis] % n
        return tuple(self.rank({**here, axis: first + i}) for i in range(n))

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Global ranks, ascending, that share every coordinate of `rank` but those of `axes`."""
        here = self.coordinates(rank)
        wanted = set(axes)
        ranges = [range(d) if axis in wanted else (here[axis],) for axis, d in self.degrees]
        names = [axis for axis, _ in self.degrees]
        return tuple(self.rank(dict(zip(names, point, strict=True))) for point in itertools.product(*ranges))
