"""Ranks, coordinates and groups: integer arithmetic against its meaning."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.mesh import AXES, Mesh

DEGREES = st.tuples(*[st.integers(1, 4)] * 4)


def mesh_of(degrees: tuple[int, ...]) -> Mesh:
    return Mesh(tuple(zip(AXES, degrees, strict=True)))


@given(DEGREES, st.integers(0, 10**6))
def test_rank_and_coordinates_are_inverse(degrees: tuple[int, ...], seed: int) -> None:
    mesh = mesh_of(degrees)
    rank = seed % mesh.world_size
    coordinates = mesh.coordinates(rank)
    assert mesh.rank(coordinates) == rank
    assert all(0 <= coordinates[axis] < mesh.degree(axis) for axis in AXES)


@given(DEGREES, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world(degrees: tuple[int, ...], axes: set[str]) -> None:
    """The groups along any set of axes have equal sizes, no rank is in two, and each group agrees on the others."""
    mesh = mesh_of(degrees)
    groups = {mesh.group(rank, axes) for rank in range(mesh.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        assert len(group) == prod(mesh.degree(axis) for axis in axes)
        assert list(group) == sorted(group)
        rest = {tuple(mesh.coordinates(r)[a] for a in AXES if a not in axes) for r in group}
        assert len(rest) == 1


def test_tensor_parallel_ranks_are_neighbours_and_stages_lie_farthest_apart() -> None:
    mesh = mesh_of((16, 1, 128, 8))  # Llama 3 405B on 16,384 devices: pp, dp_replicate, dp_shard, tp
    assert mesh.group(8000, ["tp"]) == tuple(range(8000, 8008))
    assert mesh.group(0, ["pp"]) == tuple(range(0, 16384, 1024))
    assert mesh.group(3, ["dp_shard"]) == tuple(range(3, 1024, 8))


@pytest.mark.parametrize("rank", [-1, 16])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0 \.\. 15"):
        mesh_of((2, 2, 2, 2)).coordinates(rank)


def test_a_mesh_must_make_sense() -> None:
    with pytest.raises(ValueError, match="below 1"):
        mesh_of((2, 0, 1, 1))
    with pytest.raises(ValueError, match="named twice"):
        Mesh((("tp", 2), ("tp", 2)))
