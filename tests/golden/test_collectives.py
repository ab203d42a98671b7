"""Seconds of collectives and rooflines of whole pods against published figures.

SB: J. Austin et al., How To Scale Your Model, jax-ml/scaling-book at 0819a7d. Where its figure is rounded before it is
used, or cut off, the tolerance says so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shardwise.cluster import Cluster, describe, from_dict, parse_cluster, to_dict
from shardwise.collective import Kind
from shardwise.simulate.network import Links, collective_s, links, pair_s

pytestmark = pytest.mark.golden

POD = parse_cluster("v5p:16x20x28")
CUBE = parse_cluster("v4:4x4x4")
ONE_AXIS, TWO_AXES, THREE_AXES = (links(POD, (1, n)) for n in (28, 28 * 20, 28 * 20 * 16))
HUGE = 1e15
"""Bytes, or tokens times features, beside which no latency shows."""


def rate(device_flops: float, payload: float, group: Links) -> float:
    """FLOPs that a device does while the group gathers one byte."""
    return device_flops * float(collective_s(Kind.ALL_GATHER, payload, group)) / payload


@pytest.mark.parametrize(
    ("group", "tokens"),
    [(ONE_AXIS, pytest.approx(2550, abs=10)), (THREE_AXES, pytest.approx(850, abs=5))],
)
def test_tokens_below_which_data_parallelism_waits(group: Links, tokens: float) -> None:
    """W169, W170 (SB, training): 2 D F bytes of weights gathered behind 2 B D F FLOPs of B tokens a chip."""
    assert rate(POD.device.peak_flops["bfloat16"], HUGE, group) == tokens


def test_tokens_of_a_whole_pod() -> None:
    """W171: 850 on each of 8960 chips are 7.6e6; W188: on 4096, 3.48e6; W195: 4 Mi tokens are 468 a chip."""
    least = rate(POD.device.peak_flops["bfloat16"], HUGE, THREE_AXES)
    assert least * POD.world_size == pytest.approx(7.6e6, rel=0.01)
    assert least * parse_cluster("v5p:16x16x16").world_size == pytest.approx(3.48e6, rel=0.005)
    assert int(4 * 2**20 / POD.world_size) == 468


@pytest.mark.parametrize(
    ("peak", "ffn", "ways"),
    [
        ("bfloat16", 30_000, pytest.approx(11, abs=1)),  # W173
        ("bfloat16", 50_000, pytest.approx(19, abs=1)),  # W175: Gemma 7B
    ],
)
def test_ways_of_tensor_parallelism_over_one_axis(peak: str, ffn: int, ways: float) -> None:
    """SB, training: 2 B D bytes of activations gathered behind 2 B D F / Y FLOPs."""
    assert ffn / rate(POD.device.peak_flops[peak], HUGE, ONE_AXIS) == ways


def test_int8_doubles_what_tensor_parallelism_needs() -> None:
    """W176: 5100, with activations still in bfloat16."""
    assert rate(POD.device.peak_flops["int8"], HUGE, ONE_AXIS) == pytest.approx(5100, abs=10)


@pytest.mark.parametrize(
    ("ffn", "tokens"),
    [
        (32_768, pytest.approx(400, rel=0.01)),  # W178: "about 400"
        (30_000, pytest.approx(432, abs=2)),  # W179: Llama 3 70B
        (2.7 * 5120, pytest.approx(940, abs=2)),  # W181: Llama 2 13B
    ],
)
def test_tokens_below_which_fsdp_with_tensor_parallelism_waits(ffn: float, tokens: float) -> None:
    """SB, training: FSDP over two axes and TP over one, at the split of the chips that waits least."""
    chips, hidden, c = POD.world_size, 2.0**40, POD.device.peak_flops["bfloat16"]
    fsdp = chips / np.linspace(2, 40, 4000)
    tp = chips / fsdp

    def waits(batch: float) -> bool:
        weights = collective_s(Kind.ALL_GATHER, 2 * hidden * ffn / tp, TWO_AXES)
        activations = collective_s(Kind.ALL_GATHER, 2 * batch * hidden / fsdp, ONE_AXIS)
        return bool((weights + activations).min() > 2 * batch * hidden * ffn / chips / c)

    assert bisected(waits, 1.0, 1e5 * chips) / chips == tokens


def bisected(waits: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if waits(middle) else (low, middle)
    return high


@pytest.mark.parametrize(
    ("figures", "tokens"),
    [
        ("C=3.8e18,W=5e13", pytest.approx(76_000, rel=1e-5)),  # W182: between pods; a pod is the device
        ("C=9.2e14,W=1.5e10", pytest.approx(61_000, rel=0.01)),  # W210: v6e over PCIe
    ],
)
def test_tokens_behind_a_slow_link(figures: str, tokens: float) -> None:
    many = parse_cluster(f"{2**20}x{figures},M=1e13")
    group = links(many, (1, many.world_size))
    assert rate(many.device.peak_flops["bfloat16"], HUGE, group) == tokens


def test_batches_that_memory_bounds() -> None:
    """W206: 298 on an H100 of 1e15 FLOP/s; W207: 486 in int8 on v5e, and half of it in tokens."""
    h100 = parse_cluster("1xC=1e15,W=1e9,M=8e10,H=3.35e12").device
    assert int(h100.peak_flops["bfloat16"] / h100.memory_bytes_per_s) == 298
    v5e = parse_cluster("v5e:1").device
    intensity = v5e.peak_flops["int8"] / v5e.memory_bytes_per_s
    assert (int(intensity), int(intensity / 2)) == (486, 243)


def gather_us(cluster: Cluster, payload: float, *factors: tuple[int, int]) -> float:
    return 1e6 * float(collective_s(Kind.ALL_GATHER, payload, links(cluster, *factors)))


def test_gathers_on_a_cube() -> None:
    """W197, W198 (SB, sharding, question 2): bf16[1024, 4096] over X, cut in 4 along Y: 23 us; over X and Y: 46 us."""
    whole = 2 * 1024 * 4096
    assert int(gather_us(CUBE, whole / 4, (16, 4))) == 23
    assert int(gather_us(CUBE, whole, (4, 16))) == 46


def test_a_gather_of_next_to_nothing() -> None:
    """W202 (SB, sharding, question 3): 256 bytes over 4 chips in a ring, two hops of 1 us."""
    assert gather_us(CUBE, 256, (1, 4)) == pytest.approx(2)


def test_a_gather_with_and_without_wraparound() -> None:
    """W200, W201 (SB, sharding, quiz 2): bf16[2048, 8192] over 4 of v5e 8x4: 560 us (680 measured); if it were a
    ring, 377, of 34 MB for 33.55.
    """
    line = parse_cluster("v5e:8x4")
    data = to_dict(line)
    data["levels"][0]["wraps"] = [True, True]
    ring = from_dict(data)
    assert gather_us(line, 2 * 2048 * 8192, (1, 4)) == pytest.approx(560, rel=0.01)
    assert gather_us(ring, 2 * 2048 * 8192, (1, 4)) == pytest.approx(377, rel=0.013)


@pytest.mark.parametrize("cluster", [CUBE, parse_cluster("v5e:16x16"), parse_cluster("v5p:8x8x8")])
def test_an_all_to_all_is_a_quarter_of_a_gather(cluster: Cluster) -> None:
    """SB, sharding: of the same tensor, on a ring of both directions. A rank's payload is its part of the tensor."""
    n = cluster.levels[0].torus[-1]
    group = links(cluster, (1, n))
    gather = collective_s(Kind.ALL_GATHER, 1e12, group)
    assert float(collective_s(Kind.ALL_TO_ALL, 1e12 / n, group)) == pytest.approx(float(gather) / 4)


