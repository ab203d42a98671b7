"""Published failures of systems that combine parallelisms, re-enacted: each name starts with what went wrong elsewhere.

Threads are told apart by project and number: the layouts below are the smallest that showed the fault. Every run is
held against plain torch in one process: loss, each gradient by name, clip norm, replicas bit-equal, AdamW.
"""

from __future__ import annotations

import pytest
import torch

from shardwise.account.memory import memory_of
from shardwise.collective import Labels
from shardwise.plan.job import Job
from shardwise.plan.layout import LayoutError, parse, split_of
from shardwise.plan.rules import findings
from shardwise.plan.runs import runs_here
from shardwise.plan.shards import stages_of
from shardwise.prove.dryrun import prove_rank
from shardwise.train.comm import Comm
from shardwise.train.optim import OptimizerSettings
from shardwise.train.rank import build_rank, train_step
from shardwise.train.threads import run_threads
from tests.support.models import job, tiny
from tests.support.parity import assert_parity, run_rank

torch.set_num_threads(1)

PARITY: dict[str, tuple[str, int, bool]] = {
    "Megatron-LM 1446: norm gradients under sequence parallelism": ("tp=2 mb=2", 1, False),
    "Megatron-LM 7452: explicit groups, two of two": ("tp=2 dp=2 mb=1", 2, False),
    "Megatron-LM 844: tied copies summed on matching partitions": ("pp=2 dp=2 zero=1 mb=1", 3, True),
    "piper 13: tied copies synchronised": ("pp=2 mb=2", 3, True),
    "torchtitan 4486: tied and pipelined, one count in the norm": ("pp=4 mb=1", 3, True),
    "pytorch 144530: zero bubble reduces data-parallel gradients": ("pp=2 dp=2 schedule=zb-h1 mb=1", 3, False),
    "pytorch 164777: ZeRO-3 under gpipe": ("pp=2 dp=2 zero=3 schedule=gpipe mb=1", 3, False),
    "pytorch 164777: ZeRO-3 under 1f1b": ("pp=2 dp=2 zero=3 schedule=1f1b mb=1", 3, False),
    "pytorch 164777: ZeRO-3 under interleaved": ("pp=2 dp=2 zero=3 schedule=interleaved:2 mb=1", 3, False),
    "pytorch 164777: ZeRO-3 under zero bubble": ("pp=2 dp=2 zero=3 schedule=zb-h1 mb=1", 3, False),
    "torchtitan 775: fewer micro-batches than stages": ("pp=4 mb=4", 3, False),
    "pytorch 127332: interleaved 1F1B does not cross": ("pp=4 schedule=interleaved:2 mb=1", 7, False),
    "gpt-neox 62: pipeline, recompute and ZeRO": ("pp=2 dp=2 zero=1 recompute=full mb=1", 3, False),
    "DeepSpeed 823: pipeline and sharded gradients, m = 4": ("pp=2 dp=2 zero=3 mb=1", 3, True),
    "Megatron-LM 7186: hybrid sharding adds every micro-batch": ("dp_replicate=2 dp_shard=2 zero=3 mb=1", 2, False),
    "build-nanogpt 30: accumulation over data parallelism": ("dp=2 mb=1", 2, False),
    "torchtitan 596: one clip norm over all stages": ("pp=2 schedule=gpipe mb=2", 3, False),
    "torchtitan 2206, transformers 34242: unequal valid tokens": ("dp=2 mb=2", 2, False),
    "pytorch 108869: fewer rows than ranks": ("dp=8 zero=3 mb=1", 2, False),
}
"""Thread and fault -> layout, layers, tied."""


@pytest.mark.parametrize(("text", "layers", "tied"), PARITY.values(), ids=PARITY.keys())
def test_a_published_failure_equals_one_process(text: str, layers: int, tied: bool) -> None:
    """Sequences with 16, 1, 0 and 9 valid tokens, so that no mean of means passes; dims that shards do not divide."""
    layout = parse(text)
    work = job(tiny(layers, tied, hidden=36, ffn=24, vocab=20), f"{layout.world_size}xcpu")
    assert not findings(layout, work)
    assert_parity(run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, True)), work, True)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("text", ["mb=2 recompute=full", "tp=2 pp=2 schedule=zb-h1 mb=2"])
def test_grouped_kv_heads_equal_one_process_and_are_proved(text: str, kv_heads: int) -> None:
    """Several query heads share a key and a value: no layout may give one of them the wrong one."""
    layout = parse(text)
    work = job(tiny(3, kv_heads=max(kv_heads, layout.tp)), f"{layout.world_size}xcpu")
    assert_parity(run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, True)), work, True)
    measured(work, text)


@pytest.mark.parametrize(
    ("layers", "text"),
    [(30, "pp=4 mb=1"), (27, "pp=2 mb=1"), (29, "pp=4 schedule=interleaved:2 mb=1"), (10, "pp=4 schedule=zb-h1 mb=1")],
    ids=["Megatron-LM 1304", "torchtitan 963", "interleaved", "zero bubble"],
)
def test_no_layer_is_lost_by_an_uneven_split(layers: int, text: str) -> None:
    layout, model = parse(text), tiny(layers)
    assert not findings(layout, job(model, f"{layout.world_size}xcpu"))
    assert sum(split_of(layout, layers)) == layers
    held = [unit.name for stage in stages_of(model, layout) for unit in stage.units]
    assert held == [unit.name for unit in model.units()]


