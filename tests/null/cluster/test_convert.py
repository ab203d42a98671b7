from __future__ import annotations

import tomllib
from typing import Any

import pytest
import tomli_w

from shardwise.cluster import ClusterError, from_dict, parse_cluster, to_dict


def h100() -> dict[str, Any]:
    return to_dict(parse_cluster("64x8xh100"))


def faults(data: Any) -> list[str]:
    with pytest.raises(ClusterError) as caught:
        from_dict(data)
    return list(caught.value.faults)


@pytest.mark.parametrize("text", ["64x8xh100", "8xa100", "4xcpu"])
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
    data["levels"][0]["kind"] = "torus"
    data["levels"][1]["size"] = True
    assert faults(data) == [
        "nodes: found '64'; wanted a whole number from 1 to 1,048,576",
        "device.title: missing; wanted text",
        "device.usable_GiB_per_device: found 80000000000.0; wanted a number from 0.001 to 16,384 GiB",
        "device.efficiency.matmul: found 67; wanted a number from 0.001 to 1 of the peak",
        "device.assumed_memory: wanted a table with the keys "
        "context_GiB_per_device, communicator_GiB_per_group, allocator_margin",
        "device.peak_flops['bfloat16']: found nan; wanted a number from 1,000,000 to 1e+18 FLOP/s",
        "levels[0].kind: wanted 'switch'",
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
