"""Model state against published bytes: parameters, gradients and optimizer of one rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.account.memory import pipeline_of
from shardwise.account.static import Columns, columns_of
from shardwise.cluster import parse_cluster
from shardwise.model.hf import from_config, load_model
from shardwise.model.spec import Model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import PRECISIONS, Job, Precision
from shardwise.plan.layout import parse
from shardwise.plan.stack import Stack, State, load_stack
from tests.golden.worked_examples import digit, published

pytestmark = pytest.mark.golden

JOB = Job(load_model("llama-3.1-8b"), parse_cluster("128x8xh100"), 8192, 1024)
MEGATRON = load_stack("megatron")
COUNTERS = 4 * (2 * 32 + 1 + 2)
"""AdamW's step counters: two flat views a layer (vectors and matrices), one of the embedding, two of the head."""

PARTS = ("parameters", "gradients", "optimizer")


def columns(text: str, job: Job) -> Columns:
    """`job` on as many devices as the layout has."""
    layout = parse(text)
    world = layout.world_size
    devices = parse_cluster(f"{world // 8}x8xh100" if world > 8 else f"{world}xh100")
    return columns_of(replace(job, cluster=devices), LayoutBatch.of([layout]).expanded(2))


def state(text: str, job: Job = JOB) -> dict[str, int]:
    """Bytes of the first pipeline rank, by part."""
    layout = parse(text)
    held = pipeline_of(job.model, layout.pp, layout.schedule, layout.split).held[0]
    parts = columns(text, job).static(held)
    return {name: int(np.asarray(parts[name]).flat[0]) for name in PARTS}


# ---------------------------------------------------------------------------------------------- bytes a parameter


@pytest.mark.parametrize(
    ("text", "weights", "gradients", "optimizer"),
    [
        ("dp=64 mb=1", 2, 4, 12),
        ("dp=64 zero=1 mb=1", 2, 4, 12 / 64),
        ("dp=64 zero=2 mb=1", 2, 4 / 64, 12 / 64),
        ("dp=64 zero=3 mb=1", 0, 4 / 64, 12 / 64),
    ],
)
def test_bytes_of_a_parameter(text: str, weights: float, gradients: float, optimizer: float) -> None:
    """Megatron-LM's bf16 recipe, 18 and 6 + 12/D (docs, distributed optimizer); FSDP with fp32 shards, 16/D, and
    2 + 16/D where parameters are not resharded."""
    found, p = state(text), JOB.model.parameters
    assert found["parameters"] == weights * p
    assert found["gradients"] == gradients * p
    assert found["optimizer"] == optimizer * p + COUNTERS


SQUARE = load_model("mlp:D=8192,F=32768,L=14")
"""7.5 B parameters whose rows 1,024 ranks share evenly, so that bytes a parameter are exact."""


def each(recipe: State, precision: Precision, text: str, parts: tuple[str, ...] = PARTS) -> float:
    """Bytes a parameter."""
    job = Job(SQUARE, JOB.cluster, 1024, 1024, precision, Stack(name="a recipe", state=recipe))
    # Where the optimizer's bytes are the precision's own, step counters are among them.
    counters = 0 if recipe.optimizer_bytes_per_parameter else 4 * SQUARE.layers
    found = state(text, job)
    return (sum(found[part] for part in parts) - counters * ("optimizer" in parts)) / SQUARE.parameters


@pytest.mark.parametrize(
    ("name", "precision", "text", "wanted"),
    [
        ("megatron", "bf16", "dp=64 mb=1", 18),
        ("megatron", "bf16", "dp=64 zero=1 mb=1", 6 + 12 / 64),
        ("megatron-2021", "fp16", "dp=64 mb=1", 20),
        ("shardwise", "fp32", "dp=64 mb=1", 16),
        ("shardwise", "fp32", "dp=64 zero=1 mb=1", 4 + 4 + 12 / 64),
        ("shardwise", "bf16-pure", "dp=64 mb=1", 8),
        ("torchtitan", "bf16", "dp=64 zero=3 mb=1", 16 / 64),
        ("fsdp2", "bf16", "dp=64 zero=2 mb=1", 2 + 16 / 64),
        ("llm-foundry", "bf16", "dp=64 zero=3 mb=1", 16 / 64),
        ("maxtext", "bf16", "dp=64 zero=3 mb=1", 16 / 64),
        ("deepspeed", "bf16", "dp=64 zero=1 mb=1", 6 + 12 / 64),
    ],
)
def test_recipes(name: str, precision: str, text: str, wanted: float) -> None:
    """Megatron-LM's docs (distributed optimizer): 18, 6 + 12/d; 20; FSDP's fp32 shards 16/d."""
    assert each(load_stack(name).state, PRECISIONS[precision], text) == wanted


