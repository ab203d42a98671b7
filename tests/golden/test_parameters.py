"""Parameter counts, to the unit, against those of the models' Hugging Face classes and against what was published."""

from __future__ import annotations

import pytest

from shardwise.account.compute import describe
from shardwise.model.hf import gpt, load_model

pytestmark = pytest.mark.golden

COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_404_352,
    "nemotron-3-nano": 31_577_937_344,
    "nemotron-3-super": 120_668_687_360,
}


@pytest.mark.parametrize("name", COUNTS)
def test_to_the_unit(name: str) -> None:
    """Without multi-token prediction, as the classes count."""
    assert load_model(name).parameters == COUNTS[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("bloom-176b", 176.247),  # BLOOM's model card: 176,247,271,424
        ("deepseek-llm-67b", 67.4),
        ("deepseek-v2", 235.7),
        ("gpt-oss-20b", 20.91),  # gpt-oss model card: 20.91 B
        ("olmo-7b", 6.89),
        ("yi-34b", 34.39),
    ],
)
def test_published_totals(name: str, billions: float) -> None:
    assert load_model(name).parameters / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "billions"),
    [
        (24, 2304, 24, 1.7),
        (30, 3072, 32, 3.6),
        (36, 4096, 32, 7.5),
        (40, 6144, 48, 18.4),
        (48, 8192, 64, 39.1),
        (60, 10240, 80, 76.1),
        (80, 12288, 96, 145.6),
        (96, 16384, 128, 310.1),
        (105, 20480, 128, 529.6),
        (128, 25600, 160, 1008.0),
    ],
)
def test_the_models_of_ptd_p(layers: int, hidden: int, heads: int, billions: float) -> None:
    """Narayanan et al. 2104.04473, table 1: vocabulary 51,200, length 2,048."""
    assert gpt(layers, hidden, heads).parameters / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(
    ("name", "active", "without_input"),
    [
        ("deepseek-v3", 37.55, 36.63),  # README_WEIGHTS: 36.7 B with the output head
        ("nemotron-3-nano", 3.58, 3.23),
        ("nemotron-3-super", 12.77, 12.23),
        ("gpt-oss-120b", 5.71, 5.13),  # model card: 5.13 B, the input embedding apart
    ],
)
def test_active_parameters(name: str, active: float, without_input: float) -> None:
    model = load_model(name)
    rest = model.active_parameters - model.parameters_of("embedding")
    assert model.active_parameters / 1e9 == pytest.approx(active, abs=0.006)
    assert rest / 1e9 == pytest.approx(without_input, abs=0.006)


@pytest.mark.parametrize(
    ("name", "said"),
    [("mixtral-8x7b", 13), ("mixtral-8x22b", 39), ("deepseek-v2", 21), ("qwen3-30b-a3b", 3), ("qwen3-235b-a22b", 22)],
)
def test_active_parameters_as_the_papers_round_them(name: str, said: int) -> None:
    assert round(load_model(name).active_parameters / 1e9) == said


def test_parts_of_deepseek_v3() -> None:
    """MLA 187,107,328 a layer; the module of multi-token prediction 11.61 B of its own; the router's bias apart."""
    model = load_model("deepseek-v3")
    mixer = [p for p in model.block("moe").parameters if p.name.startswith("attention.")]
    assert sum(map(model.size, mixer)) == 187_107_328
    # MoE layer, eh_proj 2 h x h, three norms.
    experts = 257 * 3 * 7168 * 2048 + 256 * 7168
    assert model.tail_parameters == 187_107_328 + experts + 2 * 7168 + 2 * 7168**2 + 3 * 7168
    assert model.tail_parameters / 1e9 == pytest.approx(11.61, abs=0.005)
    assert model.buffers == 14_848


def test_buffers_and_layers_of_nemotron_3() -> None:
    """Nano 23 Mamba, 23 expert and 6 attention layers; Super 40, 40 and 8, 512 experts behind a latent of 1,024."""
    nano, large = load_model("nemotron-3-nano"), load_model("nemotron-3-super")
    assert (nano.buffers, large.buffers) == (2_944, 20_480)
    assert [nano.chain.count(k) for k in ("mamba", "moe", "attention")] == [23, 23, 6]
    assert [large.chain.count(k) for k in ("mamba", "moe", "attention")] == [40, 40, 8]


def test_description_holds_the_same_numbers() -> None:
    found = describe(load_model("deepseek-v3"), 4096)
    assert found["parameters"] == COUNTS["deepseek-v3"]
    assert found["kinds"]["moe"]["units"] == 58
    assert found["embedding_share"] == found["head_share"] - 7168 / found["parameters"]
    assert round(found["flops_per_token"]["exact"] / 1e9, 1) == 260.6
