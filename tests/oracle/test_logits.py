"""Logits and files of transformers' own classes: equal numbers from the same safetensors, and the same files back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.collective import Labels
from shardwise.model.families.forms import form_of
from shardwise.model.hf import load_model
from shardwise.model.spec import Model
from shardwise.plan.layout import parse
from shardwise.train.comm import Comm
from shardwise.train.hf_weights import INDEX, SINGLE, WeightsError, open_weights, save_weights
from shardwise.train.rank import Rank, build_rank
from shardwise.train.threads import run_threads
from tests.support import families
from tests.support.families import CONFIGS, Tensors
from tests.support.models import job

pytestmark = pytest.mark.oracle

torch.set_num_threads(1)


def logits(rank: Rank, ids: torch.Tensor) -> torch.Tensor:
    """[T, v / tp]: the units one after the other, up to what the loss takes."""
    modules = rank.executor.modules
    with torch.no_grad():
        x = modules["embedding"].embedding(ids.flatten())
        for i in range(rank.job.model.layers):
            x = modules[f"layers.{i}"].layer(x)
        normed, _ = modules["head"].norm("norm", x)
        (found,) = modules["head"].column("output", normed, "output")
    cap = form_of(rank.job.model).logit_cap
    return found if cap is None else cap * torch.tanh(found / cap)


def said_of(model: Model) -> tuple[object, ...]:
    """What a config says beside sizes; transformers writes some of it in other keys than it was given."""
    return form_of(model), model.chain, model.norm_eps, model.rope_theta, model.rope_scaling, model.tied


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", families.named())
def test_logits_equal_transformers(name: str, tp: int, tmp_path: Path) -> None:
    """From the folder that `save_pretrained` writes: its config.json and its safetensors."""
    made = families.reference(CONFIGS[name], torch.float32)
    made.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert said_of(model) == said_of(families.model_of(CONFIGS[name]))
    weights = open_weights(model, tmp_path)
    ids, _ = families.tokens(model.vocab)
    layout = parse(f"tp={tp} mb={families.BATCH}" if tp > 1 else f"mb={families.BATCH}")
    work = job(model, f"{tp}xcpu", families.SEQ_LEN, families.BATCH, "fp32")

    def rank(comm: Comm) -> torch.Tensor:
        built = build_rank(work, layout, comm, Labels(), seed=None)
        for state in built.states.values():
            state.load({r.name: weights.local(r, built.world.index("tp")) for r in state.storage.records})
        return logits(built, ids)

    found = torch.cat(run_threads(tp, rank), 1)[:, : model.vocab]
    with torch.no_grad():
        wanted = made(ids).logits.flatten(0, 1)
    assert (found - wanted).abs().max() <= 1e-5


def stored(folder: Path) -> Tensors:
    """Every tensor of a folder's files."""
    return {k: t for path in sorted(folder.glob("*.safetensors")) for k, t in load_file(path).items()}


@pytest.mark.parametrize("shard", ["1GB", "40KB"])
@pytest.mark.parametrize("name", CONFIGS)
def test_files_come_back_bit_for_bit(name: str, shard: str, tmp_path: Path) -> None:
    """Read and written again: the same keys, shapes and bits as transformers wrote, one file or an index."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    families.reference(CONFIGS[name], torch.bfloat16).save_pretrained(theirs, max_shard_size=shard)
    model = families.model_of(CONFIGS[name])
    weights = open_weights(model, theirs)
    files = save_weights(model, weights.whole, ours, 40_000 if shard == "40KB" else 10**9)
    wanted, found = stored(theirs), stored(ours)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[k], wanted[k]) and found[k].dtype == wanted[k].dtype for k in wanted)
    assert (ours / INDEX).exists() == (len(files) > 1) == (shard == "40KB")
    again = open_weights(model, ours)
    assert all(torch.equal(again.whole(n), weights.whole(n)) for n in weights.places)
    if len(files) > 1:
        total = json.loads((ours / INDEX).read_text())["metadata"]["total_size"]
        assert total == json.loads((theirs / INDEX).read_text())["metadata"]["total_size"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """GPT-2 as transformers writes it."""
    families.reference(CONFIGS["gpt2"], torch.float32).save_pretrained(tmp_path)
    return tmp_path


def changed(folder: Path, drop: str = "", **add: torch.Tensor) -> None:
    tensors = {k: v for k, v in load_file(folder / SINGLE).items() if k != drop} | add
    save_file(tensors, folder / SINGLE)


GPT2 = families.model_of(CONFIGS["gpt2"])


def test_every_wrong_tensor_is_named_at_once(folder: Path) -> None:
    short = {"transformer.h.1.attn.c_attn.weight": torch.zeros(64, 191), "transformer.h.9.ln_1.weight": torch.zeros(64)}
    changed(folder, drop="transformer.ln_f.bias", **short)
    with pytest.raises(WeightsError) as error:
        open_weights(GPT2, folder)
    assert sorted(fault.removeprefix(f"{folder}: ") for fault in error.value.faults) == [
        "transformer.h.1.attn.c_attn.weight: found 64 x 191, wanted 64 x 192",
        "transformer.h.9.ln_1.weight: unexpected, the model has no such parameter",
        "transformer.ln_f.bias: missing, wanted 64",
    ]


def test_older_files_of_a_bare_trunk_with_buffers_are_read(folder: Path) -> None:
    """As the first GPT-2 lies on the hub: no prefix, and the causal mask beside the weights."""
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(folder / SINGLE).items()}
    wanted = open_weights(GPT2, folder).whole("layers.1.attention.k.weight")
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 32, 32)}, folder / SINGLE)
    assert torch.equal(open_weights(GPT2, folder).whole("layers.1.attention.k.weight"), wanted)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (INDEX, b"{", "not JSON"),
        (INDEX, b'{"weight_map": {"a": "../a.safetensors"}}', "names of files in this folder"),
        (INDEX, b'{"weight_map": {"a": "a.safetensors"}}', "a.safetensors"),
        (INDEX, b"[]", "weight_map"),
        (SINGLE, b"\xff" * 64, "not a safetensors file"),
        ("readme", b"", "wanted a folder of safetensors files"),
    ],
)
def test_a_broken_folder_is_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match=said):
        open_weights(GPT2, tmp_path)


def test_a_family_without_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="family deepseek_v3 are not read"):
        open_weights(load_model("deepseek-v3"), tmp_path)
