"""Software stacks: the files, and what a model's blocks keep under them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwise.account.compute import flops_per_token
from shardwise.account.units import unit_memory
from shardwise.model.hf import catalog, load_model
from shardwise.model.spec import HEAD, LAYER, Cut, Model
from shardwise.plan.stack import SHARDWISE, Saves, Stack, StackError, known_stacks, load_stack, under

LLAMA = load_model("llama-3.1-8b")
T, S = 4096, 2048


def saved(model: Model, kind: str, tp: int = 1, sp: bool = False, recompute: str = "none") -> int:
    return unit_memory(model, kind, Cut(T, tp, sp, 2, 4, seq_len=S), recompute).saved


def keeping(**saves: object) -> Stack:
    return Stack(name="it", saves=Saves(**saves))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- the files


def test_ours_is_the_default() -> None:
    """The file says in words what the dataclass says in code."""
    assert load_stack("shardwise") == SHARDWISE == Stack()


@pytest.mark.parametrize("name", known_stacks())
def test_known(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert stack.title and stack.source
    assert 0 in stack.zero and list(stack.zero) == sorted(set(stack.zero))


def test_the_known_ones() -> None:
    wanted = {"shardwise", "megatron", "megatron-2021", "deepspeed", "torchtitan", "fsdp2", "llm-foundry", "maxtext"}
    assert set(known_stacks()) == wanted


def test_a_file_that_is_like_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('like = "megatron"\nname = "mine"\ntitle = "Mine"\nsource = "here"\n[overlap]\ntp = 0.8\n')
    megatron, mine = load_stack("megatron"), load_stack(str(path))
    assert mine == replace(
        megatron, name="mine", title="Mine", source="here", overlap=replace(megatron.overlap, tp=0.8)
    )


BROKEN = """
title = 3
zero = [1, 4]
efficiency = "fast"
speed = 2
[saves]
norm = "quick"
dropout = 1
[overlap]
tp = 1.5
dp = 1
"""


def test_all_faults_at_once(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(BROKEN)
    with pytest.raises(StackError) as caught:
        load_stack(str(path))
    said = "\n".join(caught.value.faults)
    for words in (
        "name: missing; wanted text",
        "source: missing; wanted text",
        "title: found 3; wanted text",
        "zero[1]: found 4; wanted a whole number from 0 to 3",
        "efficiency: found 'fast'; wanted a number from 0.01 to 2",
        "unknown key 'speed'",
        "saves.norm: wanted 'fused' or 'eager'",
        "saves.dropout: found 1; wanted true or false",
        "overlap.tp: found 1.5; wanted a number from 0 to 1",
        "overlap: unknown key 'dp'; known: tp, cp, ep, reduce, final, publish",
    ):
        assert words in said
    assert all(fault.startswith(str(path)) for fault in caught.value.faults)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name = ", "not TOML that can be read"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b"a = " + b"[" * 100_000, "not TOML that can be read"),
        (b"#" * (1 << 21), "larger than 1,048,576 bytes"),
        (b"", "name: missing; wanted text"),
        (b'like = "megatrn"', "like: found 'megatrn', wanted one of deepspeed"),
        (b"like = [1]", "like: found '[1]', wanted one of deepspeed"),
        (b'like = "megatron"\noverlap = 3\nname = "x"\ntitle = "x"\nsource = "x"', "overlap: wanted a table"),
        (b'like = "megatron"\nname = "x"\ntitle = "x"\nsource = "x"\n[fused]\na = 1', "fused: found {'a': 1}; wanted"),
        (b'zero = []\nname = "x"\ntitle = "x"\nsource = "x"', "zero: found no level; wanted some of 0, 1, 2, 3"),
        (b'saves = "all"\nname = "x"\ntitle = "x"\nsource = "x"', "saves: wanted a table with the keys column_input"),
    ],
)
def test_files_that_are_no_stack(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "it.toml"
    path.write_bytes(content)
    with pytest.raises(StackError, match=re.escape(said)):
        load_stack(str(path))


def test_names_that_are_no_stack(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"no stack is named 'megatorn'; did you mean megatron\? \(known: deepspeed"):
        load_stack("megatorn")
    with pytest.raises(StackError, match=r"nowhere\.toml: no such file"):
        load_stack(str(tmp_path / "nowhere.toml"))
    with pytest.raises(StackError, match="a directory"):
        load_stack(str(tmp_path))
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    with pytest.raises(StackError, match="not a regular file"):
        load_stack(str(pipe))


# ------------------------------------------------------------------------------------------- the blocks under them


@pytest.mark.parametrize("name", known_stacks())
@pytest.mark.parametrize("model_name", catalog())
def test_what_is_kept_is_all_that_changes(model_name: str, name: str) -> None:
    """Parameters, FLOPs and what full recomputation keeps are the model's; nobody keeps less than ours."""
    model = load_model(model_name)
    other = under(model, load_stack(name))
    assert other.parameters == model.parameters
    assert flops_per_token(other, S) == flops_per_token(model, S)
    for kind in model.kinds:
        assert saved(other, kind) >= saved(model, kind)
        if model.block(kind).recomputable:
            assert saved(other, kind, recompute="full") == saved(model, kind, recompute="full")


def test_ours_is_the_very_model() -> None:
    assert under(LLAMA, SHARDWISE) is LLAMA


