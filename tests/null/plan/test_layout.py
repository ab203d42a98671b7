"""The text form of a layout, stage splits, and batches of layouts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.mesh import Mesh
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.layout import CP_KINDS, ORDERS, ZERO, Layout, LayoutError, default_split, parse
from shardwise.schedule import NAMES

DEGREES = st.sampled_from([1, 2, 3, 4, 8, 128])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shard, cp = draw(DEGREES), draw(DEGREES)
    return Layout(
        tp=draw(DEGREES),
        sp=draw(st.booleans()),
        cp=cp,
        cp_kind=draw(st.sampled_from(CP_KINDS)),
        pp=draw(DEGREES),
        ep=draw(DEGREES),
        etp=draw(DEGREES),
        dp_replicate=draw(DEGREES),
        dp_shard=shard,
        zero=draw(st.sampled_from([1, 2, 3] if shard > 1 else ZERO)),
        schedule=draw(st.sampled_from([name.replace(":V", f":{draw(st.integers(1, 9))}") for name in NAMES])),
        split=draw(st.sampled_from([(), (3, 1), (0, 2, 2, 0)])),
        mb=draw(st.integers(1, 64)),
        recompute=draw(st.sampled_from(["none", "full", "act", "core,norm", "act,norm,core"])),
        order=draw(st.sampled_from(ORDERS)),
    )


@given(layouts())
def test_the_text_form_round_trips(layout: Layout) -> None:
    assert parse(str(layout)) == layout


@given(st.lists(layouts(), min_size=1, max_size=6))
def test_a_batch_gives_its_rows_back(found: list[Layout]) -> None:
    batch = LayoutBatch.of(found)
    assert [batch.row(i) for i in range(len(batch))] == found
    assert batch.world_size.tolist() == [x.world_size for x in found]
    assert batch.shards.tolist() == [x.shards for x in found]
    assert batch.virtual.tolist() == [x.stages // x.pp for x in found]
    assert batch.edp.tolist() == [max(1, x.edp) for x in found]
    assert batch.expert_replicas.tolist() == [max(1, x.expert_replicas) for x in found]
    strides = zip(batch.pp_stride.tolist(), batch.replicate_stride.tolist(), strict=True)
    assert list(strides) == [(stride(x.mesh, "pp"), stride(x.mesh, "dp_replicate")) for x in found]


def stride(mesh: Mesh, axis: str) -> int:
    """Ranks between neighbours along an axis: the degrees of all that lies inside it."""
    names = [name for name, _ in mesh.degrees]
    return mesh.degree(names[names.index(axis) + 1 :])


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("tp=8 pp=16 dp=128 zero=1 mb=1", "tp=8 pp=16 dp=128 zero=1 mb=1"),
        ("mb=1 dp=128 zero=1 tp=8 pp=16", "tp=8 pp=16 dp=128 zero=1 mb=1"),
        ("tp=2, pp=2, mb=1", "tp=2 pp=2 mb=1"),
        ("tp=2 sp=1 schedule=1f1b recompute=none mb=1", "tp=2 mb=1"),
        ("tp=1 sp=1 mb=1", "mb=1"),
        ("dp=1 zero=3 mb=1", "mb=1"),
        ("dp_shard=8 zero=3 mb=1", "dp=8 zero=3 mb=1"),
        ("dp_replicate=8 mb=1", "dp=8 mb=1"),
        ("dp_replicate=2 dp_shard=4 zero=3 mb=2", "dp_replicate=2 dp_shard=4 zero=3 mb=2"),
        ("dp_replicate=2 dp_shard=1 cp=2 zero=1 mb=2", "cp=2 dp_replicate=2 zero=1 mb=2"),
        ("cp=2 zero=3 mb=1", "cp=2 zero=3 mb=1"),  # ZeRO cuts over dp_shard x cp
        ("cp=1 cp_kind=gather mb=1", "mb=1"),
        ("cp_kind=ring cp=2 mb=1", "cp=2 mb=1"),
        ("order=dp mb=1 pp=2", "pp=2 mb=1"),  # one replica lies nowhere
        ("mb=1 recompute=core,act order=dp dp=2 pp=2", "pp=2 dp=2 mb=1 recompute=act,core order=dp"),
        ("mb=1 dp=4 tp=2 etp=2 ep=4", "tp=2 ep=4 etp=2 dp=4 mb=1"),
    ],
)
def test_equal_layouts_have_one_text(text: str, same: str) -> None:
    assert str(parse(text)) == same


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=8", "mb=: missing"),
        ("tp=0 mb=1", "tp=0: wanted a whole number from 1"),
        ("tp=-2 mb=1", "tp=-2: wanted"),
        ("tp=99999999999999 mb=1", "tp=99999999999999: wanted"),
        ("tp=２ mb=1", "wanted a whole number"),
        ("tp mb=1", "wanted key=value"),
        ("tp=2 tp=4 mb=1", "tp=: given twice"),
        ("tensor=2 mb=1", "no such key"),
        ("fsdp=8 mb=1", "dp_shard"),
        ("cp=0 mb=1", "cp=0: wanted a whole number from 1"),
        ("cp=2 cp_kind=zigzag mb=1", "cp_kind=zigzag: wanted one of ring, ulysses, gather"),
        ("edp=2 mb=1", "expert-data parallelism is what ep and etp leave"),
        ("order=tp mb=1", "order=tp: wanted one of pp, dp"),
        ("zero=4 mb=1", "zero=4: wanted one of 0, 1, 2, 3"),
        ("zero=0 dp_shard=4 mb=1", "shards nothing over dp_shard=4: write dp=4"),
        ("dp=4 dp_shard=2 zero=1 mb=1", "dp=: refused beside dp_shard"),
        ("schedule=zbv pp=2 mb=1", "unknown schedule"),
        ("split=1,,2 pp=2 mb=1", "split=1,,2: wanted"),
        ("recompute=some mb=1", "no 'some'; wanted none, full, or some of norm,act,core"),
    ],
)
def test_each_fault_is_named(text: str, said: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse(text)
    assert said in str(error.value)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(LayoutError) as error:
        parse("tp=0 zero=9 fsdp=2 schedule=no")
    assert len(error.value.faults) == 5  # and mb is missing


@pytest.mark.parametrize(
    "values",
    [
        {"dp_shard": 2},
        {"zero": 4, "dp_shard": 2},
        {"recompute": "Full"},
        {"recompute": "none,act"},
        {"cp": 2, "cp_kind": "zigzag"},
        {"order": "tp"},
        {"ep": 0},
        {"tp": 0},
        {"mb": -1},
        {"schedule": "zbv", "pp": 2},
    ],
)
def test_a_layout_that_cannot_be_is_no_value(values: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        Layout(**values)


def test_equal_layouts_are_equal_values() -> None:
    assert Layout(zero=3, dp_replicate=4) == Layout(dp_replicate=4)
    assert Layout(sp=True) == Layout()


def test_default_split() -> None:
    """Llama 3 405B's 126 layers on 16 stages: one layer off each end (arXiv 2407.21783, section 3.3.2)."""
    assert default_split(126, 16) == (7, *[8] * 14, 7)
    assert default_split(7, 2) == (4, 3)  # the head costs more than the embedding
    assert default_split(14, 16) == (0, *[1] * 14, 0)


@given(st.integers(1, 200), st.integers(1, 64))
def test_a_split_places_every_layer_once(layers: int, stages: int) -> None:
    split = default_split(layers, stages)
    assert len(split) == stages
    assert sum(split) == layers
    assert max(split) - min(split) <= 1
    if stages <= layers + 2:
        assert all(split[1:-1])  # only the ends, which hold the embedding and the head, may have none
