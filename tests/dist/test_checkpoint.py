"""State saved under one layout goes on under any other: bit-equal weights and moments, then the same gradients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.collective import Labels
from shardwise.model.hf import from_config
from shardwise.model.spec import Model
from shardwise.plan.layout import parse
from shardwise.plan.optimizer import ADAMW
from shardwise.plan.rules import findings
from shardwise.plan.shards import rank_units
from shardwise.train.chunks import MASTER, buffers, chunks, saved_shapes, whole_shapes
from tests.dist.pool import run_gloo
from tests.support.models import job, tiny

pytestmark = pytest.mark.dist

HERE = "tests.dist.test_checkpoint"
Whole = dict[str, torch.Tensor]
IDENTITY = {"model": "tiny"}


def work(text: str, layers: int, tied: bool, precision: str = "fp64") -> Any:
    """A job whose dims no shard divides; of 9 rows in fours the last shard is empty."""
    layout = parse(text)
    vocab = 9 if layout.shards == 4 and layout.tp == 1 else 21
    made = job(tiny(layers, tied, hidden=36, ffn=24, vocab=vocab), f"{layout.world_size}xcpu", precision=precision)
    assert not findings(layout, made)
    return made, layout


# What the ranks run -----------------------------------------------------------------------------------------------


def built(comm: Any, of: Any, seed: int | None) -> Any:
    from shardwise.train.checkpoint import AllRanks
    from shardwise.train.rank import build_rank
    from tests.support.parity import SETTINGS

    among = AllRanks.make(20.0)
    made, layout = of
    return build_rank(made, layout, comm, Labels(), seed=seed, settings=SETTINGS), among


def step(rank: Any, number: int, update: bool) -> list[tuple[str, tuple[slice, ...], torch.Tensor]]:
    """One step on the harness' data; the gradients that this rank holds, by box."""
    from shardwise.train.rank import gradients
    from tests.support.parity import batches, local_data, pieces

    ids, targets = batches(rank.job.model.vocab, rank.job.seq_len, rank.job.global_batch, True)[number]
    local_ids = local_data(rank.job, rank.layout, rank, ids) if rank.needs_ids else None
    local_targets = local_data(rank.job, rank.layout, rank, targets) if rank.needs_targets else None
    result = gradients(rank, local_ids, local_targets)
    found = [(p.name, p.box, p.value) for s in rank.states.values() for p in pieces(s, s.gradient_shard)]
    if update:
        rank.optimizer.step(result.norm)
    return found


def state(rank: Any) -> list[tuple[str, tuple[slice, ...], torch.Tensor]]:
    flat = buffers(rank.states)
    return [
        (c.name, tuple(slice(o, o + n) for o, n in zip(c.offsets, c.sizes, strict=True)), c.view(flat).clone())
        for c in chunks(rank.states, rank.layout, rank.world.rank)
    ]


def save_after_two_steps(comm: Any, of: Any, folder: Path) -> Any:
    """Two steps, a save, and the third step while it is written: what was saved, and the third's gradients."""
    from shardwise.train.checkpoint import About, Saver

    rank, among = built(comm, of, 0)
    for number in range(2):
        step(rank, number, update=True)
    saver = Saver(rank, folder, About(IDENTITY, {}), among)
    saved = state(rank)
    saver.start(2)
    third = step(rank, 2, update=True)
    saver.finish()
    return saved, third, state(rank)


def load_and_step(comm: Any, of: Any, folder: Path) -> Any:
    from shardwise.train.checkpoint import find_checkpoint, load

    rank, among = built(comm, of, None)
    load(rank, find_checkpoint(folder, IDENTITY), among)
    return state(rank), step(rank, 2, update=True), state(rank)


# What they are asked ----------------------------------------------------------------------------------------------


def assemble(per_rank: list[list[tuple[str, tuple[slice, ...], torch.Tensor]]], shapes: dict[str, Any]) -> Whole:
    """Whole tensors; every element is there, and all that hold one agree."""
    out: Whole = {}
    for held in per_rank:
        for name, box, value in held:
            whole = out.setdefault(name, torch.full(shapes[name], torch.nan, dtype=value.dtype))
            here = whole[box]
            assert torch.equal(here[~here.isnan()], value[~here.isnan()]), f"{name}: replicas differ"
            whole[box] = value
    assert out.keys() == shapes.keys()
    assert not any(t.isnan().any() for t in out.values())
    return out


def saved_and_loaded(saved_by: Any, loaded_by: Any, folder: Path) -> tuple[list[Whole], list[Whole]]:
    """Of both runs: the state at the checkpoint, the gradients of the step after it, and the state after that."""
    shapes, parts = whole_shapes(saved_by[0].model), saved_shapes(saved_by[0])
    saved = run_gloo(saved_by[1].world_size, f"{HERE}:save_after_two_steps", saved_by, folder)
    loaded = run_gloo(loaded_by[1].world_size, f"{HERE}:load_and_step", loaded_by, folder)
    one, other = (
        [assemble([r[i] for r in run], (parts, shapes, parts)[i]) for i in range(3)] for run in (saved, loaded)
    )
    return one, other


