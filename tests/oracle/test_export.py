"""Checkpoints in Hugging Face's form: transformers' own classes load what a run has trained, and compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.collective import Labels
from shardwise.model.hf import load_model, to_config
from shardwise.plan.layout import parse
from shardwise.plan.rules import findings
from shardwise.train.export import DTYPES, export
from shardwise.train.hf_weights import CONFIG, SINGLE, WeightsError, open_weights, save_weights, sources
from tests.dist.pool import run_gloo
from tests.support import families
from tests.support.families import CONFIGS
from tests.support.models import job

pytestmark = [pytest.mark.oracle, pytest.mark.dist]

torch.set_num_threads(1)

HERE = "tests.oracle.test_export"
STEP = 2


def work(name: str, text: str) -> Any:
    layout = parse(text)
    made = job(families.model_of(CONFIGS[name]), f"{layout.world_size}xcpu", families.SEQ_LEN, families.BATCH, "fp32")
    assert not findings(layout, made)
    return made, layout


def train_and_save(comm: Any, of: Any, folder: Path) -> None:
    """Steps on random tokens, then a checkpoint, as the loop writes it."""
    from shardwise.train.checkpoint import About, AllRanks, Saver
    from shardwise.train.rank import build_rank, train_step
    from tests.support.parity import local_data

    among = AllRanks.make(20.0)
    made, layout = of
    rank = build_rank(made, layout, comm, Labels())
    rank.optimizer.set_learning_rate(0.05)
    ids, targets = families.tokens(made.model.vocab)
    for _ in range(STEP):
        local = [local_data(made, layout, rank, tokens) for tokens in (ids, targets)]
        train_step(rank, local[0] if rank.needs_ids else None, local[1] if rank.needs_targets else None)
    identity = {f"model.{key}": value for key, value in to_config(made.model).items()} | {"seq_len": made.seq_len}
    saver = Saver(rank, folder, About(identity, {}), among)
    saver.start(STEP)
    saver.finish()


def logits_of_checkpoint(comm: Any, of: Any, folder: Path) -> torch.Tensor:
    """By our own runtime, from the checkpoint itself."""
    from shardwise.train.checkpoint import AllRanks, find_checkpoint, load
    from shardwise.train.rank import build_rank
    from tests.oracle.test_logits import logits

    among = AllRanks.make(20.0)
    made, layout = of
    rank = build_rank(made, layout, comm, Labels(), seed=None)
    load(rank, find_checkpoint(folder), among)
    return logits(rank, families.tokens(made.model.vocab)[0])


CASES = {
    "llama": "tp=2 pp=2 mb=2",
    "qwen2": "dp=4 zero=3 mb=1",  # biases, a tied embedding
    "gemma2": "pp=2 dp=2 zero=1 mb=1",
    "gpt2": "tp=2 dp=2 zero=2 mb=1",  # products side by side, transposed
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_what_was_trained(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run_gloo(4, f"{HERE}:train_and_save", work(name, CASES[name]), tmp_path / "run")
    (ours,) = run_gloo(1, f"{HERE}:logits_of_checkpoint", work(name, f"mb={families.BATCH}"), tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "hf")
    assert (done.step, done.dtype, done.files) == (STEP, "float32", (SINGLE,))
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    ids, _ = families.tokens(theirs.config.vocab_size)
    with torch.no_grad():
        wanted = theirs(ids).logits.flatten(0, 1)
    assert wanted.std() > 1e-2
    assert (ours - wanted).abs().max() <= 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
    config = json.loads((tmp_path / "hf" / CONFIG).read_text())
    longest = "n_positions" if name == "gpt2" else "max_position_embeddings"
    assert config[longest] == (32 if name == "gpt2" else families.SEQ_LEN)
    narrow = export(tmp_path / "run", tmp_path / "narrow", "bfloat16")
    whole, half = (load_file(tmp_path / folder / SINGLE) for folder in ("hf", "narrow"))
    assert narrow.dtype == DTYPES[0]
    assert all(torch.equal(half[key], value.bfloat16()) for key, value in whole.items())
    assert half.keys() == whole.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json_makes_the_class_it_names(name: str, tmp_path: Path) -> None:
    """Written from the model alone; what transformers makes of it has the logits of the original, bit for bit."""
    transformers = pytest.importorskip("transformers")
    original = families.reference(CONFIGS[name], torch.float32)
    original.save_pretrained(tmp_path / "theirs")
    model = load_model(str(tmp_path / "theirs"))
    save_weights(model, open_weights(model, tmp_path / "theirs").whole, tmp_path / "ours")
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    (architecture,) = json.loads((tmp_path / "ours" / CONFIG).read_text())["architectures"]
    assert architecture == type(made).__name__ == type(original).__name__
    ids, _ = families.tokens(model.vocab)
    with torch.no_grad():
        assert torch.equal(made(ids).logits, original(ids).logits)
    assert open_weights(model, tmp_path / "ours").places.keys() == sources(model).keys()
    assert open_weights(model, tmp_path / "ours" / SINGLE).places.keys() == sources(model).keys()


def test_another_models_config_and_numbers_that_are_no_floats_are_named(tmp_path: Path) -> None:
    """A base of the rotation changes no shape; a quantized tensor has the right one."""
    from safetensors.torch import save_file

    families.reference(CONFIGS["llama"], torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    model = load_model(str(tmp_path))
    (tmp_path / CONFIG).write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    )
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(WeightsError) as error:
        open_weights(model, tmp_path)
    assert error.value.faults == [
        f"{tmp_path}: config.json: rope_theta is 7.0, the plan's model has 10000.0",
        f"{tmp_path}: model.norm.weight: found I8, wanted one of BF16, F16, F32, F64: not quantized",
    ]
