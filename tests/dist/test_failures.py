"""Published failures of systems that combine parallelisms, re-enacted: each name starts with what went wrong elsewhere.

Threads are told apart by project and number: the layouts below are the smallest that showed the fault. Every run is
held against plain torch in one process: loss, each gradient by name, clip norm, replicas bit-equal, AdamW.
"""

from __future__ import annotations

import pytest
import torch

from shardwise.account.memory import memory_of
from shardwise.cluster import parse_cluster
from shardwise.collective import Labels
from shardwise.model.hf import load_model
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, LayoutError, parse, split_of
from shardwise.plan.rules import findings
from shardwise.plan.runs import runs_here
from shardwise.plan.shards import rank_units, stages_of
from shardwise.prove.dryrun import prove_rank
from shardwise.train.comm import Comm
from shardwise.train.optim import OptimizerSettings
from shardwise.train.rank import build_rank, gradients, train_step
from shardwise.train.threads import run_threads
from tests.support import families
from tests.support.front import NAMES, Case
from tests.support.models import job, tiny
from tests.support.parity import Piece, Tensors, assemble, assert_parity, local_data, pieces, run_rank, whole_weights

torch.set_num_threads(1)

PARITY: dict[str, tuple[str, int, bool]] = {
    "Megatron-LM 1446: norm gradients under sequence parallelism": ("tp=2 mb=2", 1, False),
    "Megatron-LM 7452, finding 7: explicit groups, two of two": ("tp=2 dp=2 mb=1", 2, False),
    "Megatron-LM 844: tied copies summed on matching partitions": ("pp=2 dp=2 zero=1 mb=1", 3, True),
    "Megatron-LM 844: the same where gradients are cut": ("pp=2 dp=2 zero=2 mb=1", 3, True),
    "piper 13: tied copies synchronised": ("pp=2 mb=2", 3, True),
    "torchtitan 4486: tied and pipelined, one count in the norm": ("pp=4 mb=1", 3, True),
    "pytorch 144530: zero bubble reduces data-parallel gradients": ("pp=2 dp=2 schedule=zb-h1 mb=1", 3, False),
    "pytorch 144530: so does its V": ("pp=2 dp=2 schedule=zb-v mb=1", 3, False),
    "torchtitan 775: fewer micro-batches than stages": ("pp=4 mb=4", 3, False),
    "torchtitan 775: one micro-batch": ("pp=4 schedule=interleaved:2 mb=8", 7, False),
    "pytorch 127332: interleaved 1F1B does not cross": ("pp=4 schedule=interleaved:2 mb=1", 7, False),
    "gpt-neox 62: pipeline, recompute and ZeRO-1": ("pp=2 dp=2 zero=1 recompute=full mb=1", 3, False),
    "gpt-neox 62: pipeline, recompute and ZeRO-2": ("pp=2 dp=2 zero=2 recompute=full mb=1", 3, False),
    "DeepSpeed 823: pipeline and cut gradients, m = 4": ("pp=2 dp=2 zero=2 mb=1", 3, False),
    "DeepSpeed 823: pipeline and cut weights, m = 4": ("pp=2 dp=2 zero=3 mb=1", 3, True),
    "Megatron-LM 7186: hybrid ZeRO-1 adds every micro-batch": ("dp_replicate=2 dp_shard=2 zero=1 mb=1", 2, False),
    "Megatron-LM 7186: hybrid ZeRO-2 adds every micro-batch": ("dp_replicate=2 dp_shard=2 zero=2 mb=1", 2, False),
    "Megatron-LM 7186: hybrid ZeRO-3 adds every micro-batch": ("dp_replicate=2 dp_shard=2 zero=3 mb=1", 2, False),
    "build-nanogpt 30: four micro-batches over data parallelism": ("dp=2 mb=1", 2, False),
    "build-nanogpt 30: two micro-batches over data parallelism": ("dp=2 mb=2", 2, False),
    "build-nanogpt 30: one micro-batch over data parallelism": ("dp=2 mb=4", 2, False),
    "torchtitan 596: one clip norm over all stages": ("pp=2 schedule=gpipe mb=2", 3, False),
    "pytorch 108869: fewer rows than ranks": ("dp=8 zero=3 mb=1", 2, False),
    "Megatron-LM 1462: ranks that hold no layer join": ("pp=4 dp=2 zero=1 split=0,2,1,0 mb=1", 3, True),
}
"""Thread and fault -> layout, layers, tied."""


