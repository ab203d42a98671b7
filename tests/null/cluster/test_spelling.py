from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import Cluster, ClusterError, from_dict, known_devices, parse_cluster, to_dict


@pytest.mark.parametrize(
    ("text", "name", "torus", "wraps"),
    [
        ("v5p:16x20x28", "v5p:16x20x28", (16, 20, 28), (True, True, True)),
        ("V4:4x4x4", "v4:4x4x4", (4, 4, 4), (True, True, True)),
        ("v4:4x4x2", "v4:4x4x2", (4, 4, 2), (False, False, False)),  # smaller than a cube
        ("v4:2x2", "v4:2x2x1", (2, 2, 1), (False, False, False)),
        ("v5e:16x16", "v5e:16x16", (16, 16), (True, True)),
        ("v5e:8x16", "v5e:8x16", (8, 16), (False, True)),
        ("v5e:8x4", "v5e:8x4", (8, 4), (False, False)),
        ("trainium2:4x4", "trainium2:4x4", (4, 4), (True, True)),
    ],
)
def test_slices(text: str, name: str, torus: tuple[int, ...], wraps: tuple[bool, ...]) -> None:
    """Rings begin at 4x4x4 on v4 and v5p, at 16 on v5e and v6e (scaling book)."""
    cluster = parse_cluster(text)
    assert (cluster.name, cluster.levels[0].torus, cluster.levels[0].wraps) == (name, torus, wraps)
    assert len(cluster.levels) == 1
    assert parse_cluster(cluster.name) == cluster


def test_slices_over_the_data_centre_network() -> None:
    cluster = parse_cluster("2xv5p:16x20x28")
    assert (cluster.nodes, cluster.devices_per_node, cluster.world_size) == (2, 8960, 17920)
    assert [(level.kind, level.size) for level in cluster.levels] == [("torus", 8960), ("switch", 17920)]
    assert parse_cluster("1xv5e:4x4") == parse_cluster("v5e:4x4")


def test_racks_of_one_domain() -> None:
    assert [level.size for level in parse_cluster("4x72xgb200").levels] == [72, 288]
    assert [level.size for level in parse_cluster("2x384xascend-910c").levels] == [384, 768]


def test_a_device_of_ones_own() -> None:
    cluster = parse_cluster("64xC=4.6e14, W=1.8e11, m=95e9")
    assert cluster.name == "64xC=4.6e14,W=1.8e11,M=9.5e10"
    assert parse_cluster(cluster.name) == cluster
    device, (level,) = cluster.device, cluster.levels
    assert cluster.world_size == level.size == 64
    assert device.peak_flops["bfloat16"] == 4.6e14
    assert device.usable_bytes == 95e9
    assert level.bytes_per_s == 1.8e11
    assert level.latency_s == device.efficiency.launch_s == 0
    assert device.efficiency.matmul == device.efficiency.memory == 1
    assert device.assumed_memory.context_bytes == device.assumed_memory.communicator_bytes == 0
    assert parse_cluster("1xC=1e15,W=1e11,M=8e10,H=3.35e12").device.memory_bytes_per_s == pytest.approx(3.35e12)


@given(
    st.integers(1, 2**20),
    st.floats(1e6, 1e20),
    st.floats(1e6, 1e15),
    st.floats(2**21, 2**44),
    st.none() | st.floats(1e6, 1e15),
)
def test_a_device_of_ones_own_survives_its_name_and_a_file(n: int, c: float, w: float, m: float, h: float) -> None:
    cluster = parse_cluster(f"{n}xC={c!r},W={w!r},M={m!r}" + (f",H={h!r}" if h else ""))
    again = parse_cluster(cluster.name)
    assert again.device.peak_flops["bfloat16"] == pytest.approx(c, rel=1e-14)
    assert again.levels[0].bytes_per_s == pytest.approx(w, rel=1e-14)
    assert from_dict(to_dict(cluster)) == cluster


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("256xv5e", "did you mean v5e:16x16"),
        ("2x256xv5e", "did you mean 2xv5e:16x16"),
        ("64xv4", "did you mean v4:4x4x4"),
        ("v5e:16x32", "at most 256 devices, not 512: did you mean 2xv5e:16x16"),
        ("v5e:4x4x4", "1 to 2 axes"),
        ("v5e:0x4", "at least 1 device"),
        ("v5p:999999999x999999999", "devices; at most 1,048,576"),
        ("999999xv5p:16x20x28", "devices; at most 1,048,576"),
        ("0xv5e:4x4", "at least 1 node"),
        ("h100:4x4", "h100 is not joined as a torus: write nodes and devices, such as 8xh100"),
        ("v9:4x4", "no device is named 'v9'"),
        ("v5e", "v5e:4x4 is a slice"),
        ("v5e:", "is not a cluster"),
        ("73xgb200", "did you mean 73x1xgb200"),
        ("144xgb200", "did you mean 2x72xgb200"),
        ("64xC=4.6e14,W=1.8e11", "M is missing; wanted bytes of memory"),
        ("64xC=nan,W=1,M=1e9", "C is 'nan'; wanted FLOP/s"),
        ("64xC=inf,W=1e9,M=1e9", "C is 'inf'"),
        ("64xC=1e999,W=1e9,M=1e9", "C is '1e999'"),
        ("64xC=-1e14,W=1e9,M=1e9", "C is '-1e14'"),
        ("64xC=1e14,W=1e9,M=0", "M is '0'; wanted bytes of memory"),
        ("64xC=1e14,W=1e9,M=80", "M is '80'"),
        ("64xC=,W=1e9,M=1e9", "C is ''"),
        ("64xC=1_0e14,W=1e9,M=1e9", "C is '1_0e14'"),
        ("64xC=1e14,C=1e14,W=1e9,M=1e9", "C is given twice"),
        ("64xC=1e14,W=1e9,M=1e9,Q=3", "found 'q=3'; wanted C= FLOP/s"),
        ("64xC=1e14;W=1e9;M=1e9", "C is '1e14;w=1e9;m=1e9'"),
        ("0xC=1e14,W=1e9,M=1e9", "at least 1"),
        ("2000000xC=1e14,W=1e9,M=1e9", "2,000,000 devices"),
        ("C=1e14,W=1e9,M=1e9", "is not a cluster"),
    ],
)
def test_refusals(text: str, said: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_suggested_slice_has_as_many_devices_as_were_asked_for() -> None:
    for name, most in (("v5e", 300), ("v4", 100), ("trainium2", 40)):
        for devices in range(1, most):
            with pytest.raises(ClusterError) as caught:
                parse_cluster(f"{devices}x{name}")
            assert parse_cluster(str(caught.value).rpartition(" ")[2].rstrip("?")).world_size == devices


def test_all_figures_at_fault_at_once() -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster("64xC=0,W=-1,Q=1")
    assert len(caught.value.faults) == 4  # and M is missing


PIECES = [
    *known_devices(),
    "8",
    "64",
    "x",
    ":",
    ",",
    "=",
    "C",
    "W",
    "M",
    "e9",
    "-",
    "+",
    ".",
    "nan",
    " ",
    "\0",
    "\n",
    "٣",
]


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=60))
def test_any_text_is_a_cluster_or_a_fault(text: str) -> None:
    try:
        cluster = parse_cluster(text)
    except ClusterError as error:
        assert all(fault.isprintable() for fault in error.faults)  # noqa: PT017
    else:
        assert isinstance(cluster, Cluster) and math.prod((cluster.nodes, cluster.devices_per_node)) <= 2**20
        assert parse_cluster(cluster.name).name == cluster.name