def test_models_are_equal_where_their_blocks_are() -> None:
    """Caches go by equality: stacks that differ in time alone share what was found about memory."""
    gathered, eager = keeping(column_input="gathered"), keeping(norm="eager")
    assert under(LLAMA, gathered) == under(LLAMA, replace(gathered, name="other", efficiency=0.5))
    assert len({LLAMA, under(LLAMA, gathered), under(LLAMA, eager)}) == 3


def test_a_model_is_rewritten_once() -> None:
    stack = keeping(norm="eager")
    once = under(LLAMA, stack)
    assert under(once, stack) is once
    for other in (SHARDWISE, keeping(loss="eager")):
        with pytest.raises(ValueError, match=r"llama-3\.1-8b is described for other software already \(norm=eager\)"):
            under(once, other)


h, f, a, v = LLAMA.hidden, LLAMA.ffn, LLAMA.heads, LLAMA.vocab


@pytest.mark.parametrize(
    ("saves", "layer", "head", "embedding"),
    [
        # 6 h instead of 2 h a norm (Hugging Face's LlamaRMSNorm, hooks on its saved tensors)
        ({"norm": "eager"}, 2 * 4 * h, 4 * h, 0),
        # 8 f instead of 6 f
        ({"activation": "eager"}, 2 * f, 0, 0),
        # Korthikanti et al. 2205.05198, section 4.1
        ({"attention": "eager"}, 2 * a * S - 4 * a, 0, 0),
        ({"attention": "eager", "dropout": True}, 5 * a * S - 4 * a + 2 * h, 0, h),
        ({"dropout": True}, 2 * h, 0, h),
        # 4 bytes a logit instead of 2
        ({"loss": "float32"}, 0, 2 * v, 0),
        ({"loss": "eager"}, 0, 2 * v, 0),
        ({"routed": "late"}, 0, 0, 0),
        ({"column_input": "gathered"}, 0, 0, 0),
    ],
)
def test_bytes_a_token(saves: dict[str, object], layer: int, head: int, embedding: int) -> None:
    """Beside ours, on one rank."""
    other = under(LLAMA, keeping(**saves))
    found = [saved(other, kind) - saved(LLAMA, kind) for kind in (LAYER, HEAD, "embedding")]
    assert found == [T * layer, T * head, T * embedding]


def test_routed_copies_that_are_weighted_late() -> None:
    """2 h K of what the experts made, and 2 h K of what is added up."""
    model = load_model("mixtral-8x7b")
    other = under(model, keeping(routed="late"))
    assert saved(other, "moe") - saved(model, "moe") == T * 2 * 2 * 2 * model.hidden
    # An eager expert keeps silu(gate), and the product before it is weighted: not where that comes later.
    width = 2 * model.sizes["x"] * 2
    for routed, values in (("early", 2), ("late", 1)):
        gate, plain = (under(model, keeping(routed=routed, activation=way)) for way in ("eager", "fused"))
        assert saved(gate, "moe") - saved(plain, "moe") == T * values * width


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "nemotron-3-super", "gemma-2-9b"])
def test_gathered_inputs(name: str) -> None:
    """Kept whole, once an op: without sequence parallelism nothing is gathered and nothing is kept twice, with it the
    shard stays where another op keeps it (a router's input)."""
    model = load_model(name)
    other = under(model, keeping(column_input="gathered"))
    for kind in model.kinds:
        assert saved(other, kind, 2, sp=False) == saved(model, kind, 2, sp=False)
        block = model.block(kind)
        columns = [op for op in block.ops if op.gathers]
        kept = [name for op in block.ops for name in op.saves]
        values = {d.name: d for d in (*block.inputs, *(d for op in block.ops for d in op.outputs))}
        more = 0
        for op in columns:
            width = 2 * model.sizes[values[op.inputs[0]].dims[1]]
            shard = T // 2 if kept.count(op.inputs[0]) == 1 else 0
            more += (T - shard) * width
        assert saved(other, kind, 2, sp=True) - saved(model, kind, 2, sp=True) == more


def test_selective_recomputation() -> None:
    """Attention's core drops the scores alone, and of flash attention the rows' sums: its output is the next product's
    input."""
    eager = under(LLAMA, keeping(attention="eager", dropout=True))
    assert saved(eager, LAYER) - saved(eager, LAYER, recompute="core") == T * 5 * a * S
    assert saved(LLAMA, LAYER) - saved(LLAMA, LAYER, recompute="core") == T * 4 * a
    gate = under(LLAMA, keeping(activation="eager"))
    assert (
        saved(LLAMA, LAYER, recompute="act") == saved(gate, LAYER, recompute="act") == saved(LLAMA, LAYER) - T * 2 * f
    )


@pytest.mark.parametrize("name", known_stacks())
def test_columns_are_the_single_cuts(name: str) -> None:
    """The search asks for many layouts at once."""
    model = under(load_model("mixtral-8x7b"), load_stack(name))
    tps, sps = [1, 2, 8, 8], [0, 0, 0, 1]
    cut = Cut(np.full(4, T), np.asarray(tps), np.asarray(sps), 2, 4, seq_len=S)
    for kind in model.kinds:
        together = unit_memory(model, kind, cut, "none")
        for i, (tp, sp) in enumerate(zip(tps, sps, strict=True)):
            alone = unit_memory(model, kind, Cut(T, tp, bool(sp), 2, 4, seq_len=S), "none")
            for field in ("saved", "f_peak", "bw_peak", "b_peak", "queued", "w_peak"):
                assert np.broadcast_to(getattr(together, field), 4)[i] == getattr(alone, field), (kind, field)
