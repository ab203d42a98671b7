"""Which gradients are summed together, and what of them moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.collective import Kind
from shardwise.model.hf import load_model
from shardwise.plan.buckets import BUCKET_NUMEL, Bucket, bucket_names, buckets_of, together
from shardwise.plan.layout import Layout, parse
from shardwise.plan.shards import COPIES, RankUnits, rank_units
from tests.support.models import tiny

GPT2, LLAMA, MIXTRAL = "gpt2", "llama-3.1-8b", "mixtral-8x7b"


def held(name: str, text: str, pp_rank: int = 0) -> tuple[RankUnits, Layout]:
    layout = parse(text)
    return rank_units(load_model(name), layout, pp_rank), layout


def found(name: str, text: str, pp_rank: int = 0) -> list[Bucket]:
    return list(buckets_of(*held(name, text, pp_rank)).values())


@pytest.mark.golden
def test_a_bucket_is_torchs_default() -> None:
    """`bucket_cap_mb` of DistributedDataParallel: 25 MiB."""
    assert BUCKET_NUMEL * 4 == 25 * 2**20


def test_a_layer_as_large_as_a_bucket_is_summed_alone() -> None:
    """A layer of GPT-2 has 7,087,872 parameters, a bucket 6,553,600."""
    names = [b.name for b in found(GPT2, "dp=8 mb=1")]
    assert names == ["layers.11..head", *(f"layers.{i}" for i in range(10, -1, -1)), "embedding"]
    assert all(len(b.storages) == 1 for b in found(LLAMA, "tp=8 dp=8 mb=1"))


def test_smaller_ones_go_together_in_the_order_in_which_the_backward_ends_them() -> None:
    names = [b.name for b in found(GPT2, "tp=2 dp=8 mb=1")]
    assert names == ["layers.10..head", *(f"layers.{i}..layers.{i + 1}" for i in range(8, -1, -2)), "embedding"]
    for bucket in found(GPT2, "tp=4 dp=8 mb=1")[:-1]:
        assert bucket.shard_numel >= BUCKET_NUMEL
        assert bucket.shard_numel - bucket.storages[0].shard_numel < BUCKET_NUMEL, "it is full once it can be"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", [GPT2, LLAMA, MIXTRAL])
@pytest.mark.parametrize(
    "text", ["dp=4", "tp=2 dp=4", "pp=2 dp=2", "pp=2 dp=2 schedule=zb-v", "pp=4 dp=2 schedule=dualpipe", "tp=2 pp=2"]
)
def test_every_storage_is_in_one_bucket_of_its_stage_and_axes(name: str, text: str, zero: int) -> None:
    for pp_rank in range(parse(f"{text} mb=1").pp):
        units, layout = held(name, f"{text} zero={zero} mb=1" if zero else f"{text} mb=1", pp_rank)
        buckets = buckets_of(units, layout)
        assert bucket_names(buckets).keys() == units.storages.keys()
        assert sum(len(b.storages) for b in buckets.values()) == len(units.storages)
        stages = [{s for u in stage.units for s in units.uses[u.name]} for stage in units.stages]
        for key, bucket in buckets.items():
            assert key == bucket.name
            assert any({s.unit for s in bucket.storages} <= stage for stage in stages)
            assert len({s.copy_axes for s in bucket.storages}) == 1
            assert len(bucket.storages) == 1 or not (zero or layout.dp == 1 == len({s.copy for s in units.stages}))


def test_one_sum_over_the_copies_and_each_storages_own_over_tp() -> None:
    """Each where its storage begins: norms under sequence parallelism, and kv heads that both ranks hold."""
    layout = parse("tp=2 dp=2 mb=1")
    units = rank_units(tiny(2, kv_heads=1), layout, 0)
    (bucket,) = buckets_of(units, layout).values()
    assert bucket.moves(0, final=False) == []
    first, *others = bucket.moves(0, final=True)
    assert first[:2] == ("embedding..head", Kind.ALL_REDUCE)
    assert (first.elements, first.start) == (sum(s.shard_numel for s in units.storages.values()), 0)
    starts = dict(zip([s.unit for s in bucket.storages], bucket.starts, strict=True))
    for move in others:
        storage = units.storages[move.module]
        records = [r for r in storage.records if (r.neighbours > 1 if move.axes == COPIES else r.partial)]
        assert starts[move.module] <= move.start
        assert move.start - starts[move.module] in {r.offset for r in records}
    assert {(m.module, m.axes) for m in others} == {
        *((f"layers.{i}", axes) for i in range(2) for axes in (("tp",), COPIES)),
        ("head", ("tp",)),
    }


@pytest.mark.parametrize("numel", [1, 1_000_000, BUCKET_NUMEL // 2 + 1, BUCKET_NUMEL - 1, BUCKET_NUMEL, 10**9])
def test_the_closed_form_fills_buckets_as_they_are(numel: int) -> None:
    """Of equal units: how many one bucket takes."""
    units, layout = held(LLAMA, "dp=2 mb=1")
    layer = units.storages["layers.0"]
    record = replace(layer.records[0], shape=(numel,), rows=numel, offset=0)
    same = {n: replace(s, records=(record,)) for n, s in units.storages.items() if n.startswith("layers.")}
    stage = replace(units.stages[0], units=tuple(u for u in units.units if u.name in same))
    buckets = list(buckets_of(RankUnits((stage,), same, units.uses), layout).values())
    assert len(buckets[0].storages) == together(numel, len(same))
