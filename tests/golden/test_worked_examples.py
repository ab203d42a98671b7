"""Worked examples of the literature that belong to no other file, by the id of their row; and none is forgotten."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from shardwise.account.comm import predict_ledger
from shardwise.account.compute import Product, flops_per_token, unit_flops
from shardwise.account.traffic import unit_traffic
from shardwise.cluster import parse_cluster
from shardwise.cluster.catalog import entry
from shardwise.collective import Kind, Phase
from shardwise.model.hf import from_config, gpt, load_model
from shardwise.model.spec import HEAD, LAYER, Cut, Model
from shardwise.plan.job import PRECISIONS, Job, batch_from_tokens
from shardwise.plan.layout import parse
from shardwise.plan.stack import Stack, State
from shardwise.simulate.cost import Kernels
from shardwise.simulate.network import collective_s, links
from tests.golden.worked_examples import NOT_COMPUTED, digit, published, rows

pytestmark = pytest.mark.golden

HERE = Path(__file__).parent
BF16 = "bfloat16"
A100, H100, V5P = (entry(name).device.peak_flops[BF16] for name in ("a100", "h100", "v5p"))
DAY_S = 86_400
GPT_SEQ = 2048


def test_every_row_is_held_or_explained() -> None:
    files = [*HERE.glob("test_*.py"), HERE.parent / "oracle" / "test_schedules.py"]
    named = {name for path in files for name in re.findall(r"\bW\d{3}\b", path.read_text("utf-8"))}
    assert set(rows()) - named - set(NOT_COMPUTED) == set()
    assert set(NOT_COMPUTED) & named == set()
    assert (named | set(NOT_COMPUTED)) - set(rows()) == set()


def op_flops(model: Model, seq_len: int, kind: str = LAYER) -> dict[str, float]:
    """Forward FLOPs a token of each op of a unit."""
    cut = Cut(seq_len, 1, False, 2, 4)
    return {op.name: op.f / seq_len for op in unit_flops(model, kind, cut, seq_len)}


def whole_core(model: Model, seq_len: int) -> float:
    """Forward FLOPs a token of a layer's attention where no half of it is masked away."""
    return op_flops(model, seq_len)["attention.core"] * 2 * seq_len / (seq_len + 1)


# ------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("row", "layers", "hidden", "heads"),
    [
        ("W098", 30, 3072, 32),
        ("W100", 36, 4096, 32),
        ("W102", 40, 6144, 48),
        ("W104", 48, 8192, 64),
        ("W106", 60, 10240, 80),
        ("W108", 80, 12288, 96),
        ("W110", 96, 16384, 128),
        ("W112", 105, 20480, 128),
        ("W114", 128, 25600, 160),
    ],
)
def test_parameters_of_ptd_p(row: str, layers: int, hidden: int, heads: int) -> None:
    """Narayanan et al. 2104.04473, table 1."""
    assert gpt(layers, hidden, heads).parameters / 1e9 == pytest.approx(published(row), abs=digit(row) / 2)


def llama(hidden: int, ffn: int, layers: int, heads: int, vocab: int = 32000, **others: object) -> Model:
    config: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
    }
    return from_config(config | others, "it")


def test_parameters_of_the_scaling_book() -> None:
    """W184: Llama 2 13B as 8.5 + 4.2 + 0.3 e9. W213: D = 4,096, 64 layers, one norm a layer (the printed 16e9 comes of
    rounding both sizes)."""
    model = llama(5120, 13824, 40, 40)
    block = model.block(LAYER)
    feed_forward, mixer = (
        model.layers * sum(model.size(p) for p in block.parameters if p.name.startswith(part) and len(p.dims) == 2)
        for part in ("mlp.", "attention.")
    )
    ends = 2 * model.parameters_of("embedding")
    assert [round(n / 1e9, 1) for n in (feed_forward, mixer, ends)] == [8.5, 4.2, 0.3]
    assert "8.5e9+4.2e9+0.3e9" in rows()["W184"]["published"]
    exact = float(rows()["W213"]["recomputed"])
    assert llama(4096, 16384, 64, 32).parameters - 65 * 4096 == exact


