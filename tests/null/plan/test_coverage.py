"""Model state over all ranks of a small world, element by element: none lost, none held by one rank too many."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pytest

from shardwise.cluster import parse_cluster
from shardwise.model.hf import from_config, load_model, to_config
from shardwise.model.spec import Model, Parameter
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.plan.shards import EXPERTS, Record, Storage, logical_name, rank_units, storage_owner
from tests.support.drawn import drawn

Vector = npt.NDArray[np.int64]
Box = tuple[Vector, ...]

WORLD = 16
SMALL = {
    "llama-3.1-8b": {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 7, "vocab_size": 48},
    "llama-3.1-8b looped": {
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "vocab_size": 48,
        "num_loops": 3,
    },
    "gemma-2-2b": {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 6, "vocab_size": 48},
    "mixtral-8x7b": {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 6, "vocab_size": 48},
    "qwen3-30b-a3b": {
        "hidden_size": 24,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 6,
        "vocab_size": 48,
        "num_experts": 16,
    },
    "deepseek-v3": {
        "hidden_size": 24,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 6,
        "vocab_size": 48,
        "n_routed_experts": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 12,
        "kv_lora_rank": 12,
    },
    "nemotron-3-nano": {
        "hidden_size": 24,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "vocab_size": 48,
        "n_routed_experts": 16,
    },
}
"""Rows that shards do not divide, kv heads that tp is a multiple of, experts, latents, scans, ties, loops, a tail."""


@lru_cache(maxsize=8)
def small(name: str) -> Model:
    return from_config({**to_config(load_model(name.partition(" ")[0])), **SMALL[name]}, f"small {name}")


def layouts(name: str) -> list[Layout]:
    """Of all kinds of cuts; at least one of each ZeRO level."""
    job = Job(small(name), parse_cluster(f"{WORLD}xcpu"), 64, 48)
    each = 1 if job.model.layers > 10 else 3
    return [x for zero in (0, 1, 2, 3) for x in drawn(job, each, zero, lambda x, z=zero: x.zero == z)]


def box(model: Model, layout: Layout, rank: int, p: Parameter, storage: Storage, r: Record) -> Box:
    """Indices of the whole parameter that this rank's shard holds, a vector a dim; padding is left out."""
    dense, routed = layout.mesh.coordinates(rank), layout.expert_mesh.coordinates(rank)
    index: list[Vector] = []
    for letter, local in zip(p.dims, r.shape, strict=True):
        whole = model.dims[letter]
        if letter in "eX":  # the experts of this rank; of each, under expert-tp, some rows
            experts = model.experts // layout.ep
            each = whole // model.experts
            mine = each // layout.etp if letter == "X" else each
            first = routed["etp"] * mine if letter == "X" else 0
            grid = np.arange(experts)[:, None] * each + first + np.arange(mine) + routed["ep"] * experts * each
            index.append(grid.ravel())
        elif letter == "x":
            index.append(routed["etp"] * local + np.arange(local))
        elif len(index) == p.tp_dim:
            # kv heads are copied where tp is larger than their number, a whole number of times.
            parts = whole // local if letter in "kb" else layout.tp
            place = dense["tp"] // (layout.tp // parts)
            index.append(np.minimum(place * local + np.arange(local), whole))
        else:
            index.append(np.arange(whole))
        assert len(index[-1]) == local, (p, letter)
    mesh = layout.expert_mesh if set(storage.shard_axes) & {"edp"} else layout.mesh
    shard = mesh.group(rank, storage.shard_axes).index(rank) if layout.zero else 0
    index[0] = index[0][shard * r.rows : (shard + 1) * r.rows]
    if "v" in p.dims:  # the vocabulary is padded to a multiple of tp
        index[p.dims.index("v")] = index[p.dims.index("v")][index[p.dims.index("v")] < model.vocab]
    return tuple(index)


def held(model: Model, layout: Layout, rank: int) -> Iterator[tuple[Record, Storage, Parameter, Box]]:
    found = rank_units(model, layout, layout.mesh.coordinates(rank)["pp"])
    parameters = {logical_name(model, storage_owner(model, u), p): p for u in found.units for p in u.block.parameters}
    for storage in found.storages.values():
        for r in storage.records:
            p = parameters[r.name]
            yield r, storage, p, box(model, layout, rank, p, storage, r)


@pytest.mark.parametrize("name", SMALL)
def test_every_element_is_held_equally_often(name: str) -> None:
    """By as many ranks as have the same coordinates but for the copies: every rank owns what no other shard has."""
    model = small(name)
    for layout in layouts(name):
        counts: dict[str, Vector] = {}
        copies: dict[str, int] = {}
        for rank in range(WORLD):
            for r, storage, p, where in held(model, layout, rank):
                if r.name not in counts:
                    counts[r.name] = np.zeros([model.dims[d] for d in p.dims], dtype=np.int64)
                counts[r.name][np.ix_(*where)] += 1
                copies[r.name] = expected(layout, p, storage, r, model)
        assert sum(c.size for c in counts.values()) == model.parameters + model.tail_parameters
        wrong = {n: (c.min(), c.max(), copies[n]) for n, c in counts.items() if (c != copies[n]).any()}
        assert not wrong, (str(layout), wrong)


def expected(layout: Layout, p: Parameter, storage: Storage, r: Record, model: Model) -> int:
    """Ranks of a stage over the distinct parts of the parameter, for each copy of the stage and of a tied weight."""
    ranks = layout.world_size // layout.pp
    if p.expert:
        parts = layout.ep * layout.etp * int(storage.shards)
    else:
        whole_kv = max(1, layout.tp // model.kv_heads) if set(p.dims) & set("kb") else 1
        parts = (layout.tp // whole_kv if p.tp_dim is not None else 1) * int(storage.shards)
    return ranks // parts * (1 + storage.twins) * r.copies


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "llama-3.1-8b"])
def test_ranks_of_a_copy_group_hold_the_same_and_of_a_shard_group_nothing_in_common(name: str) -> None:
    """What is summed over copies is the same part; what is scattered over shards are different ones."""
    model = small(name)
    for layout in layouts(name)[::2]:
        parts = [{r.name: (s, w) for r, s, _, w in held(model, layout, rank)} for rank in range(WORLD)]
        for rank, mine in enumerate(parts):
            for parameter, (storage, where) in mine.items():
                mesh = layout.expert_mesh if set(storage.shard_axes) & {"edp"} else layout.mesh
                for other in mesh.group(rank, storage.copy_axes):
                    theirs = parts[other][parameter][1]
                    assert all(np.array_equal(a, b) for a, b in zip(where, theirs, strict=True)), (
                        str(layout),
                        parameter,
                    )
                if layout.zero:
                    for other in mesh.group(rank, storage.shard_axes):
                        rows = parts[other][parameter][1][0]
                        assert other == rank or not np.intersect1d(where[0], rows).size, (str(layout), parameter)


def test_padding_lies_at_the_end_and_nowhere_else() -> None:
    """Shards that rows do not divide: all but the last ones are full."""
    model, layout = small("mixtral-8x7b"), parse("tp=2 ep=2 dp=8 zero=3 mb=1")
    for rank in range(WORLD):
        for r, storage, _, where in held(model, layout, rank):
            mesh = layout.expert_mesh if storage.unit.endswith(EXPERTS) else layout.mesh
            place = mesh.group(rank, storage.shard_axes).index(rank)
            left = r.shape[0] - place * r.rows
            assert len(where[0]) == max(0, min(r.rows, left))
