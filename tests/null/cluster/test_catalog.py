from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import Cluster, ClusterError, Level, describe, known_devices, parse_cluster, questions
from shardwise.cluster.catalog import entry


def test_h100() -> None:
    """Data sheet, out-of-memory reports (79.2 GiB) and NCCL's ring over 18 links of 20.6 GB/s."""
    cluster = parse_cluster("64x8xh100")
    assert (cluster.name, cluster.nodes, cluster.devices_per_node, cluster.world_size) == ("64x8xh100", 64, 8, 512)
    device = cluster.device
    assert device.peak_flops["bfloat16"] == 989e12
    assert device.usable_GiB_per_device == 79.2
    assert device.usable_bytes == 85_040_352_461
    assert device.memory_bytes_per_s == 3.35e12
    assert device.peak_flops["bfloat16"] / device.memory_bytes_per_s == pytest.approx(295, abs=1)  # ridge, FLOP/B
    assert cluster.levels == (
        Level("nvlink", 8, 370, 3.4e-6, in_network_reduction_efficiency=0.74),
        Level("infiniband", 512, 50, 14e-6),
    )
    assert cluster.levels[1].bytes_per_s == 400e9 / 8


def test_a100() -> None:
    """Data sheet, out-of-memory reports and NCCL's ring over 12 links of 20.0 GB/s."""
    cluster = parse_cluster("2x8xa100")
    assert cluster.device.peak_flops["bfloat16"] == 312e12
    assert cluster.device.usable_GiB_per_device == 79.2
    assert [level.bandwidth_GBps_per_device for level in cluster.levels] == [240, 25]
    assert not any(dtype.startswith("float8") for dtype in cluster.device.peak_flops)


def test_cpu_has_no_fast_domain_below_64() -> None:
    cluster = parse_cluster("16xcpu")
    assert (cluster.nodes, cluster.devices_per_node, len(cluster.levels)) == (1, 16, 1)
    assert cluster.device.usable_GiB_per_device == 4
    assert parse_cluster("64xcpu").world_size == 64


@pytest.mark.parametrize("name", known_devices())
def test_every_file_of_the_catalog(name: str) -> None:
    part = entry(name)
    assert part.device.name == name
    assert {"bfloat16", "float16"} & set(part.device.peak_flops)
    assert part.source and part.device.title
    assert (part.inside_node.kind == "torus") == (part.slices is not None)
    assert part.inside_node.latency_s < part.between_nodes.latency_s
    of = describe(name)
    assert of.inside_bytes_per_s > of.between_bytes_per_s
    assert of.domain_devices % of.devices_per_host == 0
    assert parse_cluster(of.example).device == part.device
    assert not questions(parse_cluster(of.example))


@pytest.mark.parametrize(
    ("text", "name"),
    [("64x8xh100", "64x8xh100"), (" 8xH100 ", "8xh100"), ("1x8xh100", "8xh100"), ("1xh100", "1xh100")],
)
def test_spellings(text: str, name: str) -> None:
    assert parse_cluster(text).name == name


@given(st.integers(1, 4096), st.integers(1, 8), st.sampled_from(["h100", "a100"]))
def test_a_clusters_name_spells_it(nodes: int, per_node: int, device: str) -> None:
    cluster = parse_cluster(f"{nodes}x{per_node}x{device}")
    assert parse_cluster(cluster.name) == cluster
    assert cluster.world_size == nodes * per_node


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("512xh100", "64x8xh100"),
        ("3x16xh100", "6x8xh100"),
        ("12xh100", "2x6xh100"),
        ("9xh100", "3x3xh100"),
        ("h100x8", "8xh100"),
        ("65xcpu", "5x13xcpu"),
        ("8xh10", "h100"),
    ],
)
def test_a_near_miss_gets_the_spelling_that_is_meant(text: str, meant: str) -> None:
    with pytest.raises(ClusterError, match=rf"did you mean {meant}\b"):
        parse_cluster(text)


def test_a_suggested_cluster_has_as_many_devices_as_were_asked_for() -> None:
    for devices in range(9, 200):
        with pytest.raises(ClusterError) as caught:
            parse_cluster(f"{devices}xh100")
        meant = str(caught.value).rpartition(" ")[2].rstrip("?")
        assert parse_cluster(meant).world_size == devices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xz900", r"no device is named 'z900' \(known: a100, a100-40gb"),
        ("h100", "does not say how many"),
        ("0x8xh100", "at least 1 node of at least 1 device"),
        ("8x0xh100", "at least 1 node of at least 1 device"),
        ("-1x8xh100", "at least 1 node of at least 1 device"),
        ("1000000x8xh100", "8,000,000 devices; at most 1,048,576"),
        ("999999999999x8xh100", "is not a cluster: write NODESxDEVICESxNAME"),
        ("1.5x8xh100", "is not a cluster"),
        ("8x8", "is not a cluster"),
        ("", "is not a cluster"),
        ("1x2x3xh100", "is not a cluster"),
        ("x" * 5000, "is not a cluster"),
    ],
)
def test_refusals(text: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said) as caught:
        parse_cluster(text)
    assert len(str(caught.value)) < 400


def test_a_cluster_can_be_a_key() -> None:
    assert {parse_cluster("8xh100"): 1}[parse_cluster("1x8xh100")] == 1
    assert isinstance(parse_cluster("8xh100"), Cluster)