# ---------------------------------------------------------------------------------------------- the ZeRO paper


def zero_paper(zero: int, dp: int) -> float:
    """Bytes a parameter by 1910.02054, section 3.1: 2 + 2 + 12. Its ZeRO-3 keeps the two-byte weights of the shard as
    well, where ours casts the master's when it gathers."""
    recipe = State(gradients="compute", optimizer_bytes_per_parameter=14 if zero == 3 else 12)
    shards = f" zero={zero}" if zero else ""
    return each(recipe, PRECISIONS["fp16"], f"dp={dp}{shards} mb=1")


@pytest.mark.parametrize(
    ("row", "zero", "billions", "dp"),
    [
        ("W002", 0, 128, 1),
        ("W003", 0, 1000, 1),
        ("W070", 0, 1.5, 1),
        ("W004", 1, 7.5, 4),
        ("W005", 2, 7.5, 4),
        ("W008", 2, 128, 4),
        ("W009", 3, 128, 4),
        ("W010", 1, 1000, 4),
        ("W011", 2, 1000, 4),
        ("W012", 3, 1000, 4),
        ("W013", 1, 7.5, 16),
        ("W014", 2, 7.5, 16),
        ("W015", 3, 7.5, 16),
        ("W016", 1, 128, 16),
        ("W017", 2, 128, 16),
        ("W019", 1, 1000, 16),
        ("W021", 3, 1000, 16),
        ("W022", 1, 7.5, 64),
        ("W023", 2, 7.5, 64),
        ("W024", 3, 7.5, 64),
        ("W025", 1, 128, 64),
        ("W026", 2, 128, 64),
        ("W028", 1, 1000, 64),
        ("W029", 2, 1000, 64),
        ("W030", 3, 1000, 64),
        ("W031", 1, 7.5, 256),
        ("W032", 2, 7.5, 256),
        ("W033", 3, 7.5, 256),
        ("W034", 1, 128, 256),
        ("W035", 2, 128, 256),
        ("W036", 3, 128, 256),
        ("W037", 1, 1000, 256),
        ("W039", 3, 1000, 256),
        ("W040", 1, 7.5, 1024),
        ("W041", 2, 7.5, 1024),
        ("W042", 3, 7.5, 1024),
        ("W046", 1, 1000, 1024),
        ("W047", 2, 1000, 1024),
        ("W048", 3, 1000, 1024),
    ],
)
def test_the_table_of_the_zero_paper(row: str, zero: int, billions: float, dp: int) -> None:
    """Table 1, GB of a device. Large values are cut off in print, not rounded."""
    assert abs(zero_paper(zero, dp) * billions - published(row)) < digit(row)


@pytest.mark.parametrize(
    ("row", "zero", "mp"),
    [
        ("W049", 0, 1),
        ("W051", 2, 1),
        ("W052", 3, 1),
        ("W053", 0, 2),
        ("W054", 1, 2),
        ("W056", 3, 2),
        ("W057", 0, 4),
        ("W058", 1, 4),
        ("W059", 2, 4),
        ("W060", 3, 4),
        ("W061", 0, 8),
        ("W062", 1, 8),
        ("W064", 3, 8),
        ("W065", 0, 16),
        ("W066", 1, 16),
        ("W067", 2, 16),
        ("W068", 3, 16),
    ],
)
def test_the_largest_models_of_the_zero_paper(row: str, zero: int, mp: int) -> None:
    """Table 2: 32 GB a device, 64 data-parallel ranks. Its columns beyond the first multiply a rounded number."""
    assert 32 * mp / zero_paper(zero, 64) == pytest.approx(published(row), rel=0.01)


# ---------------------------------------------------------------------------------------------- other tables


def test_ultra_scale_playbook() -> None:
    """W227: 16 GB for 1 B parameters, 20 with gradients accumulated in fp32 beside those of two bytes."""
    found = [each(State("compute", n), PRECISIONS["bf16"], "dp=1 mb=1") for n in (12, 16)]
    assert found == [16, 20]
    assert published("W227") == 16