@pytest.mark.parametrize(("text", "layers", "tied"), PARITY.values(), ids=PARITY.keys())
def test_a_published_failure_equals_one_process(text: str, layers: int, tied: bool) -> None:
    """Sequences with 16, 1, 0 and 9 valid tokens, so that no mean of means passes; dims that shards do not divide."""
    layout = parse(text)
    work = job(tiny(layers, tied, hidden=36, ffn=24, vocab=20), f"{layout.world_size}xcpu")
    assert not findings(layout, work)
    assert_parity(run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, True)), work, True)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_unshards_and_reshards(name: str) -> None:
    """pytorch 164777: equal to one process under ZeRO-3, and of no weight more than its shard stays."""
    layout = parse(f"pp=2 dp=2 zero=3 schedule={name} mb=1")
    work = Case(layout, tied=True).job()

    def rank(comm: Comm) -> None:
        built = build_rank(work, layout, comm, Labels())
        tokens = torch.ones(built.micro_batches, work.cut(layout).tokens, dtype=torch.int64)
        gradients(built, tokens, tokens)
        for state in built.states.values():
            assert state.gradient is None
            assert all(slot.parameter.numel() == 0 for slot in state.slots.values())

    run_threads(layout.world_size, rank)
    assert_parity(run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, True)), work, True)


VECTORS = {
    "qwen2": "Megatron-LM 7452, finding 8: biases that are cut by heads",
    "qwen3": "Megatron-LM 7452, finding 11: one norm weight for the heads of all ranks",
    "olmo2": "a norm whose features are cut",
    "gpt2": "biases of both kinds of products, learned positions",
}


@pytest.mark.parametrize("text", ["tp=2 sp=0 mb=4", "tp=2 mb=2", "tp=2 pp=2 dp=2 zero=1 mb=1"])
@pytest.mark.parametrize("name", VECTORS, ids=VECTORS.values())
def test_vectors_inside_a_tensor_parallel_region_have_whole_gradients_that_the_norm_counts_once(
    name: str, text: str
) -> None:
    """By one rank of the runtime, whose gradients are held against transformers' in `test_families.py`."""
    config = families.CONFIGS[name]
    ids, targets = families.tokens(config["vocab_size"])

    def run(layout: Layout) -> tuple[list[torch.Tensor], Tensors]:
        work = families.job_of(config, layout, "fp64")

        def rank(comm: Comm) -> tuple[torch.Tensor, list[Piece]]:
            built = build_rank(work, layout, comm, Labels())
            result = gradients(built, local_data(work, layout, built, ids), local_data(work, layout, built, targets))
            return result.norm, [p for s in built.states.values() for p in pieces(s, s.gradient_shard)]

        found = run_threads(layout.world_size, rank)
        return [norm for norm, _ in found], assemble([held for _, held in found], whole_weights(work.model))

    _, wanted = run(parse("mb=4"))
    norms, found = run(parse(text))
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=f"gradient of {key}")
    whole = torch.stack([value.square().sum() for value in wanted.values()]).sum().sqrt()
    for norm in norms:
        torch.testing.assert_close(norm, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("text", ["tp=2 mb=8", "tp=2 pp=2 dp=2 zero=3 mb=2", "tp=4 sp=0 mb=1"])
@pytest.mark.parametrize("seq_len", [1, 2])
def test_sequences_shorter_than_their_cuts(seq_len: int, text: str) -> None:
    """verl 5981: what is too short to cut is cut across sequences, or refused at plan time."""
    layout = parse(text)
    work = job(tiny(3), f"{layout.world_size}xcpu", seq_len)
    assert not findings(layout, work)
    assert_parity(run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, False)), work, False)


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


EDGES_OF_THE_RUNTIME = (
    "cp=2 mb=1",
    "cp=2 tp=2 pp=2 mb=1",
    "pp=2 schedule=dualpipe mb=8",
    "pp=2 dp=2 zero=2 recompute=act mb=1",
    "tp=4 pp=2 mb=1",
    "pp=2 dp=2 mb=1 order=dp",
)


