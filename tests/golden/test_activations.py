"""Bytes that units save for their backward, under the software of each source.

Korthikanti et al. (2205.05198), section 4, is GPT's layer under Megatron-LM of 2021: 34 s b h + 5 a s^2 b. Beside it
LayerNorm keeps a mean and a deviation for every token, 16 bytes a layer that the paper does not count.
"""

from __future__ import annotations

import pytest

from shardwise.account.memory import memory_of
from shardwise.account.static import columns_of
from shardwise.account.units import UnitMemory, unit_memory
from shardwise.cluster import parse_cluster
from shardwise.model.hf import gpt, load_model
from shardwise.model.spec import HEAD, LAYER, Cut, Model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import parse
from shardwise.plan.stack import load_stack, under
from tests.golden.worked_examples import published

pytestmark = pytest.mark.golden

MIB, GIB = 2**20, 2**30
TOKENS = 8192
SIZES = ["8b", "70b", "405b"]
NORM_ROWS = 16
"""Bytes a token of a GPT layer's two LayerNorms beside their inputs."""


def unit(model: Model, kind: str, cut: tuple[int, bool], recompute: str = "none", tokens: int = TOKENS) -> UnitMemory:
    """`cut`: tensor parallelism, sequence parallelism. Sequences of 8,192 tokens, or of 2,048 under GPT."""
    (tp, sp), seq_len = cut, 2048 if "P" in model.sizes else 8192
    return unit_memory(model, kind, Cut(tokens, tp, sp, 2, 4, seq_len=seq_len), recompute)


def saved(model: Model, tp: int, sp: bool, recompute: str = "none", tokens: int = TOKENS) -> int:
    return unit(model, LAYER, (tp, sp), recompute, tokens).saved


# -------------------------------------------------------------------------------------------------- our own layer


def per_token(model: Model) -> tuple[int, int]:
    """(stream, inside the block): two norms' inputs and outputs with their rstd; q k v o, LSE, gate, up and product."""
    h, f, a = model.hidden, model.ffn, model.heads
    q, k = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return 8 * h + 8, 4 * q + 4 * k + 4 * a + 6 * f


