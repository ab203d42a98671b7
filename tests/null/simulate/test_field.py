"""Steps over the whole field: closed forms against the walk, communication against the ledger, what must not happen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.account.comm import predict_ledger
from shardwise.collective import Collective, Kind, Phase
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rules import findings
from shardwise.plan.stack import SHARDWISE, Overlap
from shardwise.search.solve import SLACK
from shardwise.simulate.network import collective_s, links
from shardwise.simulate.step import CAUSES, step_seconds, step_time, timeline
from tests.support.drawn import MODELS, drawn, job_of

AFTER = ("reduce gradients", "optimizer", "gather parameters")


def seconds(job: Job, layout: Layout) -> float:
    return step_time(job, layout).total_s


# ------------------------------------------------------------------------------------------------ closed form and walk


@pytest.mark.parametrize("name", MODELS)
def test_closed_forms_never_rule_out_the_best(name: str) -> None:
    """They may promise too much, and the walk corrects that; too little only by the search's slack."""
    job = job_of(name)
    layouts = drawn(job, 20, 21)
    walked = np.asarray([seconds(job, x) for x in layouts])
    error = step_seconds(job, LayoutBatch.of(layouts)) / walked - 1
    assert error.max() < SLACK, str(layouts[int(error.argmax())])
    assert np.median(np.abs(error)) < 0.01


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss-120b", "pp=8 dp=2 schedule=interleaved:3 mb=1 recompute=full"),
        ("nemotron-3-nano", "pp=8 dp=2 zero=2 schedule=interleaved:2 mb=1 recompute=norm,act"),
        ("llama-3.1-8b", "tp=2 pp=8 schedule=interleaved:2 mb=2"),
    ],
)
def test_closed_forms_never_rule_out_the_best_of_ragged_groups(name: str, text: str) -> None:
    """Interleaved micro-batches that are no multiple of the stages' ranks: the last group is short."""
    job, layout = job_of(name, "2x8xh100", batch=24), parse(text)
    assert job.micro_batches(layout) % layout.pp
    assert float(step_seconds(job, LayoutBatch.of([layout]))[0]) < (1 + SLACK) * seconds(job, layout)


@pytest.mark.parametrize("name", ["deepseek-v3", "nemotron-3-nano", "gemma-2-9b"])
def test_many_layouts_are_their_single_selves(name: str) -> None:
    job = job_of(name)
    layouts = drawn(job, 25, 22)
    many = step_seconds(job, LayoutBatch.of(layouts)).tolist()
    assert many == pytest.approx([float(step_seconds(job, LayoutBatch.of([x]))[0]) for x in layouts], rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_are_the_step(name: str) -> None:
    """All causes, none below zero; what is not in the timeline comes after it."""
    job = job_of(name)
    for layout in drawn(job, 6, 23):
        step = step_time(job, layout)
        assert tuple(step.parts_s) == CAUSES
        assert min(step.parts_s.values()) >= 0
        assert (step.parts_s["recompute"] > 0) == (layout.recompute != "none")
        assert step.parts_s["cp communication"] == 0 or layout.cp > 1
        assert step.parts_s["ep communication"] == 0 or layout.ep * layout.etp > 1
        assert step.parts_s["tp communication"] == 0 or layout.tp > 1
        if layout.zero < 2:
            _, times = timeline(job, layout)
            after = sum(step.parts_s[cause] for cause in AFTER)
            assert step.total_s - after == pytest.approx(times.span_s, rel=1e-3), str(layout)


# ------------------------------------------------------------------------------------------------ ledger and time


BARE = Overlap(cp=0.0, final=0.0)


def bare(job: Job) -> Job:
    """Nothing is hidden, and kernels that only move memory take no time: what is left of communication is its
    collectives."""
    device = job.cluster.device
    efficiency = replace(device.efficiency, launch_s=0.0)
    device = replace(device, memory_bandwidth_GBps_per_device=1e21, efficiency=efficiency)
    return replace(job, cluster=replace(job.cluster, device=device), stack=replace(SHARDWISE, overlap=BARE))


def priced(job: Job, layout: Layout) -> dict[str, float]:
    """Seconds of rank 0's collectives by cause, each priced by the ranks that it names."""
    found: dict[str, float] = dict.fromkeys(("tp communication", "cp communication", "ep communication", *AFTER), 0.0)
    causes = {"tp": "tp communication", "cp": "cp communication", "ep": "ep communication", "etp": "ep communication"}
    for c, count in predict_ledger(job, layout, 0).items():
        match c.key.phase:
            case Phase.F | Phase.B | Phase.W | Phase.RECOMPUTE:
                cause = causes[c.key.axis]
            case Phase.GATHER:
                cause = "gather parameters"
            case _:
                cause = "reduce gradients"
        if c.kind is not Kind.RECV:  # arrives while the same is sent
            found[cause] += count * one_s(job, layout, c)
    return found


def one_s(job: Job, layout: Layout, c: Collective) -> float:
    if c.kind is Kind.SEND:
        ring = layout.mesh.group(0, ("cp",))
        group = links(job.cluster, (ring[1] - ring[0], len(ring)))
        return float(c.payload_bytes / group.bytes_per_s + group.ring_s / (len(ring) - 1))
    step = c.ranks[1] - c.ranks[0]
    assert c.ranks == tuple(range(0, step * len(c.ranks), step))
    return float(collective_s(c.kind, c.payload_bytes, links(job.cluster, (step, len(c.ranks)))))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-3.1-8b", "tp=4 cp=4 dp=4 zero=1 mb=1"),
        ("llama-3.1-8b", "tp=2 cp=8 cp_kind=ulysses dp=4 zero=2 mb=1"),
        ("llama-3.1-8b", "cp=8 cp_kind=gather dp=8 mb=1 recompute=full"),
        ("llama-3.1-8b", "tp=4 cp=2 dp=8 zero=1 mb=1 recompute=core"),
        ("llama-3.1-8b", "tp=4 sp=0 dp_replicate=4 dp_shard=4 zero=2 mb=3"),
        ("qwen3-30b-a3b", "ep=8 dp=64 mb=1"),
        ("qwen3-30b-a3b", "ep=16 dp=64 zero=1 mb=1 recompute=norm,act"),
        ("qwen3-30b-a3b", "tp=4 ep=8 etp=4 dp=16 zero=2 mb=1"),
        ("deepseek-v3", "tp=2 cp=2 ep=32 dp_replicate=2 dp_shard=8 zero=1 mb=1 recompute=full"),
        ("nemotron-3-nano", "tp=2 ep=8 dp=32 zero=2 mb=1"),
        ("gpt-oss-120b", "tp=8 cp=2 cp_kind=gather ep=4 dp=4 zero=1 mb=1"),
        ("qwen3-30b-a3b", "tp=16 ep=4 dp=4 mb=1"),
    ],
)
def test_communication_is_the_ledger_priced(name: str, text: str) -> None:
    """What the step says of each cause is what its collectives cost, one by one."""
    job, layout = bare(job_of(name)), parse(text)
    assert not findings(layout, job)
    parts, found = step_time(job, layout).parts_s, priced(job, layout)
    for cause in ("tp communication", "cp communication", "ep communication", "gather parameters"):
        assert parts[cause] == pytest.approx(found[cause], rel=1e-9, abs=1e-12), cause
    # Scalars travel as 8 bytes, whatever they are.
    assert parts["reduce gradients"] == pytest.approx(found["reduce gradients"], rel=1e-5)


