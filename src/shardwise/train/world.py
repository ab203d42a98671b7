"""World: one rank's place in the mesh, its groups and its labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.collective import Kind, Labels
from shardwise.mesh import COLLECTIVES, Axes, Mesh
from shardwise.plan.shards import COPIES, TWINS
from shardwise.train.comm import Comm, Group, Work

TIED_AXES = ("tied",)
"""Not an axis of the mesh: the pipeline ranks that hold copies of a tied weight."""


class World:
    """Groups are made once, eagerly, in the same order on every rank; a group of one is None and costs nothing.

    `twins` are the pipeline ranks that hold our stages, where a schedule holds them twice; `kv_copies` neighbouring
    tensor-parallel ranks hold the same kv heads.
    """

    def __init__(
        self,
        mesh: Mesh,
        comm: Comm,
        labels: Labels,
        tied: tuple[int, ...] = (),
        twins: tuple[int, ...] = (),
        kv_copies: int = 1,
    ) -> None:
        self.mesh, self.comm, self.labels = mesh, comm, labels
        self.rank = comm.rank
        self.coordinates = mesh.coordinates(self.rank)
        self.groups: dict[Axes, Group | None] = {}
        for axes in COLLECTIVES:
            self.groups[axes] = self._make(axes, mesh.group(self.rank, axes))
        self.groups[COPIES] = self._make(COPIES, mesh.neighbours(self.rank, "tp", kv_copies))
        if mesh.degree("pp") > 1:
            comm.point_to_point_group(mesh.group(self.rank, ("pp",)))
        self.groups[TWINS] = self._make(TWINS, tuple(map(self.peer, twins)))
        # Only some ranks have this one, so it comes last: groups are named by how many came before them.
        mine = self.coordinates["pp"] in tied
        self.groups[TIED_AXES] = self._make(TIED_AXES, tuple(map(self.peer, tied))) if mine else None

    def _make(self, axes: Axes, ranks: tuple[int, ...]) -> Group | None:
        return self.comm.group(axes, ranks) if len(ranks) > 1 else None

    def peer(self, pp_rank: int) -> int:
        """The global rank of another pipeline rank at our place of all other axes."""
        return self.mesh.rank({**self.coordinates, "pp": pp_rank})

    def group(self, *axes: str) -> Group | None:
        return self.groups[axes]

    def size(self, *axes: str) -> int:
        group = self.groups[axes]
        return 1 if group is None else group.size

    def index(self, *axes: str) -> int:
        group = self.groups[axes]
        return 0 if group is None else group.index

    @contextmanager
    def at(self, module: str, phase: str | None = None) -> Iterator[None]:
        """Label what runs inside the block."""
        with self.labels.at(module=module, phase=phase):
            yield

    def all_reduce(self, x: torch.Tensor, axes: Axes, module: str, phase: str | None = None, op: str = "sum") -> None:
        """In place; nothing where the group has one rank."""
        group = self.groups[axes]
        if group is not None:
            with self.labels.at(module=module, phase=phase):
                self.comm.all_reduce(x, group, op).wait()

    def start_all_reduce(self, x: torch.Tensor, axes: Axes, module: str, phase: str | None = None) -> Work | None:
        """The sum under way, in place; None where the group has one rank."""
        group = self.groups[axes]
        if group is None:
            return None
        with self.labels.at(module=module, phase=phase):
            return self.comm.all_reduce(x, group)

    def collect(self, kind: Kind, x: torch.Tensor, axes: Axes, module: str) -> torch.Tensor:
        """A fresh tensor: x [n, ...] gathered, reduce-scattered or exchanged along dim 0."""
        group = self.groups[axes]
        if group is None:
            return x
        n, rest = x.shape[0], x.shape[1:]
        with self.labels.at(module=module):
            if kind is Kind.ALL_GATHER:
                out = x.new_empty((n * group.size, *rest))
                self.comm.all_gather(out, x, group).wait()
            elif kind is Kind.REDUCE_SCATTER:
                out = x.new_empty((n // group.size, *rest))
                self.comm.reduce_scatter(out, x, group).wait()
            else:
                out = torch.empty_like(x)
                self.comm.all_to_all(out, x, group)
        return out