@pytest.mark.parametrize("size", SIZES)
def test_one_rank(size: str) -> None:
    """8h + 4ad + 4kd + 4a + 6f + 8 bytes a token."""
    model = load_model(f"llama-3.1-{size}")
    assert saved(model, 1, sp=False) == TOKENS * sum(per_token(model))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_sequence_parallelism_divides_all_of_it(size: str, tp: int) -> None:
    """Equations 2 and 4: tensor parallelism alone leaves the stream whole (10 of 34 parts), with it all fall by 1/t."""
    model = load_model(f"llama-3.1-{size}")
    stream, inside = per_token(model)
    assert saved(model, tp, sp=False) == TOKENS * (stream + inside // tp)
    assert saved(model, tp, sp=True) * tp == TOKENS * (stream + inside)


# ------------------------------------------------------------------------------------------- GPT, Megatron of 2021


def paper(layers: int, hidden: int, heads: int) -> Model:
    return under(gpt(layers, hidden, heads), load_stack("megatron-2021"))


WAYS = {"tp": (False, "none"), "sp": (True, "none"), "tp sel": (False, "core"), "sp sel": (True, "core")}


@pytest.mark.parametrize(
    ("shape", "b", "mib", "percent"),
    [
        ((48, 6144, 64), 4, (1264, 844, 624, 204, 96), (66.8, 49.4, 16.1, 7.6)),
        ((96, 12288, 96), 1, (552, 342, 312, 102, 48), (62.0, 56.5, 18.5, 8.7)),
        ((105, 20480, 128), 1, (840, 490, 520, 170, 80), (58.3, 61.9, 20.2, 9.5)),
        ((128, 25600, 160), 1, (1050, 612.5, 650, 212.5, 100), (58.3, 61.9, 20.2, 9.5)),
    ],
)
def test_korthikanti(
    shape: tuple[int, int, int], b: int, mib: tuple[float, ...], percent: tuple[float, float, float, float]
) -> None:
    """Table 2 for the models of table 3 (22B, 175B, 530B, 1T) at t = 8; figure 7 has the shares of the first column.
    Full recomputation keeps the input alone."""
    model, tokens = paper(*shape), 2048 * b
    found = [saved(model, 8, sp, way, tokens) - NORM_ROWS * tokens // (8 if sp else 1) for sp, way in WAYS.values()]
    found.append(saved(model, 8, False, "full", tokens))
    assert found == [round(size * MIB) for size in mib]
    assert [100 * f / found[0] for f in found[1:]] == pytest.approx(percent, abs=0.06)


@pytest.mark.parametrize(
    ("row", "tp", "sp"), [("W078", 1, False), ("W079", 8, False), ("W080", 8, True), ("W083", 8, False)]
)
def test_table_2_for_gpt_3(row: str, tp: int, sp: bool) -> None:
    full = row == "W083"
    rows = 0 if full else NORM_ROWS * 2048 // (tp if sp else 1)
    found = saved(paper(96, 12288, 96), tp, sp, "full" if full else "none", 2048)
    assert found - rows == published(row)


def test_selective_recomputation() -> None:
    """W072: 5 a s / h = 80 of the 34 + 80; W073: 70 % of GPT-3's activations."""
    model, stream = paper(96, 12288, 96), 2048 * 12288
    whole, rest = (saved(model, 1, False, way, 2048) - NORM_ROWS * 2048 for way in ("none", "core"))
    assert (whole - rest) / stream == published("W072")
    assert rest / stream == 34
    assert int(100 * (whole - rest) / whole) == published("W073")


def test_the_ends() -> None:
    """Section 4.3: s b h of the embedding's dropout; 4 s b h / t (1 + v / h) behind the last layer."""
    model, h, v = paper(96, 12288, 96), 12288, 51200
    assert unit(model, "embedding", (8, True), tokens=2048).saved == 2048 * h // 8
    head = unit(model, HEAD, (8, True), tokens=2048).saved
    assert head - NORM_ROWS // 2 * 2048 // 8 == 2048 * (4 * h + 4 * v) // 8


def test_megatrons_report_of_gpt_3() -> None:
    """W263: 8 micro-batches of 12 layers and the embedding in flight. The report divides the token ids by t, and does
    not count LayerNorm's rows. W261: three interleaved chunks, 31 of 4 layers instead."""
    model, t = paper(96, 12288, 96), 8
    layer, embedding = (unit(model, kind, (t, True), "core", 2048).saved for kind in (LAYER, "embedding"))
    ours = 8 * (12 * (layer - NORM_ROWS * 2048 // t) + embedding)
    assert ours + 8 * 8 * 2048 // t == published("W263")
    assert published("W261") / published("W263") == pytest.approx(31 * 4 / (8 * 12), rel=1e-12)


# -------------------------------------------------------------------------------------------------- other software


def test_a_layer_of_405b() -> None:
    """8,192 tokens at t = 8: 508 MiB where the shard is gathered again (Megatron), 956 where the gathered input is kept
    (DTensor); an eager SwiGLU keeps 104 more."""
    layers = {name: under(load_model("llama-3.1-405b"), load_stack(name)) for name in ("megatron", "torchtitan")}
    rows = {name: saved(model, 8, True) / MIB for name, model in layers.items()}
    remade = {name: saved(model, 8, True, "act") / MIB for name, model in layers.items()}
    assert rows["megatron"] == pytest.approx(508, abs=0.6)
    assert rows["torchtitan"] == pytest.approx(1060, abs=0.6)
    # What "act" makes again are the product and, eager, silu(gate): 104 MiB each.
    assert rows["megatron"] - remade["megatron"] == 104
    assert rows["torchtitan"] - remade["torchtitan"] == 208
    assert rows["torchtitan"] - 104 == pytest.approx(956, abs=0.6)
    assert rows["megatron"] + 104 == pytest.approx(612, abs=0.6)


@pytest.mark.parametrize(("name", "kept", "peak"), [("shardwise", 2, 6), ("megatron", 4, 6), ("torchtitan", 4, 12)])
def test_bytes_a_logit(name: str, kept: int, peak: int) -> None:
    """F.cross_entropy(logits.float()) keeps 4 bytes a logit and peaks at 12; on the logits as they are 2 and 6."""
    model = under(load_model("llama-3.1-8b"), load_stack(name))
    head, logits = unit(model, HEAD, (1, False)), TOKENS * model.vocab
    rest = 4 * TOKENS * model.hidden + 4 * TOKENS  # the norm's input and output, rstd
    assert head.saved - rest == kept * logits
    # Beside the logits there live a norm's values, and rows of a few numbers a token.
    assert max(head.f_peak, head.bw_peak) / logits == pytest.approx(peak, abs=0.3)


def test_the_logits_of_8b() -> None:
    """12.6 GB of an eager loss at 8,192 tokens, on the last stage alone."""
    model = under(load_model("llama-3.1-8b"), load_stack("torchtitan"))
    assert 12 * TOKENS * model.vocab / 1e9 == pytest.approx(12.6, abs=0.05)
    assert unit(model, HEAD, (1, False)).bw_peak / 1e9 == pytest.approx(12.6, rel=0.02)


@pytest.mark.parametrize(("row", "million"), [("W186", 16), ("W187", 3)])
def test_checkpoints_of_the_scaling_book(row: str, million: int) -> None:
    """Llama 2 13B keeps three products' results a layer, 2 (D + 2 F) bytes a token: a gated block whose product is made
    again."""
    model = load_model("mlp:D=5120,F=13824,L=40,G=1")
    cut = Cut(million * 10**6, 1, False, 2, 4)
    assert model.layers * unit_memory(model, LAYER, cut, "act").saved == pytest.approx(published(row), rel=0.005)


# ------------------------------------------------------------------------------------ Llama 3 405B on 8,192 devices


@pytest.mark.parametrize(("zero", "recompute", "gib"), [(2, "none", 76.8), (2, "act", 62.5), (1, "none", 88.5)])
def test_the_fullest_rank_of_llama_3_405b(zero: int, recompute: str, gib: float) -> None:
    """The report's first stage (2407.21783, table 4): TP 8, PP 16, DP 64, 32 micro-batches of 8,192 tokens, here in
    eight chunks a rank. The figures were summed independently, over what lives between actions: state, 141 chunks of
    one layer, messages. Ours is the peak: it adds what the running layer takes, and under ZeRO-2 the gradient of its
    micro-batch until that is cut. Take both away, and the sums are the same to the printed digit.
    """
    stack = load_stack("megatron")
    model = under(load_model("llama-3.1-405b"), stack)
    job = Job(model, parse_cluster("1024x8xh100"), 8192, 64 * 32, stack=stack)
    layout = parse(f"tp=8 pp=16 dp=64 zero={zero} schedule=interleaved:8 mb=1 recompute={recompute}")
    fullest = max(memory_of(job, layout), key=lambda m: m.proved_bytes)
    assert fullest.rank == 1
    layer = unit(model, LAYER, (8, True), recompute)
    chunks = 2 * (16 - 1 - 1) + (8 - 1) * 16 + 1
    running = fullest.proved["activations"] - chunks * layer.saved
    assert 0 < running < layer.bw_peak
    columns = columns_of(job, LayoutBatch.of([layout]).expanded(2))
    held_gradients = int(columns.static(((LAYER,),) * 8)["gradients"].flat[0])
    opened = fullest.proved["gradients"] - held_gradients
    on_a_rank = (model.parameters_of(LAYER) + 7 * 2 * model.hidden) // 8  # the norms are whole on every rank
    assert opened == (4 * on_a_rank if zero == 2 else 0)
    assert (fullest.proved_bytes - running - opened) / GIB == pytest.approx(gib, abs=0.06)
