from __future__ import annotations

import reprlib
import tomllib
from typing import Any

import pytest
import tomli_w

from shardwise.cluster import ClusterError, bandwidth, device, from_dict, parse_cluster, to_dict


def h100() -> dict[str, Any]:
    return to_dict(parse_cluster("64x8xh100"))


def faults(data: Any) -> list[str]:
    with pytest.raises(ClusterError) as caught:
        from_dict(data)
    return list(caught.value.faults)


@pytest.mark.parametrize(
    "text",
    [
        "64x8xh100",
        "8xa100",
        "4xcpu",
        "4x72xgb200",
        "2x384xascend-910c",
        "4x8xmi300x",
        "v5p:16x20x28",
        "2xv5e:16x8",
        "64xC=4.6e14,W=1.8e11,M=95e9",
        "8xC=1e15,W=1e11,M=8e10,H=3e12",
    ],
)
def test_a_cluster_survives_a_toml_file(text: str) -> None:
    cluster = parse_cluster(text)
    assert from_dict(tomllib.loads(tomli_w.dumps({"cluster": to_dict(cluster)}))["cluster"]) == cluster
    assert from_dict(text) == cluster


def test_keys_of_the_file_carry_their_units() -> None:
    data = h100()
    assert data["device"]["usable_GiB_per_device"] == 79.2
    assert data["levels"][0]["bandwidth_GBps_per_device"] == 370
    assert data["levels"][1]["latency_s"] == 14e-6


def test_whole_numbers_serve_as_numbers() -> None:
    data = h100()
    data["device"]["usable_GiB_per_device"] = 79
    assert isinstance(from_dict(data).device.usable_GiB_per_device, float)


def test_all_faults_at_once_each_with_its_place() -> None:
    data = h100()
    data["nodes"] = "64"
    data["colour"] = "green"
    del data["device"]["title"]
    data["device"]["usable_GiB_per_device"] = 80e9
    data["device"]["efficiency"]["matmul"] = 67
    data["device"]["assumed_memory"] = 3
    data["device"]["peak_flops"]["bfloat16"] = float("nan")
    data["levels"][0]["kind"] = "ring"
    data["levels"][1]["size"] = True
    assert faults(data) == [
        "nodes: found '64'; wanted a whole number from 1 to 1,048,576",
        "device.title: missing; wanted text",
        "device.usable_GiB_per_device: found 80000000000.0; wanted a number from 0.001 to 16,384 GiB",
        "device.efficiency.matmul: found 67; wanted a number from 0.001 to 1 of the peak",
        "device.assumed_memory: wanted a table with the keys "
        "context_GiB_per_device, communicator_GiB_per_group, allocator_margin",
        "device.peak_flops['bfloat16']: found nan; wanted a number from 1,000,000 to 1e+20 FLOP/s",
        "levels[0].kind: wanted 'switch' or 'mesh' or 'torus'",
        "levels[1].size: found True; wanted a whole number from 1 to 1,048,576",
        "unknown key 'colour'; known: name, nodes, devices_per_node, device, levels",
    ]


def test_levels_have_to_fit_the_nodes() -> None:
    data = h100()
    data["levels"][1]["size"] = 500
    assert faults(data) == [
        "levels: sizes are [8, 500]; wanted the first to be devices_per_node = 8 "
        "and the last to be nodes * devices_per_node = 512",
        "levels[1].size: found 500; wanted a larger multiple of the 8 inside it",
    ]


def test_an_unknown_dtype() -> None:
    data = h100()
    data["device"]["peak_flops"] = {"bf16": 1e12}
    assert faults(data)[0].startswith("device.peak_flops: found 'bf16'; wanted some of float64, float32, bfloat16")


@pytest.mark.parametrize("wrong", [None, 3.5, [], [1], {"a": 1}])
@pytest.mark.parametrize("place", ["name", "nodes", "device", "levels"])
def test_a_wrong_kind_of_value_is_a_fault_of_its_place(place: str, wrong: Any) -> None:
    data = h100()
    data[place] = wrong
    assert all(fault.startswith(place) for fault in faults(data))