def test_parts_of_gpt_3() -> None:
    """W252 (EleutherAI's calculator): matrices of attention 57.98 B, of the feed-forward 115.96 B, tables 1.26 B."""
    model = load_model("gpt-3-175b")
    sizes = {"attention": 0, "mlp": 0}
    for p in model.block(LAYER).parameters:
        if len(p.dims) == 2:
            sizes[p.name.partition(".")[0]] += model.layers * model.size(p)
    found = {**sizes, "tables": 2 * model.vocab * model.hidden}
    assert {k: round(n / 1e9, 2) for k, n in found.items()} == {"attention": 57.98, "mlp": 115.96, "tables": 1.26}
    assert "attn 57.98 B, ffn 115.96 B" in rows()["W252"]["published"]


# ------------------------------------------------------------------------------------- FLOPs, and shares of a peak


@pytest.mark.parametrize(
    ("row", "tflops"),
    [
        ("W097", 137),
        ("W099", 138),
        ("W101", 142),
        ("W103", 135),
        ("W105", 138),
        ("W109", 148),
        ("W111", 155),
        ("W115", 163),
    ],
)
def test_percent_of_the_a100(row: str, tflops: float) -> None:
    """Narayanan et al. 2104.04473, table 1."""
    assert round(100 * tflops * 1e12 / A100) == published(row)


@pytest.mark.parametrize(("row", "tflops"), [("W132", 430), ("W138", 380)])
def test_percent_of_the_h100(row: str, tflops: float) -> None:
    """Llama 3 (2407.21783), table 4."""
    assert 100 * tflops * 1e12 / H100 == pytest.approx(published(row), abs=1)


@pytest.mark.parametrize(
    ("row", "recomputed", "shape", "run"),
    [
        ("W084", False, (48, 6144, 64), (8, 4, 1.1)),
        ("W087", False, (96, 12288, 96), (64, 64, 13.75)),
        ("W088", True, (96, 12288, 96), (64, 64, 13.75)),
        ("W090", False, (105, 20480, 128), (280, 280, 37.83)),
        ("W091", True, (105, 20480, 128), (280, 280, 37.83)),
        ("W093", False, (128, 25600, 160), (512, 512, 71.49)),
        ("W094", True, (128, 25600, 160), (512, 512, 71.49)),
    ],
)
def test_utilisation_of_korthikanti(
    row: str, recomputed: bool, shape: tuple[int, int, int], run: tuple[int, int, float]
) -> None:
    """2205.05198, table 5. `run`: GPUs, sequences a step, seconds; those are printed to two digits. Equation 9 counts
    the recomputed core three times, as if it had a backward."""
    model, (gpus, batch, seconds) = gpt(*shape), run
    each = flops_per_token(model, GPT_SEQ, "narayanan")
    if recomputed:
        each += 3 * model.layers * whole_core(model, GPT_SEQ)
    found = 100 * each * batch * GPT_SEQ / seconds / gpus / A100
    assert found == pytest.approx(published(row), abs=0.5 if recomputed else 0.4)


def test_cost_of_selective_recomputation() -> None:
    """W077: s / 6 h of a layer's products are 1.6 % for MT-NLG 530B (cut off, not rounded)."""
    model = gpt(105, 20480, 128)
    products = sum(f for name, f in op_flops(model, GPT_SEQ).items() if name != "attention.core")
    share = whole_core(model, GPT_SEQ) / products
    assert math.floor(1000 * share) / 10 == published("W077")


