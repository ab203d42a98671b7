"""Ranks, coordinates and groups: integer arithmetic against its meaning."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.mesh import AXES, EXPERT_AXES, Mesh, with_cp
from shardwise.plan.layout import Layout, parse

DEGREES = st.tuples(*[st.integers(1, 3)] * len(AXES))


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


@pytest.mark.parametrize("n", [1, 2, 4])
def test_neighbours_are_counted_off(n: int) -> None:
    mesh = Mesh((("pp", 2), ("tp", 4), ("in", 3)))
    runs = {mesh.neighbours(rank, "tp", n) for rank in range(24)}
    assert sorted(rank for run in runs for rank in run) == list(range(24))
    for run in runs:
        places = [mesh.coordinates(rank) for rank in run]
        assert [p["tp"] for p in places] == list(range(places[0]["tp"], places[0]["tp"] + n))
        assert len({(p["pp"], p["in"]) for p in places}) == 1
        assert places[0]["tp"] % n == 0


def test_tensor_parallel_ranks_are_neighbours_and_stages_lie_farthest_apart() -> None:
    mesh = mesh_of((16, 1, 128, 1, 8))  # Llama 3 405B on 16,384 devices: pp, dp_replicate, dp_shard, cp, tp
    assert mesh.group(8000, ["tp"]) == tuple(range(8000, 8008))
    assert mesh.group(0, ["pp"]) == tuple(range(0, 16384, 1024))
    assert mesh.group(3, ["dp_shard"]) == tuple(range(3, 1024, 8))


def test_context_parallel_ranks_lie_between_tensor_and_data_parallel_ones() -> None:
    mesh = mesh_of((16, 1, 8, 16, 8))  # the same with sequences of 131,072 tokens
    assert mesh.group(0, ["cp"]) == tuple(range(0, 128, 8))
    assert mesh.group(0, ["dp_shard"]) == tuple(range(0, 1024, 128))


@given(st.sampled_from(["pp", "dp"]), st.sampled_from([0, 1]), *[st.sampled_from([1, 2, 4])] * 6)
def test_experts_see_the_same_ranks(
    order: str, zero: int, tp: int, cp: int, pp: int, ep: int, etp: int, dp: int
) -> None:
    """Both views number all ranks of a stage; an expert-tp and expert-parallel group stays within one stage."""
    layout = Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep,
        etp=etp,
        order=order,
        zero=zero,
        dp_replicate=2 if zero else dp,
        dp_shard=dp if zero else 1,
    )
    whole = 1 if order == "dp" and not zero and pp > 1 and dp > 1 else dp
    assume((whole * cp * tp) % (ep * etp) == 0)
    dense, routed = layout.mesh, layout.expert_mesh
    assert dense.world_size == routed.world_size == layout.world_size
    assert [axis for axis, _ in routed.degrees if axis != "dp_replicate"] == [
        a for a in EXPERT_AXES if a != "dp_replicate"
    ]
    for rank in range(0, layout.world_size, 3):
        inner = routed.group(rank, ["etp", "ep", "edp"])
        assert rank in inner
        stages = {dense.coordinates(r)["pp"] for r in inner}
        assert len(stages) == 1
        if layout.zero:  # cut over the ranks that share the rest of the state
            assert inner == dense.group(rank, ["dp_shard", "cp", "tp"])


def test_expert_axes_of_deepseek_v3() -> None:
    """2,048 devices: 16 stages, and 64 expert-parallel neighbours in each (2412.19437, section 3.1)."""
    layout = parse("pp=16 ep=64 dp=128 zero=1 mb=1")
    assert layout.expert_mesh.group(0, ["ep"]) == tuple(range(64))
    assert layout.expert_mesh.group(5, ["edp"]) == (5, 69)
    assert (layout.edp, layout.expert_replicas) == (2, 1)


def test_with_cp() -> None:
    assert with_cp(("dp_shard",), 1) == ("dp_shard",)
    assert with_cp(("pp", "dp_shard", "tp"), 2) == ("pp", "dp_shard", "cp", "tp")


@pytest.mark.parametrize("rank", [-1, 16])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0 \.\. 15"):
        mesh_of((2, 2, 2, 1, 2)).coordinates(rank)


def test_a_mesh_must_make_sense() -> None:
    with pytest.raises(ValueError, match="below 1"):
        mesh_of((2, 0, 1, 1, 1))
    with pytest.raises(ValueError, match="named twice"):
        Mesh((("tp", 2), ("tp", 2)))