def test_an_all_reduce_is_two_gathers() -> None:
    for group in (ONE_AXIS, TWO_AXES, THREE_AXES):
        gather = float(collective_s(Kind.ALL_GATHER, 1e10, group))
        assert float(collective_s(Kind.ALL_REDUCE, 1e10, group)) == pytest.approx(2 * gather)


def test_corner_to_corner() -> None:
    """W209 (SB, TPUs, question 5): bf16[8, 128, 8192] from corner to corner of v5e 4x4, 188 us over two ports."""
    seconds = pair_s(parse_cluster("v5e:4x4"), 2 * 8 * 128 * 8192, 0, 15, stride=1)
    assert seconds * 1e6 == pytest.approx(188, rel=0.02)


def test_a_pod_of_v5e() -> None:
    """W211 (SB, TPUs, question 2): 32 hosts, 256 cores, 5.1e16 FLOP/s (of 2e14), 4 TB."""
    pod, part = parse_cluster("v5e:16x16"), describe("v5e")
    assert pod.world_size == part.domain_devices == 256
    assert pod.world_size // part.devices_per_host == 32
    assert pod.world_size * pod.device.peak_flops["bfloat16"] == pytest.approx(5.1e16, rel=0.015)
    assert pod.world_size * pod.device.usable_bytes == pytest.approx(4e12, rel=0.1)