@pytest.mark.parametrize(("row", "gpus", "seconds"), [("W125", 2240, 60.1), ("W126", 2800, 50.2), ("W127", 3360, 44.4)])
def test_megatron_turing(row: str, gpus: int, seconds: float) -> None:
    """Smith et al. 2201.11990, section 2.3: TFLOP/s a GPU with all layers recomputed, the head not."""
    model = gpt(105, 20480, 128)
    three = flops_per_token(model, GPT_SEQ, "narayanan")
    hardware = three + three / 3 - op_flops(model, GPT_SEQ, HEAD)["output"]
    assert hardware * 1920 * GPT_SEQ / seconds / gpus / 1e12 == pytest.approx(published(row), abs=1)


def test_utilisation_of_palm() -> None:
    """W129 (2204.02311, appendix B): 238.3 K tokens/s on 6,144 TPU v4. One kv head, gated, tied: Llama's matrices."""
    heads = {"num_key_value_heads": 1, "head_dim": 256, "tie_word_embeddings": True}
    model = llama(18432, 4 * 18432, 118, 48, 256_000, **heads)
    assert model.parameters / 1e9 == pytest.approx(540.35, abs=0.02)
    v4 = entry("v4").device.peak_flops[BF16]
    found = 238.3e3 * flops_per_token(model, 2048, "palm") / 6144 / v4
    assert 100 * found == pytest.approx(published("W129"), abs=digit("W129"))


def test_training_flops() -> None:
    """W140: GPT-3 on 300 B tokens (2005.14165, table D.1). W190, W191: Llama 3 70B a token and on 15 T, from 70e9."""
    assert 300e9 * flops_per_token(load_model("gpt-3-175b"), 2048, "6n") == pytest.approx(published("W140"), rel=2e-3)
    each = flops_per_token(load_model("llama-3.1-70b"), 8192, "6n")
    assert each == pytest.approx(published("W190"), rel=0.01)
    assert 15e12 * each == pytest.approx(published("W191"), rel=0.01)


@pytest.mark.parametrize(
    ("row", "shape", "tokens", "gpus", "tflops"),
    [("W116", (96, 12288, 96), 300e9, 1024, 140), ("W117", (128, 25600, 160), 450e9, 3072, 163)],
)
def test_days_of_ptd_p(row: str, shape: tuple[int, int, int], tokens: float, gpus: int, tflops: float) -> None:
    """2104.04473, section 5.1: 8 T P / (n X), all layers recomputed."""
    total = tokens * flops_per_token(gpt(*shape), GPT_SEQ, "6n") * 4 / 3
    assert round(total / (gpus * tflops * 1e12) / DAY_S) == published(row)


def test_days_of_the_scaling_book() -> None:
    """W192: Llama 3 70B on 8,960 v5p at 40 %: 3.8e6 s, 44 days; from 70e9 parameters."""
    total = 15e12 * flops_per_token(load_model("llama-3.1-70b"), 8192, "6n")
    assert total / (8960 * V5P * 0.4) == pytest.approx(published("W192"), rel=0.02)


def test_utilisation_of_deepseek_v3() -> None:
    """W214: 21.7 % of the dense fp8 peak, from 37e9 active parameters, which are 37.55e9."""
    each = flops_per_token(load_model("deepseek-v3"), 4096, "6n")
    found = 100 * 14.8e12 * each / (2.79e6 * 3600 * 1.513e15)
    assert found == pytest.approx(published("W214"), rel=37.55 / 37 - 1 + 1e-3)


def test_length_at_which_attention_costs_what_its_products_do() -> None:
    """W215: T = 2 D for MHA, attention not halved."""
    model = llama(4096, 16384, 1, 32)
    flops = op_flops(model, int(published("W215")))
    assert whole_core(model, 8192) == pytest.approx(flops["attention.qkv"] + flops["attention.out"], rel=1e-12)