@pytest.mark.parametrize("data", [None, 3, [], {}])
def test_no_table_at_all(data: Any) -> None:
    assert faults(data)


def test_levels_that_only_a_file_can_spell() -> None:
    """The example of the documentation: two data centres; a spine that carries a quarter of its leaves."""
    example = "\n".join(line[4:] for line in (device.__doc__ or "").splitlines() if line.startswith("    "))
    cluster = from_dict(to_dict(parse_cluster("128x8xh100")) | tomllib.loads(example))
    assert [level.name for level in cluster.levels] == ["nvlink", "leaf", "spine", "wan"]
    assert [bandwidth(cluster, [(8, n)]) / 1e9 for n in (16, 64, 128)] == [50, 50, 50]  # 16 members under a leaf
    assert bandwidth(cluster, [(128, 4)]) == 12.5e9
    assert bandwidth(cluster, [(512, 2)]) == 1.5625e9
    assert from_dict(tomllib.loads(tomli_w.dumps(to_dict(cluster)))) == cluster


def test_a_torus_in_a_file() -> None:
    data = to_dict(parse_cluster("v5e:4x8"))
    assert (data["levels"][0]["torus"], data["levels"][0]["wraps"]) == ([4, 8], [False, False])
    data["levels"][0]["wraps"] = [True, False]
    assert from_dict(data).levels[0].wraps == (True, False)
    data["levels"][0]["wraps"] = [1, "no"]
    data["levels"][0]["torus"] = [-4, 10**400]
    assert faults(data) == [
        "levels[0].torus[0]: found -4; wanted a whole number from 1 to 1,048,576",
        f"levels[0].torus[1]: found {reprlib.repr(10**400)}; wanted a whole number from 1 to 1,048,576",
        "levels[0].wraps[0]: found 1; wanted true or false",
        "levels[0].wraps[1]: found 'no'; wanted true or false",
    ]


def test_a_torus_between_nodes() -> None:
    data = h100()
    data["levels"][1] |= {"kind": "torus", "torus": [8, 64], "wraps": [True, True]}
    assert faults(data) == [
        "levels[1].kind: found 'torus'; wanted 'switch': only levels[0], a node's own network, is another"
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("oversubscription", 0.5),
        ("oversubscription", float("nan")),
        ("bandwidth_GBps_per_device", -1),
        ("bandwidth_GBps_per_device", float("inf")),
        ("bandwidth_GBps_per_device", 10**300),
        ("latency_s", -1e-6),
        ("latency_s", 3600),
        ("in_network_reduction_efficiency", 1.5),
        ("name", "nv\x1b[31mlink"),
        ("name", "x" * 10_000),
        ("torus", "4x4"),
        ("wraps", True),
    ],
)
def test_hostile_levels(key: str, value: Any) -> None:
    data = h100()
    data["levels"][0][key] = value
    found = faults(data)
    assert found and all(fault.startswith(f"levels[0].{key}") for fault in found)
    assert all(fault.isprintable() and len(fault) < 400 for fault in found)


def test_more_levels_than_any_network_has() -> None:
    data = h100()
    data["levels"] = [data["levels"][0] | {"size": 8 + i} for i in range(50_000)]
    assert faults(data) == ["levels: found 50,000; at most 8 are planned for"]


def test_power_is_optional() -> None:
    data = h100()
    assert data["device"].pop("power_W_per_device") == 700
    assert from_dict(data).device.power_W_per_device == 0
    data["device"]["power_W_per_device"] = -5
    assert faults(data) == ["device.power_W_per_device: found -5; wanted a number from 0 to 50,000 W"]


def test_a_file_holds_only_what_a_level_says() -> None:
    assert h100()["levels"][1] == {
        "name": "infiniband",
        "size": 512,
        "bandwidth_GBps_per_device": 50,
        "latency_s": 14e-6,
    }
