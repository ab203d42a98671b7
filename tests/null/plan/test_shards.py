"""Placement records: every element of every parameter has an owner, padding is told apart, ties have two copies."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from shardwise.model.hf import from_config, load_model
from shardwise.model.spec import Model
from shardwise.plan.buckets import tensor_moves
from shardwise.plan.layout import Layout, parse
from shardwise.plan.shards import COPIES, TIED, rank_units, stages_of, tied_ranks
from tests.support.front import cases
from tests.support.models import tiny


def held(model: Model, layout: Layout) -> dict[str, int]:
    """Elements of each parameter over one tp group's ranks of all pipeline ranks, copies counted once."""
    found: dict[str, int] = {}
    for pp_rank in range(layout.pp):
        for storage in rank_units(model, layout, pp_rank).storages.values():
            for r in storage.records:
                found[r.name] = r.numel * (layout.tp if r.tp_dim is not None else 1)
    return found


@pytest.mark.parametrize("text", ["mb=1", "tp=8 pp=4 mb=1", "pp=8 schedule=interleaved:2 dp=8 zero=3 mb=1"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b"])
def test_every_parameter_is_held(name: str, text: str) -> None:
    model = load_model(name)
    assert sum(held(model, parse(text)).values()) == model.parameters


def test_shards_cover_every_row_with_padding_at_the_end() -> None:
    for case in cases(8):
        for pp_rank in range(case.layout.pp):
            for storage in rank_units(case.model, case.layout, pp_rank).storages.values():
                offset = 0
                for r in storage.records:
                    assert r.offset == offset
                    assert (r.rows - 1) * storage.shards < r.shape[0] <= r.rows * storage.shards
                    assert r.shard_numel == r.rows * prod(r.shape[1:])
                    offset += r.shard_numel
                assert storage.shard_numel == offset
                vectors = [len(r.shape) == 1 for r in storage.records]
                assert vectors == sorted(vectors, reverse=True)  # 1-D first: one prefix is summed over tp, undecayed


def test_stages_hold_the_chain_once() -> None:
    for case in cases(8):
        stages = stages_of(case.model, case.layout)
        assert [u.name for s in stages for u in s.units] == [u.name for u in case.model.units()]
        assert all(s.units for s in stages)


def test_tied_weights() -> None:
    """Both ends of a pipeline hold a copy, one rank shares one; either way it is one logical parameter."""
    model = tiny(3, tied=True)
    assert tied_ranks(model, parse("mb=1")) == ()
    assert rank_units(model, parse("mb=1"), 0).uses["head"] == ("head", "embedding")
    layout = parse("pp=2 mb=1")
    assert tied_ranks(model, layout) == (0, 1)
    for pp_rank in (0, 1):
        copies = [s.tied for s in rank_units(model, layout, pp_rank).storages.values() if s.tied]
        assert [r.name for r in copies] == [TIED]
    assert held(model, layout).keys() == held(model, parse("mb=1")).keys()


def test_norms_are_partial_under_sequence_parallelism_alone() -> None:
    for text, partial in (("tp=2 mb=1", True), ("tp=2 sp=0 mb=1", False), ("dp=2 zero=3 mb=1", False)):
        for storage in rank_units(tiny(2), parse(text), 0).storages.values():
            for r in storage.records:
                assert r.partial == (partial and r.tp_dim is None)


def dense(family: str) -> Model:
    """Of 4 kv heads, and with a vocabulary that no tp divides."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 32, "num_key_value_heads": 4}
    more = {"num_hidden_layers": 2, "vocab_size": 41, "tie_word_embeddings": False}
    return from_config({"model_type": family, **sizes, **more}, family)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo2"])
def test_the_boxes_of_tensor_parallel_ranks_tile_every_parameter(family: str, tp: int) -> None:
    """Neighbours hold the same one, the first of them counts it; what a padded part has beyond it is no element."""
    model = dense(family)
    storages = rank_units(model, parse(f"tp={tp} mb=1"), 0).storages
    for r in (*storages["embedding"].records, *storages["layers.0"].records):
        held, counted = (np.zeros(r.whole[r.tp_dim or 0], dtype=int) for _ in range(2))
        for index in range(tp):
            box = r.box(index)
            assert all(s.stop - s.start <= n for s, n in zip(box, r.shape, strict=True))
            held[box[r.tp_dim or 0]] += 1
            counted[box[r.tp_dim or 0]] += r.counted(index)
        assert set(counted) == {1}
        assert set(held) == {tp if r.tp_dim is None else max(1, tp // model.kv_heads) if r.neighbours > 1 else 1}


@pytest.mark.parametrize("text", ["tp=8 mb=1", "tp=8 sp=0 mb=1", "tp=8 dp=3 zero=3 mb=1"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo2"])
def test_a_dense_layer_is_summed_over_tp_and_over_copies_in_one_piece_each(family: str, text: str) -> None:
    """Norms under sequence parallelism, or over the head dim; all of keys and values, which two ranks hold."""
    model, layout = dense(family), parse(text)
    storage = rank_units(model, layout, 0).storages["layers.0"]
    moves = tensor_moves(storage)
    assert len({m.axes for m in moves}) == len(moves)
    by_axes = {m.axes: slice(m.start, m.start + m.elements) for m in moves}
    assert (("tp",) in by_axes) == (layout.sp or family == "qwen3")
    assert COPIES in by_axes
    for r in storage.records:
        place = slice(r.offset, r.offset + r.shard_numel)
        for axes, taken in ((("tp",), r.partial), (COPIES, r.neighbours > 1)):
            inside = axes in by_axes and by_axes[axes].start <= place.start < by_axes[axes].stop
            assert inside == bool(taken)
