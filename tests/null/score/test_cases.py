"""Published rows as questions: what is read, what a blank means, and why a row is skipped."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from shardwise.account.compute import flops_per_token
from shardwise.cluster.catalog import known_devices
from shardwise.model.hf import catalog
from shardwise.plan.job import PRECISIONS
from shardwise.plan.layout import parse, recompute_text
from shardwise.plan.stack import known_stacks
from shardwise.schedule import parse as parse_schedule
from shardwise.score.cases import Case, case_of
from shardwise.score.facts import MEMORIES, model_rules, source_of, sources, words
from shardwise.score.models import model_of
from shardwise.score.skip import KINDS, SkipError
from shardwise.score.table import COLUMNS, Published, own_table, read_table

ROWS = {row.id: row for row in read_table(own_table())}

TEXTS = ("sp", "recompute", "flash_attention", "tflops_convention")
LLAMA = replace(
    Published(**{name: "" if name in TEXTS else None for name in COLUMNS}),  # type: ignore[arg-type]
    id="x",
    model="Llama-3.1 8B",
    layers=32,
    hidden=4096,
    ffn_hidden=14336,
    heads=32,
    kv_heads=8,
    vocab=128256,
    accelerator="H100-80GB-SXM (DGX)",
    devices=64,
    tp=2,
    pp=2,
    schedule="1F1B",
    cp=1,
    dp=16,
    micro_batch=1,
    global_batch_seqs=128,
    seq_len=8192,
    precision="BF16",
    metric_step_time_s=2.0,
    source="NVIDIA/dgxc-benchmarking llama3.1/README.md",
    notes="",
)


def skipped(row: Published) -> tuple[str, str]:
    with pytest.raises(SkipError) as caught:
        case_of(row)
    return caught.value.kind, caught.value.detail


def layout(**changes: object) -> str:
    return str(case_of(replace(LLAMA, **changes)).layout)


# ------------------------------------------------------------------------------------------- what a row is read as


def test_blanks_of_a_megatron_source() -> None:
    case = case_of(LLAMA)
    assert case.layout == parse("tp=2 sp=1 pp=2 dp=16 zero=1 mb=1")
    assert (case.job.stack.name, case.job.precision.name, case.job.cluster.name) == ("megatron", "bf16", "8x8xh100")
    assert case.measured is not None
    assert (case.measured.seconds, case.measured.read_from) == (2.0, "step time")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"sp": "no"}, "tp=2 sp=0 pp=2 dp=16 zero=1 mb=1"),
        ({"zero_stage": 0}, "tp=2 pp=2 dp=16 mb=1"),
        ({"schedule": "interleaved-1F1B", "vpp": 4}, "tp=2 pp=2 dp=16 zero=1 schedule=interleaved:4 mb=1"),
        ({"schedule": "ZB-1p"}, "tp=2 pp=2 dp=16 zero=1 schedule=zb-h1 mb=1"),
        ({"pp": 1, "dp": None, "schedule": "interleaved-1F1B"}, "tp=2 dp=32 zero=1 mb=1"),
        ({"micro_batch": None, "global_batch_seqs": 16}, "tp=2 pp=2 dp=16 zero=1 mb=1"),
        ({"recompute": "selective (layernorm, moe_act)"}, "tp=2 pp=2 dp=16 zero=1 mb=1 recompute=norm,act"),
        ({"notes": "the dp column is wrong", "dp": 3}, "tp=2 pp=2 dp=16 zero=1 mb=1"),
        ({"notes": "HSDP", "zero_stage": 3}, "tp=2 pp=2 dp_replicate=2 dp_shard=8 zero=3 mb=1"),
        ({"ep": 4, "etp": 2, "dp": 16}, None),
    ],
)
def test_layouts(changes: dict[str, object], wanted: str | None) -> None:
    if wanted is None:
        assert skipped(replace(LLAMA, **changes))[0] == "rule"
    else:
        assert layout(**changes) == wanted


def test_layers_that_do_not_divide_fill_deepspeeds_stages_from_the_first_one_on() -> None:
    case = case_of(ROWS["r0742"])
    assert case.layout.split == (7,) * 11 + (1,)


def test_zero_shards_over_context_parallel_ranks_where_there_is_no_other() -> None:
    assert str(case_of(ROWS["r0593"]).layout) == "tp=2 cp=4 zero=1 mb=1"


def test_shards_that_the_notes_name() -> None:
    assert str(case_of(ROWS["r1013"]).layout).startswith("dp_replicate=8 dp_shard=128 zero=3")


@pytest.mark.parametrize(
    ("accelerator", "devices", "notes", "wanted"),
    [
        ("H100-80GB-SXM", 1, "", "1xh100"),
        ("H100-80GB-SXM", 2304, "", "288x8xh100"),
        ("GB200 NVL72", 64, "", "64xgb200"),
        ("GB200 NVL72", 256, "", "4x64xgb200"),
        ("TPU v5e", 1024, "4x v5e-256 slices over DCN", "4xv5e:16x16"),
        ("TPU v6e (Trillium)", 512, "2 slice(s) over DCN", "2xv6e:16x16"),
        ("TPU v5p", 64, "", "v5p:4x4x4"),
    ],
)
def test_clusters(accelerator: str, devices: int, notes: str, wanted: str) -> None:
    row = replace(LLAMA, accelerator=accelerator, devices=devices, notes=notes)
    row = replace(row, tp=1, pp=1, dp=devices, global_batch_seqs=2 * devices)
    assert case_of(row).job.cluster.name == wanted


def test_the_network_of_the_row_comes_before_that_of_its_source() -> None:
    bloom, usual = case_of(ROWS["r0662"]).job.cluster, case_of(LLAMA).job.cluster
    assert bloom.levels[-1].bandwidth_GBps_per_device * 8 == 400 / 8  # four cards of 100 Gb/s for eight devices
    noted = case_of(replace(LLAMA, notes="800 Gbps inter-node")).job.cluster
    assert noted.levels[-1].bandwidth_GBps_per_device == 800 / 8 / 8
    assert usual.levels[-1].bandwidth_GBps_per_device == 50


def test_kernels_that_the_row_names_come_before_those_of_the_stack() -> None:
    eager, flash = (case_of(replace(LLAMA, flash_attention=word)).job for word in ("no", "yes"))
    assert (eager.stack.saves.attention, flash.stack.saves.attention) == ("eager", "flash")
    assert eager.model != flash.model
    assert not case_of(ROWS["r0601"]).job.stack.fused  # FSDP eager
    assert case_of(ROWS["r0602"]).job.stack.fused  # FSDP + torch.compile


def test_precisions() -> None:
    assert "mode PURE" in ROWS["r0484"].notes
    assert case_of(ROWS["r0484"]).job.precision.name == "bf16-pure"
    assert case_of(ROWS["r0341"]).job.precision.name == "bf16"
    assert case_of(replace(LLAMA, precision="FP8 (hybrid, delayed scaling)")).job.precision.name == "fp8"


# ---------------------------------------------------------------------------------------------------- seconds of a step


def seconds(**changes: object) -> float:
    blank: dict[str, object] = {"metric_step_time_s": None, **changes}
    measured = case_of(replace(LLAMA, **blank)).measured
    assert measured is not None
    return measured.seconds


def test_a_rate_becomes_the_step_of_the_whole_batch() -> None:
    assert seconds(metric_tokens_per_s_per_device=1000.0) == pytest.approx(128 * 8192 / 64 / 1000)


@pytest.mark.parametrize(
    ("convention", "flops", "factor"),
    [
        ("model FLOPs, causal attention (halved)", "megatron", 1),
        ("model FLOPs, full (non-causal) attention", "narayanan", 1),
        ("hardware FLOPs incl. full recompute", "narayanan", 4 / 3),
    ],
)
def test_flops_become_seconds_by_the_rows_own_convention(convention: str, flops: str, factor: float) -> None:
    model = case_of(LLAMA).job.model
    wanted = factor * flops_per_token(model, 8192, flops) * 128 * 8192 / (400e12 * 64)
    assert seconds(metric_tflops_per_device=400.0, tflops_convention=convention) == pytest.approx(wanted)


def test_conventions_are_told_apart_by_the_papers_own_formula() -> None:
    """Narayanan et al. (2104.04473, eq. 3), for a step with recomputation: 96 B s L h^2 (1 + s / 6h + V / 16 L h)."""
    row = ROWS["r0779"]
    case = case_of(row)
    assert case.measured is not None
    b, s, layers, h, v = 2160, 2048, 96, 16384, 51200
    flops = 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert case.measured.seconds == pytest.approx(flops / (155e12 * 1920), rel=0.01)


def test_two_measurements_that_contradict_are_told() -> None:
    kind, detail = skipped(replace(LLAMA, metric_tokens_per_s_per_device=1000.0))
    assert (kind, "contradict" in detail) == ("measurement", True)


def test_a_run_that_did_not_fit_is_a_question_without_a_time() -> None:
    case = case_of(ROWS["r0719"])
    assert (case.out_of_memory, case.measured) == (True, None)


# ------------------------------------------------------------------------------------------------------------- skipped


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"notes": "pretrain; DO NOT SCORE: two rows swapped"}, "excluded", "contradicts itself"),
        ({"notes": "LoRA"}, "excluded", "adapters"),
        ({"source": "somewhere"}, "source", "somewhere"),
        ({"model": "Mystery 9B"}, "model", "Mystery 9B"),
        ({"layers": None}, "model", "num_hidden_layers"),
        ({"heads": 3}, "model", "num_attention_heads"),
        ({"accelerator": "Abacus"}, "device", "Abacus"),
        ({"devices": None}, "device", "unknown number"),
        ({"precision": "MXFP8"}, "precision", "MXFP8"),
        ({"precision": ""}, "precision", "not printed"),
        ({"accelerator": "A100-80GB-SXM", "precision": "FP8"}, "precision", "float8"),
        ({"recompute": "selective (mlp)"}, "recompute", "selective (mlp)"),
        ({"tp": None}, "layout", "tp is not printed"),
        ({"micro_batch": None}, "layout", "micro-batch"),
        ({"schedule": ""}, "layout", "schedule"),
        ({"schedule": "interleaved-1F1B"}, "layout", "vpp"),
        ({"schedule": "by feel"}, "layout", "by feel"),
        ({"seq_len": None}, "layout", "seq_len"),
        ({"global_batch_seqs": None}, "layout", "global_batch_seqs"),
        ({"dp": 8}, "rule", "(world)"),
        ({"tp": 64, "pp": 1, "dp": 1}, "rule", "(heads)"),
        ({"pp": 32, "tp": 1, "dp": 2, "schedule": "interleaved-1F1B", "vpp": 1000}, "layout", "stages"),
        ({"metric_step_time_s": None}, "measurement", "neither"),
        ({"metric_step_time_s": None, "metric_tflops_per_device": 400.0}, "measurement", "convention"),
    ],
)
def test_skips_say_their_kind_and_what_was_found(changes: dict[str, object], kind: str, said: str) -> None:
    found, detail = skipped(replace(LLAMA, **changes))
    assert (found, said in detail) == (kind, True), detail
    assert kind in KINDS


@pytest.mark.parametrize(
    "changes",
    [
        dict.fromkeys(("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab"), 1 << 24),
        {"layers": 1 << 24, "model": "Nemotron-4 340B"},
        {"devices": 1 << 24, "dp": 1 << 22},
        {"devices": 1 << 24, "accelerator": "TPU v5p", "notes": "9999 slices"},
        {"tp": 1 << 24, "pp": 1 << 24, "cp": 1 << 24, "dp": None},
        {"seq_len": 1 << 24, "global_batch_seqs": 1 << 24, "cp": 1 << 20},
        {"notes": "FSDP=" + "9" * 4000, "source": "NVIDIA/dgxc-benchmarking maxtext", "zero_stage": 3},
        {"vpp": 1 << 24, "schedule": "interleaved-1F1B"},
    ],
)
def test_huge_numbers_are_skipped_and_not_computed_with(changes: dict[str, object]) -> None:
    assert skipped(replace(LLAMA, **changes))[0] in KINDS


# ------------------------------------------------------------------------------------------------ the data beside rows


def test_the_words_name_what_there_is() -> None:
    known = words()
    assert set(known.accelerators.values()) <= set(known_devices())
    assert set(known.precisions.values()) <= set(PRECISIONS)
    assert all(recompute_text(text) == text for text in known.recomputes.values())
    for name in known.schedules.values():
        parse_schedule(name.replace("V", "2"))
    for convention, factor in known.conventions.values():
        assert flops_per_token(case_of(LLAMA).job.model, 8192, convention) > 0
        assert factor in (1.0, pytest.approx(4 / 3))


def test_the_sources_name_what_there_is() -> None:
    assert {source.stack for source in sources()} <= set(known_stacks())
    assert all(source.memory in MEMORIES for source in sources())
    assert len({source.name for source in sources()}) == len(sources())
    for source in sources():
        defaults = source.defaults
        assert defaults.precision is None or defaults.precision in PRECISIONS
        assert not defaults.schedule or defaults.schedule in words().schedules
        re.compile(source.shards)


def test_every_entry_is_used_and_every_row_has_a_source() -> None:
    used = Counter(source.name for row in ROWS.values() if (source := source_of(row.source)))
    assert sum(used.values()) == len(ROWS)
    assert {source.name for source in sources()} == set(used)
    for rule in model_rules():
        assert any(rule.match.search(row.model) for row in ROWS.values()), rule.match.pattern
        assert not rule.like or rule.like in catalog()


# -------------------------------------------------------------------------------------------------------- our own table


@pytest.fixture(scope="module", name="ours")
def all_cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for row in ROWS.values():
        with suppress(SkipError):
            found[row.id] = case_of(row)
    return found


def test_most_rows_of_our_own_table_are_questions(ours: dict[str, Case]) -> None:
    assert len(ours) > 1000
    assert not [i for i in ours if "DO NOT SCORE" in ROWS[i].notes]


def test_no_row_of_ours_contradicts_itself() -> None:
    """Tokens of a step over time and devices is the rate beside it, of every row that has both."""
    both = [
        (row.id, row.global_batch_seqs * row.seq_len / row.devices / row.metric_step_time_s, rate)
        for row in ROWS.values()
        if (rate := row.metric_tokens_per_s_per_device)
        and row.metric_step_time_s
        and row.global_batch_seqs
        and row.seq_len
        and row.devices
    ]
    assert len(both) > 200
    assert [i for i, told, printed in both if abs(told / printed - 1) > 0.03] == []


def test_models_have_the_parameters_that_their_sources_count(ours: dict[str, Case]) -> None:
    """llm-foundry prints them to the last one."""
    counted = {i: int(found[1]) for i in ours if (found := re.search(r"\((\d{8,}) params\)", ROWS[i].notes))}
    assert len(counted) > 100
    assert {i: ours[i].job.model.parameters for i in counted} == counted


@pytest.mark.parametrize(
    ("row", "billions"),
    [
        ("r0599", 8.03),
        ("r0302", 341.0),
        ("r0832", 15.6),
        ("r0771", 176.2),
        ("r0997", 314.0),
        ("r0775", 18.4),
        ("r0779", 310.1),
        ("r0889", 28.3),
        ("r0798", 1008.0),
    ],
)
def test_models_have_the_size_that_their_papers_name(row: str, billions: float) -> None:
    assert model_of(ROWS[row]).parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_every_case_fits_its_cluster(ours: dict[str, Case]) -> None:
    for case in ours.values():
        assert case.layout.world_size == case.job.cluster.world_size
        assert case.job.global_batch % (case.layout.dp * case.layout.mb) == 0