# ------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("row", "tokens_row", "text", "seq_len", "per_rank"),
    [
        ("W130", "W131", "tp=8 pp=16 dp=64 mb=1", 8192, 32),
        ("W133", "W134", "tp=8 pp=16 dp=128 mb=1", 8192, 16),
        ("W136", "W137", "tp=8 cp=16 pp=16 dp=8 mb=1", 131072, 16),
    ],
)
def test_layouts_of_llama_3(row: str, tokens_row: str, text: str, seq_len: int, per_rank: int) -> None:
    """2407.21783, table 4 (which prints DP = 4 for the last): devices, and 16 Mi tokens a step."""
    layout = parse(text)
    assert layout.world_size == published(row)
    job = Job(load_model("llama-3.1-405b"), parse_cluster("1024x8xh100"), seq_len, layout.dp * per_rank)
    assert job.tokens == 16 * 2**20 == float(rows()[tokens_row]["recomputed"])
    assert batch_from_tokens(job.tokens, seq_len) == job.global_batch
    assert job.micro_batches(layout) == per_rank


# ------------------------------------------------------------------------------------- communication

GATED, PLAIN = (load_model(f"mlp:D=512,F=1536,L=1,G={gates}") for gates in (1, 0))
B, D, F, N = 4096, 512, 1536, 8
"""Tokens, width, inner width, devices."""

CROSSING = {Kind.ALL_GATHER: 1, Kind.REDUCE_SCATTER: 1, Kind.ALL_REDUCE: 2}
"""Times (N - 1) / N of the payload that cross a link of a ring."""