# ------------------------------------------------------------------------------------------------ what must not happen


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_slower_machines_are_slower(name: str) -> None:
    """A half of each bandwidth, of each rate: never a shorter step."""
    job = job_of(name)
    cluster, device = job.cluster, job.cluster.device
    thinner = replace(
        cluster,
        levels=tuple(replace(x, bandwidth_GBps_per_device=x.bandwidth_GBps_per_device / 2) for x in cluster.levels),
    )
    duller = replace(cluster, device=replace(device, peak_flops={k: v / 2 for k, v in device.peak_flops.items()}))
    leaner = replace(
        cluster, device=replace(device, memory_bandwidth_GBps_per_device=device.memory_bandwidth_GBps_per_device / 2)
    )
    layouts = drawn(job, 12, 24)
    times = np.asarray([seconds(job, x) for x in layouts])
    for slower in (thinner, duller, leaner):
        worse = np.asarray([seconds(replace(job, cluster=slower), x) for x in layouts])
        assert (worse >= times * (1 - 1e-9)).all()
        assert (worse > times).any()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
def test_recomputing_more_never_takes_less_time(name: str) -> None:
    job = job_of(name)
    for layout in drawn(job, 5, 25, lambda x: x.recompute == "none"):
        times = [
            seconds(job, replace(layout, recompute=way)) for way in ("none", "act", "norm,act", "norm,act,core", "full")
        ]
        assert times == sorted(times), str(layout)


def test_a_slanted_router_takes_longer() -> None:
    """The fullest rank sets the pace of experts."""
    job = job_of("qwen3-30b-a3b")
    for layout in drawn(job, 6, 26):
        even, slanted = (step_time(replace(job, imbalance=x), layout).parts_s for x in (1.0, 1.5))
        assert slanted["compute"] > even["compute"]
        assert slanted["tp communication"] == even["tp communication"]


@pytest.mark.parametrize("axis", ["tp", "cp", "ep", "reduce", "final", "publish"])
def test_hiding_communication_never_costs(axis: str) -> None:
    """Nothing hidden, and all of it; the closed form says the same."""
    job = job_of("qwen3-30b-a3b")
    layouts = drawn(job, 10, 27)
    shown, hidden = (
        replace(job, stack=replace(SHARDWISE, overlap=replace(BARE, **{axis: share}))) for share in (0.0, 1.0)
    )
    for layout in layouts:
        assert seconds(hidden, layout) <= seconds(shown, layout) * (1 + 1e-9), str(layout)
    batch = LayoutBatch.of(layouts)
    assert (step_seconds(hidden, batch) < step_seconds(shown, batch)).any()


def test_a_ring_hides_behind_long_attention_and_not_behind_short() -> None:
    """Tokens a rank grow: what is passed grows with them, what it hides behind with their square. What stays are the
    kernels that join the parts."""
    layout = parse("cp=8 dp=8 zero=1 mb=1")
    shares: list[float] = []
    for seq_len in (4096, 32768, 262144):
        parts = step_time(job_of("llama-3.1-8b", seq_len=seq_len, batch=64), layout).parts_s
        shares.append(parts["cp communication"] / parts["compute"])
    assert shares[0] > 2 * shares[1] > 4 * shares[2]