@pytest.mark.parametrize("text", EDGES_OF_THE_RUNTIME)
def test_a_legal_layout_is_refused_by_name_or_equals_one_process(text: str) -> None:
    """gpt-neox 62 and 67, DeepSpeed 1629, verl 5993: no KeyError deep inside, and no loss over a part of the tokens."""
    layout = parse(text)
    work = job(tiny(4, vocab=42, kv_heads=2), f"{layout.world_size}xcpu")
    assert not findings(layout, work)
    if refused := runs_here(layout, work):
        assert all(finding.message and finding.fix for finding in refused)
        with pytest.raises(LayoutError, match=refused[0].rule):
            prove_rank(work, layout, 0, tensors="real")
        with pytest.raises(RuntimeError, match=refused[0].rule):
            run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, True))
        return
    assert_parity(run_threads(layout.world_size, lambda comm: run_rank(comm, work, layout, True)), work, True)


ROUTED = {
    "mixtral-8x7b": "tp=2 ep=2 dp=4 mb=1",
    "deepseek-v3": "pp=4 ep=8 dp=8 zero=1 mb=1",
}


@pytest.mark.parametrize("name", ROUTED)
def test_a_mixture_of_experts_is_planned_and_not_yet_trained(name: str) -> None:
    """The failures of routed experts (see docs/known-failures.md) wait for this refusal to fall."""
    layout = parse(ROUTED[name])
    work = Job(load_model(name), parse_cluster(f"{layout.world_size}xcpu"), 4096, 64)
    assert "runs-model" in {finding.rule for finding in runs_here(layout, work)}


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
    peaks = [max(measured(work, f"dp=4 zero={zero} mb=1")) for zero in (0, 1, 2, 3)]
    assert peaks == sorted(set(peaks), reverse=True)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:2", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "dualpipe"])
def test_peaks_do_not_grow_with_the_micro_batches(schedule: str) -> None:
    """marin 6532: weight gradients of zero bubble were kept apart, one set a micro-batch."""
    peaks: dict[int, list[int]] = {}
    text = f"pp=2 schedule={schedule} mb=1"
    for m in (8, 16, 32):
        work = job(tiny(4, hidden=64, ffn=192), "2xcpu", batch=m)
        held = [rank_units(work.model, parse(text), rank).uses for rank in range(2)]
        # Its ids and targets lie there from the start.
        given = [8 * m * work.seq_len * sum(end in units for end in ("embedding", "head")) for units in held]
        peaks[m] = [peak - data for peak, data in zip(measured(work, text), given, strict=True)]
    for m in (16, 32):
        grown = [more - less for more, less in zip(peaks[m], peaks[8], strict=True)]
        assert all(0 <= n <= 8 * (m - 8) for n in grown)  # at most the losses: scalars, there from their making on


@pytest.mark.parametrize("text", ["mb=1", "tp=2 mb=1"])
def test_logits_exist_once(text: str) -> None:
    """Automodel 3907: of the largest tensor of a model with a large vocabulary there were several, and no estimate.

    A row of the vocabulary more costs its state, at most one more column of logits, and a row of the weight gradient
    that is added to the state.
    """
    peaks: list[int] = []
    for vocab in (4096, 8192):
        work = job(tiny(1, vocab=vocab), f"{parse(text).world_size}xcpu", seq_len=256)
        peaks.append(max(measured(work, text)))
    hidden, tokens = 32, 256
    elements = 2 * 4 * hidden + tokens + hidden  # of embedding and head: weight, gradient, two moments
    assert peaks[1] - peaks[0] <= 4096 // parse(text).tp * 8 * elements


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


@pytest.mark.parametrize(("vocab", "tp"), [(20, 8), (41, 2)])
def test_a_vocabulary_that_tp_does_not_divide_is_padded(vocab: int, tp: int) -> None:
    """sglang 31799: refused at start. Of 20 rows in parts of 3 the last rank has none."""
    layout = parse(f"tp={tp} mb=1")
    work = job(tiny(1, tied=True, vocab=vocab), f"{tp}xcpu")
    assert not [*findings(layout, work), *runs_here(layout, work)]
    assert_parity(run_threads(tp, lambda comm: run_rank(comm, work, layout, True)), work, True)
