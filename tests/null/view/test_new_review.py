"""What the views find out by themselves: groups and their time, logits, hardware FLOPs, sentences on ZeRO levels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import parse_cluster
from shardwise.collective import Collective, Key, Kind
from shardwise.mesh import AXES, Mesh
from shardwise.model.hf import load_model
from shardwise.plan.job import Job
from shardwise.plan.layout import parse
from shardwise.plan.stack import load_stack, under
from shardwise.results import MemoryBreakdown, StepTime
from shardwise.units import GIB
from shardwise.view import words
from shardwise.view.review import AtLevel, _factors, alone_s, hardware_flops, logits_of

LLAMA = load_model("llama-3.1-8b")
JOB = Job(LLAMA, parse_cluster("2x8xh100"), 8192, 16)


@given(
    degrees=st.tuples(*[st.integers(1, 4)] * 5), axes=st.sets(st.sampled_from(AXES), min_size=1), seed=st.integers(0)
)
def test_a_group_is_read_back_from_its_ranks(degrees: tuple[int, ...], axes: set[str], seed: int) -> None:
    mesh = Mesh(tuple(zip(AXES, degrees, strict=True)))
    ranks = mesh.group(seed % mesh.world_size, axes)
    made = [ranks[0]]
    for stride, size in _factors(ranks):
        made = [rank + i * stride for i in range(size) for rank in made]
    assert sorted(made) == list(ranks)


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        # A ring in the node: 7 hops of 3.4 µs, 7/8 of the bytes at 370 GB/s.
        (Kind.ALL_GATHER, tuple(range(8)), 7 * 3.4e-6 + 7 / 8 * 8e9 / 370e9),
        # One rank of each node: a hop of 14 µs, half the bytes over the card's 50 GB/s.
        (Kind.REDUCE_SCATTER, (3, 11), 14e-6 + 1 / 2 * 8e9 / 50e9),
        (Kind.SEND, (0, 1), 3.4e-6 + 8e9 / 370e9),
        (Kind.RECV, (12, 3), 14e-6 + 8e9 / 50e9),
    ],
)
def test_the_time_of_a_collective_alone_is_alpha_and_beta(kind: Kind, ranks: tuple[int, ...], seconds: float) -> None:
    entry = Collective(Key("layers.0", "F", "tp"), kind, ranks, 8 * 10**9, "bfloat16")
    assert alone_s(JOB.cluster, entry) == pytest.approx(seconds, rel=1e-9)


def test_logits_are_tokens_times_vocabulary() -> None:
    """8,192 tokens x 128,256 / tp in two bytes; F.cross_entropy of a float32 copy holds 14 bytes a logit at its peak
    with the narrow ones (docs of the stack: 4 kept beside 2, and more in the backward)."""
    ours = logits_of(JOB, parse("tp=2 dp=8 mb=1"))
    assert ours is not None
    assert ours.own_bytes == 8192 * 128256 // 2 * 2
    eager = load_stack("torchtitan")
    job = replace(JOB, model=under(LLAMA, eager), stack=eager)
    theirs = logits_of(job, parse("tp=2 dp=8 zero=3 mb=1"))
    assert theirs is not None
    assert theirs.own_bytes == ours.own_bytes
    assert theirs.at_loss_bytes >= 3 * ours.own_bytes
    assert logits_of(replace(JOB, model=load_model("mlp:D=64,F=128,L=2")), parse("dp=16 mb=1")) is None


def test_hardware_flops_are_the_models_and_what_runs_twice() -> None:
    """Without recomputation F and W are thirds of 6 N but for attention, whose backward runs 2.5 forwards in B."""
    plain, again = (hardware_flops(JOB, parse(f"tp=2 dp=8 mb=1 {way}")) for way in ("", "recompute=full"))
    products = 2 * (LLAMA.parameters - LLAMA.vocab * LLAMA.hidden - 65 * LLAMA.hidden)
    core = plain.f - products
    assert plain.recompute == 0
    assert plain.w == pytest.approx(products, rel=1e-6)
    assert plain.b == pytest.approx(products + 2.5 * core, rel=1e-6)
    assert (again.f, again.b, again.w) == (plain.f, plain.b, plain.w)
    # All but the head and each layer's last product, which nobody needs again.
    last = 2 * 32 * 14336 * 4096
    assert again.recompute == pytest.approx(plain.f - 2 * LLAMA.vocab * LLAMA.hidden - last, rel=1e-6)


def test_a_level_that_needs_more_says_which_part() -> None:
    def at(zero: int, gradients: float, optimizer: float) -> AtLevel:
        parts = {"gradients": round(gradients * GIB), "optimizer": round(optimizer * GIB)}
        step = StepTime({"compute": 1.0}, 1, 1, 1.0, 1.0, 1, 0)
        return AtLevel(parse(f"dp=2 zero={zero} mb=1"), MemoryBreakdown(0, "F of stage 0", parts, {}), 80 * GIB, step)

    assert words.levels([at(0, 4, 8), at(1, 4, 4)]) == []
    (said,) = words.levels([at(1, 4, 4), at(2, 5.5, 4), at(3, 3, 4)])
    assert said == "zero=2 needs 1.5 GiB more than zero=1: gradients +1.5 GiB against nothing that it cuts"
