"""`shardwise export` and `train --init-from` as people use them: out of one run, into another, and how they fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from shardwise.plan.plan import load_plan
from shardwise.train.data import read_corpus
from tests.dist.commands import ENVIRONMENT, said, shardwise
from tests.dist.test_train import TINY, losses, plan_file, train

pytestmark = pytest.mark.dist

ONE_LAYER = {"num_hidden_layers": "1"}
LAYOUTS = {
    "tp=2 pp=2 mb=4": '"4xcpu"',
    "dp=2 zero=3 mb=2": '"2xcpu"',
    "mb=16": '"1xcpu"',
}


def export(*words: object) -> subprocess.CompletedProcess[str]:
    return shardwise("export", *words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps with checkpoints at 2 and 4, `run`, and its last weights, `hf`."""
    folder = tmp_path_factory.mktemp("trained")
    done = train(TINY, "--steps", 4, "--json", "--save", folder / "run", "--save-every", 2)
    assert len(losses(done)) == 4
    found = export(folder / "run", "-o", folder / "hf", "--json")
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert told["checkpoint"] == str(folder / "run" / "step-000000004")
    assert told["total_bytes"] == (folder / "hf" / "model.safetensors").stat().st_size
    assert told["parameters"] == load_plan(TINY).job.model.parameters
    return folder


@pytest.mark.slow
@pytest.mark.oracle
def test_a_run_starts_from_pretrained_weights_on_any_layout(trained: Path, tmp_path: Path) -> None:
    """Its first loss is transformers' own on the same samples, from a folder as from a single file."""
    transformers = pytest.importorskip("transformers")
    plan = load_plan(TINY)
    corpus = read_corpus("python-stdlib", plan.job.seq_len, 0, plan.job.global_batch, vocab=256)
    samples = corpus.batch(range(plan.job.global_batch))
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "hf")
    with torch.no_grad():
        logits = model(samples[:, :-1]).logits
        wanted = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()))
    assert wanted < 5.4, "it has learned something: ln 256 is 5.545"
    for i, (layout, cluster) in enumerate(LAYOUTS.items()):
        source = trained / "hf" / ("model.safetensors" if i == 1 else "")
        done = train(plan_file(tmp_path, layout, cluster=cluster), "--steps", 1, "--json", "--init-from", source)
        assert losses(done)[0] == pytest.approx(wanted, abs=1e-5), layout


def test_another_models_weights_are_refused_before_a_rank_starts(trained: Path, tmp_path: Path) -> None:
    for words, message in [
        ((plan_file(tmp_path, hidden_size="64"), "--init-from", trained / "hf"), "found 256 x 128, wanted 256 x 64"),
        (
            (TINY, "--init-from", tmp_path / "none"),
            "none: no such file; wanted a safetensors file, or a folder of them",
        ),
        ((TINY, "--init-from", tmp_path), "no model.safetensors.index.json and no *.safetensors"),
        ((TINY, "--init-from", TINY), "tiny.toml: not a safetensors file"),
        ((TINY, "--init-from", trained / "hf", "--resume", trained / "run"), "--init-from: refused beside --resume"),
    ]:
        done = train(*words, "--steps", 9)
        assert done.returncode == 2
        assert any(message in line for line in said(done)), done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr


def test_what_is_no_checkpoint_or_no_new_folder_is_refused(trained: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(trained / "run" / "step-000000004", tmp_path / "step-000000004"))
    with (damaged / "__1_0.distcp").open("r+b") as file:
        file.seek(5000)
        file.write(bytes([file.read(1)[0] ^ 1]))
    for words, messages in [
        ((tmp_path / "none", "-o", tmp_path / "hf"), [f"{tmp_path / 'none'}: no such folder; wanted a folder with"]),
        ((damaged, "-o", tmp_path / "hf"), [f"{damaged / '__1_0.distcp'}: its content is not what was saved"]),
        (
            (trained / "run", "-o", trained / "hf", "--dtype", "int4"),
            [f"--output {trained / 'hf'}: is there already", "--dtype: found 'int4'; wanted one of bfloat16"],
        ),
    ]:
        done = export(*words)
        assert done.returncode == 2, done.stderr
        assert len(said(done)) == len(messages)
        assert all(line.startswith(m) for line, m in zip(said(done), messages, strict=True)), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000004"]


BROKEN_EXPORT = """
import os, signal, sys
from shardwise.cli import main
from shardwise.train import export

how = sys.argv.pop(1)
ours = export.sync

def sync(path):
    if path.name == "model.safetensors":
        os.kill(os.getpid(), signal.SIGINT)
    ours(path)

if how == "interrupt":
    export.sync = sync
else:
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
main()
"""


@pytest.mark.parametrize(("how", "code"), [("full disk", 74), ("interrupt", 130)])
def test_an_export_that_ends_early_leaves_nothing(how: str, code: int, trained: Path, tmp_path: Path) -> None:
    words = "export", trained / "run", "-o", tmp_path / "out" / "hf"
    done = shardwise(how, *words, code=BROKEN_EXPORT)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(said(done)) == 1
    assert not list((tmp_path / "out").iterdir())


def test_on_a_terminal_a_bar_stands_for_the_lines(tmp_path: Path) -> None:
    """What a pseudo terminal shows: one line that is redrawn, checkpoints above it, the end below it."""
    master, slave = os.openpty()
    plan = plan_file(tmp_path, "dp=2 zero=1 mb=4", **(ONE_LAYER | {"cluster": '"2xcpu"'}))
    words = [sys.executable, "-m", "shardwise", "train", str(plan), "--steps", "4", "--save", str(tmp_path / "run")]
    environment = ENVIRONMENT | {"COLUMNS": "100", "TERM": "xterm"}
    shown = b""
    with subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        with suppress(OSError):  # how Linux says that the other end is closed
            while chunk := os.read(master, 1 << 16):
                shown += chunk
    os.close(master)
    text = shown.decode()
    assert process.returncode == 0, text
    assert text.count("\x1b[2K") >= 4, "it is redrawn"
    drawn = [part for part in text.replace("\n", "\r").split("\r") if "step 4/4" in part]
    assert drawn
    assert "tokens/s" in drawn[-1]
    assert "% MFU" in drawn[-1]
    rows = text.replace("\r", "").splitlines()
    assert rows[-1] == f"saved {tmp_path / 'run' / 'step-000000004'}"
    assert "median step" in rows[-2]
