"""Placement records: every element of every parameter has an owner, padding is told apart, ties have two copies."""

from __future__ import annotations

from math import prod

import pytest

from shardwise.model.hf import load_model
from shardwise.model.spec import Model
from shardwise.plan.layout import Layout, parse
from shardwise.plan.shards import TIED, rank_units, stages_of, tied_ranks
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