CASES = {
    "Megatron-Bridge 5353: an odd vocabulary over TP and ZeRO-3": (
        "tp=2 dp=2 zero=3 mb=1",
        "pp=2 schedule=zb-v mb=2",
        3,
        False,
    ),
    "Megatron-LM 1517: PP=2 to another axis, optimizer included": ("pp=2 mb=2", "tp=2 mb=2", 3, False),
    "Fast-LLM 436: the ranks become fewer": ("pp=2 dp=2 zero=1 mb=1", "dp=2 zero=3 mb=1", 3, True),
    "hybrid shards, tied over the pipeline": ("dp_replicate=2 dp_shard=2 zero=3 mb=1", "pp=4 mb=1", 3, True),
    "a stage held twice, another split": (
        "pp=2 dp=2 zero=2 schedule=dualpipe mb=1",
        "tp=2 sp=1 pp=2 schedule=interleaved:2 split=0,3,1,0 mb=2",
        4,
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "loaded_by", "layers", "tied"), CASES.values(), ids=CASES.keys())
def test_any_layout_goes_on_from_any_other(
    saved_by: str, loaded_by: str, layers: int, tied: bool, tmp_path: Path
) -> None:
    goes_on(work(saved_by, layers, tied), work(loaded_by, layers, tied), tmp_path)


def goes_on(saved_by: Any, loaded_by: Any, folder: Path) -> None:
    """The second run has what the first one saved, bit by bit, and its next step."""
    wanted, found = saved_and_loaded(saved_by, loaded_by, folder)
    assert wanted[0].keys() == found[0].keys()
    for name, value in wanted[0].items():
        assert value.abs().max() > 0, f"{name}: nothing to tell apart"
        assert torch.equal(found[0][name], value), f"{name} is not what was saved"
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-12, msg=f"gradient of {name}")
    for name, value in wanted[2].items():  # a step count that is lost changes the update by AdamW's bias correction
        torch.testing.assert_close(found[2][name], value, rtol=1e-6, atol=1e-9, msg=f"{name} after the next step")


@pytest.mark.slow
def test_pytorch_108869_with_empty_shards_and_a_narrow_type_it_is_as_if_never_stopped(tmp_path: Path) -> None:
    """Bit-equal on the same layout, weights in bf16: they are rounded from the master copy again."""
    same = work("dp=4 zero=1 mb=1", 1, False, precision="bf16")
    wanted, found = saved_and_loaded(same, same, tmp_path)
    for one, other in zip(wanted, found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "text",
    ["tp=4 sp=1 mb=2", "tp=2 dp=4 zero=3 mb=1", "pp=2 tp=2 dp=2 zero=1 mb=1", "dp_replicate=2 dp_shard=4 zero=1 mb=1"],
)
def test_boxes_cover_every_element_and_hold_what_the_layout_says(text: str) -> None:
    """Held against the harness' own reading of the records, which parity with one process has tested."""
    from shardwise.train.rank import build_rank
    from shardwise.train.threads import run_threads
    from tests.support.parity import pieces, whole_weights

    made, layout = work(text, 3, True)

    def hold(comm: Any) -> Any:
        rank = build_rank(made, layout, comm, Labels())
        own = [piece for piece in state(rank) if piece[0].endswith("/weight")]
        theirs = [p for s in rank.states.values() for p in pieces(s, s.master) if p.value.numel()]
        assert [(n.removesuffix("/weight"), box) for n, box, _ in own] == [(p.name, p.box) for p in theirs]
        return own

    held = run_threads(layout.world_size, hold)
    whole = assemble(held, {f"{n}/weight": shape for n, shape in whole_shapes(made.model).items()})
    assert all(torch.equal(whole[f"{n}/weight"], w) for n, w in whole_weights(made.model).items())


def tiny_experts() -> Model:
    """A mixture of 4 experts, 2 kv heads, and an odd vocabulary."""
    config = {
        "model_type": "mixtral",
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 21,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    return from_config(config, "tiny-experts")


PLANNED = {
    "Megatron-Bridge 5353: an odd vocabulary over TP and ZeRO-3": "tp=2 dp=4 zero=3 mb=1",
    "kv heads shared by neighbours": "tp=4 pp=2 mb=1",
    "a rank without a row of the vocabulary": "tp=8 dp=2 zero=3 mb=1",
    "Megatron-LM 7162: experts, EP=2": "ep=2 dp=4 zero=1 mb=1",
    "experts that are cut over data parallel ranks": "ep=2 dp=4 zero=3 mb=1",
    "context parallel ranks share the state": "cp=2 dp=2 zero=3 mb=1",
}


@pytest.mark.parametrize("text", PLANNED.values(), ids=PLANNED.keys())
def test_every_element_is_in_one_box_of_whole_tensors_that_no_layout_changes(text: str) -> None:
    """By the records alone, on layouts that may be planned only: no rank is run."""
    model, layout = tiny_experts(), parse(text)
    boxes: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for rank in range(layout.world_size):
        at = layout.mesh.coordinates(rank)
        places = layout.expert_mesh.coordinates(rank) | at
        states: Any = {}
        for unit, storage in rank_units(model, layout, at["pp"]).storages.items():
            index = 0
            for axis in storage.shard_axes if storage.shards > 1 else ():
                index = index * dict((*layout.expert_mesh.degrees, *layout.mesh.degrees))[axis] + places[axis]
            states[unit] = SimpleNamespace(storage=storage, index=index, moments=dict.fromkeys(ADAMW.states))
        for chunk in chunks(states, layout, rank):
            assert chunk.shape == whole_shapes(model)[chunk.name.rpartition("/")[0]]
            boxes.setdefault(chunk.name, set()).add((chunk.offsets, chunk.sizes))
    assert boxes.keys() == {f"{n}/{part}" for n in whole_shapes(model) for part in (MASTER, *ADAMW.states)}
    for name, held in boxes.items():
        count = torch.zeros(whole_shapes(model)[name.rpartition("/")[0]], dtype=torch.int)
        for offsets, sizes in held:
            count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        assert (count == 1).all(), name