def moved(model: Model, zero: int) -> dict[str, float]:
    """Times (N - 1) / N bytes of one step that a layer's state moves over a device's link, by phase; all of two
    bytes."""
    stack = Stack(name="two bytes", state=State("compute"))
    job = Job(model, parse_cluster(f"{N}xh100"), B // N, N, PRECISIONS["fp16"], stack)
    found: Counter[str] = Counter()
    for c, n in predict_ledger(job, parse(f"dp={N} zero={zero} mb=1" if zero else f"dp={N} mb=1"), 0).items():
        if c.key.module == "layers.0":
            found[str(c.key.phase)] += n * CROSSING[c.kind] * c.payload_bytes
    return dict(found)


def mlp_flops(model: Model, tp: int, tokens: int) -> tuple[float, float]:
    """Forward and backward of one device."""
    ops = unit_flops(model, LAYER, Cut(tokens, tp, False, 2, 2), tokens)
    return sum(op.f for op in ops), sum(op.b + op.w for op in ops)


def test_volumes_of_zero() -> None:
    """W069 (1910.02054, section 7): 2, 2 and 3 values a parameter; ZeRO-1 as ZeRO-2 where nothing is accumulated."""
    volumes = [sum(moved(GATED, zero).values()) / 2 / GATED.parameters for zero in (0, 1, 2, 3)]
    assert volumes == [2, 2, 2, 3]
    assert rows()["W069"]["published"] == "2*psi / 2*psi / 3*psi"


def test_data_parallelism_of_cs336() -> None:
    """W282 (assignment 2, 2026): backward 12 B D F / N FLOPs, 12 D F (N - 1) / N bytes."""
    assert mlp_flops(GATED, 1, B // N)[1] == 12 * B * D * F / N
    assert moved(GATED, 0) == {"reduce": 12 * D * F}


def test_fsdp_of_cs336() -> None:
    """W283: forward 6 B D F / N, 6 D F (N - 1) / N. W284: backward 12 and 12."""
    assert mlp_flops(GATED, 1, B // N) == (6 * B * D * F / N, 12 * B * D * F / N)
    # One gather forward; backward another and the scatter.
    assert moved(GATED, 3) == {"unshard": 2 * 6 * D * F, "reduce": 6 * D * F}


def test_tensor_parallelism_of_cs336() -> None:
    """W285: forward 6 B D F / N, 4 B D (N - 1) / N. W286: backward 12 and 4, one all-reduce of dx."""
    assert mlp_flops(GATED, N, B) == (6 * B * D * F / N, 12 * B * D * F / N)
    for phase in (Phase.F, Phase.B):
        assert activations(GATED, False, phase) == {Kind.ALL_REDUCE: 2 * B * D}


def activations(model: Model, sp: bool, phase: Phase) -> dict[Kind, float]:
    """Payload bytes that tensor parallelism over N devices moves in a phase."""
    found: Counter[Kind] = Counter()
    for t in unit_traffic(model, LAYER, Cut(B, N, sp, 2, 2), "none"):
        if (t.phase, t.axis) == (phase, "tp") and t.count:
            found[t.kind] += t.count * t.payload_bytes
    return dict(found)


def test_least_batch_of_a_mixed_pod_of_cs336() -> None:
    """W280 (2025): weights gathered over two axes by 16, at 4.6e14 FLOP/s and 1.8e11 bytes/s an axis."""
    pod = links(parse_cluster("v5p:16x20x28"), (1, 28 * 20))
    payload = 1e15
    assert 16 * 4.6e14 * float(collective_s(Kind.ALL_GATHER, payload, pod)) / payload == pytest.approx(
        published("W280"), rel=1e-3
    )


@pytest.mark.parametrize(
    ("row", "flops_per_s", "bytes_per_s"),
    [("W217", 1.23e14, 1.12e11), ("W218", 2.75e14, 2.68e11), ("W219", 1.96e14, 1.86e11)],
)
def test_blocks_of_ring_attention(row: str, flops_per_s: float, bytes_per_s: float) -> None:
    """2310.01889, table 2: a block of c tokens computes 4 d c^2 FLOPs while 4 d c bytes of K and V travel: C / W."""
    model, c = llama(4096, 16384, 1, 32), round(flops_per_s / bytes_per_s)
    block = c * whole_core(model, c)
    cut = Cut(c, 1, False, 2, 4, cp=2, seq_len=2 * c)
    (keys,) = (
        t.payload_bytes for t in unit_traffic(model, LAYER, cut, "none") if (t.phase, t.kind) == (Phase.F, Kind.SEND)
    )
    assert block / flops_per_s == pytest.approx(keys / bytes_per_s, rel=1e-3)
    assert c / 1000 == pytest.approx(published(row), abs=0.05)


def test_volumes_of_the_scaling_book() -> None:
    """W183: two matrices, forward 4 and backward 8 B D F FLOPs. Bytes: DP 0 and 8 D F, FSDP 4 D F and 8 D F, TP 4 B D
    each way (an all-reduce counts as gather and scatter)."""
    assert mlp_flops(PLAIN, 1, B) == (4 * B * D * F, 8 * B * D * F)
    assert moved(PLAIN, 0) == {"reduce": 8 * D * F}
    assert moved(PLAIN, 3) == {"unshard": 2 * 4 * D * F, "reduce": 4 * D * F}
    for phase in (Phase.F, Phase.B):
        assert activations(PLAIN, True, phase) == {Kind.ALL_GATHER: 2 * B * D, Kind.REDUCE_SCATTER: 2 * B * D}


def test_a_gather_brings_all_but_the_own_part() -> None:
    """W204: N^2 (1 - 1 / D) values over a link."""
    line = parse_cluster(f"{N}xC=1e15,W=1e9,M=1e13")
    seconds = float(collective_s(Kind.ALL_GATHER, 1e12, links(line, (1, N))))
    assert 1e9 * seconds == pytest.approx(1e12 * (1 - 1 / N), rel=1e-3)


def test_the_least_batch_of_an_int8_product() -> None:
    """W208: [B, 4096] x [4096, 16384] on v5e, 263 tokens; the source rounds 20,480 to 2e4 and prints 271."""
    v5e = entry("v5e").device
    rate = v5e.peak_flops["int8"]
    kernels = Kernels(rate, rate, rate, v5e.memory_bytes_per_s, launch_s=0.0, element_bytes=1)
    bound = [p.flops / rate < kernels.product_s(p) for p in (Product(n, 16384, 4096) for n in range(1, 400))]
    assert bound.index(False) + 1 == pytest.approx(published("W208"), rel=0.04)
