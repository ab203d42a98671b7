from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster import (
    Cluster,
    ClusterError,
    Level,
    describe,
    known_devices,
    known_parts,
    parse_cluster,
    questions,
)

H100 = parse_cluster("64x8xh100")
NVLINK, NETWORK = H100.levels


def test_all_parts() -> None:
    parts = known_parts()
    assert tuple(part.name for part in parts) == known_devices()
    assert len({part.title for part in parts}) == len(parts)
    assert all(0 <= part.power_W < 3000 for part in parts)
    with pytest.raises(ClusterError, match="did you mean h200"):
        describe("h20")


def test_one_part() -> None:
    h100, mi300x, v100, v5p = map(describe, ("h100", "mi300x", "v100-32gb", "v5p"))
    assert (h100.peak_flops_per_s, h100.inside_bytes_per_s, h100.between_bytes_per_s) == (989e12, 370e9, 50e9)
    assert (h100.domain_devices, h100.devices_per_host, h100.power_W, h100.example) == (8, 8, 700, "8xh100")
    assert mi300x.inside_bytes_per_s == 7 * 48e9  # a link for each peer
    assert v100.peak_dtype == "float16"
    assert (v5p.inside_bytes_per_s, v5p.example) == (540e9, "v5p:4x4x4")  # six links of 90
    assert describe("gb200").devices_per_host == 4


def test_a_part_like_another_takes_over_what_it_does_not_say() -> None:
    h100, h200, gb300 = (parse_cluster(f"8x{name}") for name in ("h100", "h200", "gb300"))
    assert h200.levels == h100.levels
    assert h200.device.peak_flops == h100.device.peak_flops
    assert h200.device.memory_bandwidth_GBps_per_device == 4800
    assert gb300.device.efficiency.matmul == 0.52  # gb200's
    assert gb300.device.efficiency.memory == h100.device.efficiency.memory  # h100's, by b200 and gb200
    assert gb300.levels[0].bandwidth_GBps_per_device == 722


def with_levels(*levels: Level) -> Cluster:
    return replace(H100, name="mine", levels=levels)


def test_a_bandwidth_for_a_whole_node_is_asked_about() -> None:
    per_node = with_levels(
        replace(NVLINK, bandwidth_GBps_per_device=3600), replace(NETWORK, bandwidth_GBps_per_device=400)
    )
    asked = questions(per_node)
    assert [text.split(" is ")[0] for text in asked] == [
        "levels[0].bandwidth_GBps_per_device",
        "levels[1].bandwidth_GBps_per_device",
    ]
    assert "is it per device, one way" in asked[1]


def test_bits_for_bytes_and_other_slips_are_asked_about() -> None:
    device = replace(H100.device, usable_GiB_per_device=1.0, peak_flops={"bfloat16": 989e9, "float32": 67e12})
    slips = replace(H100, device=replace(device, memory_bandwidth_GBps_per_device=33500))
    assert [text.split(" is ")[0] for text in questions(slips)] == [
        "device.usable_GiB_per_device",
        "device.memory_bandwidth_GBps_per_device",
        "device.peak_flops.bfloat16",
    ]


def test_a_slow_link_between_data_centres_is_no_slip() -> None:
    site, wan = replace(NETWORK, size=256), Level("wan", 512, 0.01, 5e-3)
    assert not questions(with_levels(NVLINK, site, wan))
    assert questions(with_levels(NVLINK, replace(NETWORK, bandwidth_GBps_per_device=0.5)))


@pytest.mark.parametrize("text", ["8xcpu", "64xC=1e9,W=1e6,M=1e9"])
def test_nothing_is_asked_where_there_is_no_measure(text: str) -> None:
    assert not questions(parse_cluster(text))