def test_power_of_two_systems() -> None:
    """559 kW a CloudMatrix 384, 145 kW a GB200 NVL72, 2.3 times the power of a FLOP/s (SemiAnalysis, as quoted by
    Winbuzzer 2025-04-20, with 780 TFLOP/s for the 910C where the catalog has 752).
    """
    matrix, rack = parse_cluster("384xascend-910c"), parse_cluster("72xgb200")
    watts = [cluster.world_size * cluster.device.power_W_per_device for cluster in (matrix, rack)]
    assert watts == [pytest.approx(559e3, rel=1e-3), pytest.approx(145e3, rel=1e-3)]
    per_flops = [
        w / (c.world_size * c.device.peak_flops["bfloat16"]) for w, c in zip(watts, (matrix, rack), strict=True)
    ]
    assert per_flops[0] / per_flops[1] == pytest.approx(2.31 * 780 / 752, rel=0.01)


def bus_bandwidth(kind: Kind, text: str, size: int, factor: float) -> float:
    """GB/s as nccl-tests prints it: bytes that must cross a device's wires, over the time."""
    seconds = collective_s(kind, 16e9, links(parse_cluster(text), (1, size)))
    return factor * 16e9 / float(seconds) / 1e9


def test_bus_bandwidth_of_eight_h100() -> None:
    """460 to 480 GB/s for an all-reduce that the switch adds up (Alaya NeW, nccl-tests); 371 for NCCL's rings."""
    assert 460 <= bus_bandwidth(Kind.ALL_REDUCE, "8xh100", 8, 2 * 7 / 8) <= 480
    assert bus_bandwidth(Kind.ALL_GATHER, "8xh100", 8, 7 / 8) == pytest.approx(371, rel=0.01)


@pytest.mark.parametrize(
    ("text", "size", "published"), [("8xh800", 8, 153), ("4x8xh800", 32, 58), ("8x8xh800", 64, 51)]
)
def test_dispatch_of_deepep(text: str, size: int, published: float) -> None:
    """DeepEP's README, H800 with 400 Gb/s cards: GB/s that leave a rank by the bottleneck, NVLink or its card."""
    cluster = parse_cluster(text)
    payload, group = 4e9, links(cluster, (1, size))
    leaves = 7 / 8 if size == 8 else (size - 8) / size
    found = leaves * payload / float(collective_s(Kind.ALL_TO_ALL, payload, group)) / 1e9
    assert found == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(("nodes", "distinct"), [(8, 5.25), (4, 3.6)])
def test_a_token_for_eight_experts_goes_once_to_a_node(nodes: int, distinct: float) -> None:
    """N (1 - (1 - 1/N)^8) distinct nodes of eight experts at random, where there would be eight messages."""
    group = links(parse_cluster(f"{nodes}x8xh100"), (1, 8 * nodes))
    once, each = (float(collective_s(Kind.ALL_TO_ALL, 1e11, group, copies=k)) for k in (8, 1))
    assert 8 * once / each == pytest.approx(distinct, rel=0.005)
