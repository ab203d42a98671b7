"""Table 2, placement transitions: what moves when a tensor changes its placement on one mesh axis.

On an axis a tensor is `I` invariant (same value, same gradient), `R` replicated (same value, gradient still to be
summed), `P` a partial sum, or `S(dim)` sharded. Duals: I-I, R-P, S-S. The forward move of an edge `source ->
destination` is `transition(source, destination)`; its backward move is the same table read at
`dual(destination) -> dual(source)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shardwise.collective import Kind


@dataclass(frozen=True, slots=True)
class Placement:
    """`kind` is one of I R P S; `dim` is the cut tensor dim of an S (None of the others)."""

    kind: str
    dim: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("I", "R", "P", "S") or (self.kind == "S") != (self.dim is not None):
            raise ValueError(f"no such placement: {self.kind}, dim {self.dim}")

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind


I = Placement("I")
R = Placement("R")
P = Placement("P")


def S(dim: int) -> Placement:
    """Sharded along tensor dim `dim`."""
    return Placement("S", dim)


class Local(StrEnum):
    """Moves that need no other rank."""

    NOTHING = "nothing"
    SLICE = "slice"
    """keep this rank's part of the destination's dim"""
    PAD = "pad"
    """put this rank's part into a whole tensor of zeros: partial sums that add up to it"""
    MASK = "mask"
    """rank 0 of the group keeps the value, the others hold zeros"""


Move = Kind | Local

_TABLE: dict[str, Move] = {
    "II": Local.NOTHING,
    "IR": Local.NOTHING,
    "IP": Local.MASK,
    "IS": Local.SLICE,
    "RI": Local.NOTHING,
    "RR": Local.NOTHING,
    "RP": Local.MASK,
    "RS": Local.SLICE,
    "PI": Kind.ALL_REDUCE,
    "PR": Kind.ALL_REDUCE,
    "PP": Local.NOTHING,
    "PS": Kind.REDUCE_SCATTER,
    "SI": Kind.ALL_GATHER,
    "SR": Kind.ALL_GATHER,
    "SP": Local.PAD,
    "SS": Kind.ALL_TO_ALL,
}

KNOWN_AS: dict[str, str] = {
    "IR": "Megatron's f; data parallel's parameters",
    "PI": "Megatron's g",
    "SR": "sequence parallelism, into the block; FSDP's parameters",
    "PS": "sequence parallelism, out of the block; FSDP's gradients",
    "SS": "Ulysses; expert dispatch and combine",
}


def dual(placement: Placement) -> Placement:
    """Placement of the gradient of a tensor so placed."""
    if placement.kind == "R":
        return P
    return R if placement.kind == "P" else placement


def transition(source: Placement, destination: Placement) -> Move:
    """The move from one placement to the other; an S(a) -> S(a) is no move."""
    if source == destination:
        return Local.NOTHING
    return _TABLE[source.kind + destination.kind]


@dataclass(frozen=True, slots=True)
class Edge:
    """A change of placement at a fixed place of a block."""

    source: Placement
    destination: Placement

    @property
    def forward(self) -> Move:
        return transition(self.source, self.destination)

    @property
    def backward(self) -> Move:
        return self.dual.forward

    @property
    def dual(self) -> Edge:
        """The edge that the gradient takes."""
        return Edge(dual(self.destination), dual(self.source))

    def __str__(self) -> str:
        return f"{self.source} -> {self.destination}"


def stream_edges(sp: bool) -> tuple[Edge, Edge]:
    """(stream -> R, P -> stream) of the residual stream [tokens, hidden] on tp: invariant, or cut along its tokens."""
    stream = S(0) if sp else I
    return Edge(stream, R), Edge(P, stream)


def _print_table() -> None:
    kinds = (I, R, P, S(0), S(1))
    print(f"{'edge':<12} {'forward':<15} {'backward':<15} known as")
    for source in kinds[:4]:
        for destination in kinds:
            if source.kind != "S" and destination == S(1):
                continue
            edge = Edge(source, destination)
            known = KNOWN_AS.get(source.kind + destination.kind, "") if source != destination else ""
            print(f"{edge!s:<12} {edge.forward:<15} {edge.backward:<15} {known}".rstrip())


if __name__ == "__main__":
    _print_table()