PLANNED_ONLY = {
    "runs-context": "cp=2 mb=1",
    "runs-copies": "pp=2 schedule=dualpipe mb=8",
    "runs-recompute": "mb=1 recompute=act",
    "runs-kv-heads": "tp=4 mb=1",
    "runs-vocab": "tp=4 mb=1",
    "runs-order": "pp=2 dp=2 mb=1 order=dp",
}


@pytest.mark.parametrize("rule", PLANNED_ONLY)
def test_what_is_planned_only_is_refused_by_name(rule: str) -> None:
    """gpt-neox 62, DeepSpeed 1629: refused with a reason, not with a KeyError deep inside, nor with a wrong loss."""
    layout = parse(PLANNED_ONLY[rule])
    work = job(tiny(4, vocab=42, kv_heads=2 if rule == "runs-kv-heads" else 8), f"{layout.world_size}xcpu")
    assert not findings(layout, work)
    assert rule in {f.rule for f in runs_here(layout, work)}
    with pytest.raises(LayoutError, match=rule):
        prove_rank(work, layout, 0, tensors="real")


def measured(work: Job, text: str) -> list[int]:
    """Peak of each rank's dry run on real tensors; the prediction counts all its scalars, some come later."""
    layout = parse(text)
    assert not findings(layout, work)
    proofs = [prove_rank(work, layout, rank, tensors="real", full=True) for rank in range(layout.world_size)]
    scalars = 8 * (work.micro_batches(layout) + 2)  # losses, the scale and a gradient of one, in at most float64
    assert all(p.ok and abs(p.measured_peak_bytes - p.predicted_peak_bytes) <= scalars for p in proofs)
    return [p.measured_peak_bytes for p in proofs]


def test_peaks_fall_with_the_zero_stage() -> None:
    """Megatron-LM 6314: a bucket as large as the model put one stage above the next."""
    work = job(tiny(8, hidden=64, ffn=192), "4xcpu", precision="bf16")
    whole, first, third = (max(measured(work, f"dp=4 zero={zero} mb=1")) for zero in (0, 1, 3))
    assert whole > first > third


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_peaks_do_not_grow_with_the_micro_batches(schedule: str) -> None:
    """marin 6532: weight gradients of zero bubble were kept apart, one set a micro-batch."""
    peaks: dict[int, list[int]] = {}
    for m in (4, 8, 16):
        work = job(tiny(4, hidden=64, ffn=192), "2xcpu", batch=m)
        per_rank = measured(work, f"pp=2 schedule={schedule} mb=1")
        # What grows are the step's token numbers alone: ids on the first rank, targets and losses on the last.
        losses = 8 * m
        data = [8 * work.seq_len * m, 8 * work.seq_len * m + losses]
        peaks[m] = [peak - n for peak, n in zip(per_rank, data, strict=True)]
    assert peaks[4] == peaks[8] == peaks[16]


def test_uneven_stages_are_counted_one_by_one() -> None:
    """Megatron-Bridge 5077, Megatron-LM 482: an estimate from the mean stage was a third too low."""
    work = job(tiny(8, hidden=64, ffn=192), "4xcpu")
    text = "pp=4 split=1,2,2,3 mb=1"
    assert measured(work, text) == pytest.approx([m.proved_bytes for m in memory_of(work, parse(text))], abs=100)


MASKED = (
    "mb=2",
    "tp=2 pp=2 dp=2 zero=1 mb=1",
    "pp=2 dp_replicate=2 dp_shard=2 zero=3 schedule=zb-h1 mb=1",
    "dp=4 mb=2",
)


@pytest.mark.parametrize("text", MASKED)
def test_a_step_without_a_valid_token_is_no_number_less(text: str) -> None:
    """torchtitan 4167: loss and gradients are 0, weights only decay, nothing is NaN."""
    layout = parse(text)
    work = job(tiny(3, tied=True), f"{layout.world_size}xcpu")
    settings = OptimizerSettings(learning_rate=0.1, weight_decay=0.5, clip_norm=1.0)

    def rank(comm: Comm) -> None:
        built = build_rank(work, layout, comm, Labels(), settings=settings)
        before = {name: state.master.clone() for name, state in built.states.items()}
        shape = built.micro_batches, work.cut(layout).tokens
        ids = torch.ones(shape, dtype=torch.int64) if built.needs_ids else None
        targets = torch.full(shape, -100) if built.needs_targets else None
        result = train_step(built, ids, targets)
        assert (float(result.loss), float(result.norm)) == (0.0, 0.0)
        for name, state in built.states.items():
            assert not state.gradient_shard.any()
            vector = state.storage.vector_numel
            assert torch.equal(state.master[:vector], before[name][:vector])
            torch.testing.assert_close(state.master[vector:], before[name][vector:] * (1 - 0.1 * 0.5))

    run_threads(layout.world_size, rank)


def test_no_rank_draws_from_the_global_generator() -> None:
    """Megatron-DeepSpeed 276: a loader on one rank of a tensor-parallel group moved its random stream apart."""
    layout = parse("tp=2 pp=2 mb=2")
    work = job(tiny(3), "4xcpu")
    before = torch.get_rng_state()
    run_threads(4, lambda comm: run_rank(comm, work, layout, False))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("vocab", "tp", "runs"), [(129280, 24, False), (129280, 8, True), (20, 8, False)])
def test_a_vocabulary_that_does_not_divide_is_padded_by_the_plan_and_refused_by_the_runtime(
    vocab: int, tp: int, runs: bool
) -> None:
    """sglang 31799"""
    found = runs_here(parse(f"tp={tp} mb=1"), job(tiny(4, vocab=vocab), f"{tp}xcpu"))
    assert runs == ("runs-vocab" not in {f.rule for f in found})
    assert runs or any("vocabulary" in f.message for f in found)