def test_the_scaling_book() -> None:
    """W185: Llama 2 13B, weights of two bytes and two moments of four, 130 GB. W193: Llama 3 70B, 140 and 560 GB."""
    recipe, bf16 = State("compute", optimizer_bytes_per_parameter=8), PRECISIONS["bf16"]
    weights, moments = (each(recipe, bf16, "dp=1 mb=1", (part,)) for part in ("parameters", "optimizer"))
    assert 13 * (weights + moments) == published("W185")
    assert (70 * weights, 70 * moments) == (published("W193"), 560)


def test_the_states_of_cs336() -> None:
    """W274, W275, W277 (stanford-cs336, assignment 2): 126 blocks of two linears, everything in fp32; 95 GB a chip."""
    model = load_model("mlp:D=16384,F=53248,L=126")
    assert model.parameters == published("W274")
    job = Job(model, JOB.cluster, 1024, 1024, PRECISIONS["fp32"])
    total = sum(state("dp=1 mb=1", job).values()) - 4 * model.layers
    assert total == published("W275")
    assert -(-total // 95_000_000_000) == published("W277")


# ---------------------------------------------------------------------------------------------- Megatron-LM's report


def test_megatrons_report_of_8b() -> None:
    """W254: theoretical_memory_usage.py, Llama 3 8B, DP 8, distributed optimizer."""
    assert sum(state("dp=8 zero=1 mb=1", replace(JOB, stack=MEGATRON)).values()) == published("W254")


def test_megatrons_report_of_70b() -> None:
    """W256: the same, Llama 3 70B, TP 8, PP 4, DP 4, first stage, 6 + 12/4 bytes a parameter.

    Megatron gives every stage a quarter of the final norm's 8,192 weights.
    """
    job = replace(JOB, model=load_model("llama-3.1-70b"), stack=MEGATRON)
    ours = sum(state("tp=8 pp=4 dp=4 zero=1 mb=1", job).values())
    assert ours + 9 * 8192 // 4 == published("W256")


@pytest.mark.parametrize("row", ["W260", "W262"])
def test_megatrons_report_of_gpt_3(row: str) -> None:
    """TP 8, PP 8, DP 1: 18 bytes a parameter, whatever the chunks. The report has no biases and no positions, and of
    the norms an eighth of all 96 layers'."""
    model, h = load_model("gpt-3-175b"), 12288
    job, text = Job(model, JOB.cluster, 2048, 64, stack=MEGATRON), "tp=8 pp=8 mb=1"
    storage = columns(text, job).storage
    held = storage["embedding"].numel + 12 * storage["layer"].numel
    matrices = sum(
        model.size(p) * units // 8
        for kind, units in (("embedding", 1), ("layer", 12))
        for p in model.block(kind).parameters
        if len(p.dims) == 2 and p.dims[0] != "P"
    )
    norms = (96 * 4 * h + 2 * h) // 8
    assert sum(state(text, job).values()) / held * (matrices + norms) == published(row)


@pytest.mark.parametrize(("row", "dense", "experts"), [("W266", 352 + 36, 64), ("W267", 576 + 136, 64)])
def test_experts_are_cut_over_their_own_ranks(row: str, dense: int, experts: int) -> None:
    """Megatron-LM, test_weight_and_optimizer_memory.py: 16 data-parallel ranks are 6 + 12/16 bytes for dense
    parameters, 4 of the experts' own 6 + 12/4 for theirs. Its tiny models have so many of either on a rank."""
    shape = {"W266": "tp=2 pp=2 ep=2 etp=4 dp=16 zero=1 mb=1", "W267": "tp=2 ep=2 etp=4 dp=16 zero=1 mb=1"}[row]
    columns_ = columns(shape, replace(JOB, model=tiny_moe(), global_batch=16, stack=MEGATRON))
    bytes_ = 0.0
    for storage, count in (("moe", dense), ("moe.experts", experts)):
        found = columns_.storage[storage]
        shards = int(np.asarray(found.padded // found.shard).flat[0])
        bytes_ += count * (2 + columns_.job.gradient_bytes + 12 / shards)
    assert bytes_ == published(row)


def tiny_moe() -> Model:
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 256,
    }
    return from_config(config, "tiny")
