"""`shardwise train --save` and `--resume` as people use them: how they go on, and every way in which they can fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.plan.plan import load_plan
from shardwise.plan.settings import TrainSettings
from shardwise.train import loop as training_loop
from shardwise.train.checkpoint import CheckpointError, find_checkpoint, open_folder
from shardwise.train.options import OptionError, Options, checkpoints, newest
from tests.dist.commands import forked, said, shardwise
from tests.dist.test_train import losses, plan_file, train

pytestmark = pytest.mark.dist

LAYOUT = "dp=2 zero=1 mb=4"
TWO: dict[str, str] = {"cluster": '"2xcpu"', "num_hidden_layers": "1"}

TEXT = bytes(i * i % 251 for i in range(40 * 128 + 1))
"""40 samples, of which a step takes 16: six steps need three epochs."""

BROKEN_SAVE = """
import os, resource, signal, sys, time
from pathlib import Path
from shardwise.cli import main
from shardwise.train import loop, storage

how, step = sys.argv.pop(1), int(sys.argv.pop(1))
loop.TIMEOUT_S = 5.0 if how == "hang" else loop.TIMEOUT_S
ours = storage.DigestWriter.write_data

def write_data(self, plan, planner):
    if plan.storage_data.prefix == "__1_" and f"-{step:09d}." in str(self.folder):
        if how == "raise":
            planner.resolve_data = None
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(1000)
        if how == "full disk":  # what a quota does: the system refuses to write on
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    return ours(self, plan, planner)

storage.DigestWriter.write_data = write_data
main()
"""


def small_plan(folder: Path, layout: str = LAYOUT, **changes: str) -> Path:
    """A plan for two ranks, one layer and a corpus that lies beside it."""
    (folder / "corpus").write_bytes(TEXT)
    return plan_file(folder, layout, **(TWO | {"data": f'"{folder / "corpus"}"'} | changes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[float]]:
    """A run of six steps with checkpoints at 3 and 6: its plan, the folder that it saved into, its losses."""
    folder = tmp_path_factory.mktemp("saved")
    plan = small_plan(folder)
    done = train(plan, "--steps", 6, "--json", "--save", folder / "run", "--save-every", 3, "--warmup", 2)
    return plan, folder / "run", losses(done)


def resumed(done: Any) -> dict[int, float]:
    assert done.returncode == 0, done.stderr[-3000:]
    return {step["step"]: step["loss"] for step in map(json.loads, done.stdout.splitlines())}


def copy_of(run_folder: Path, to: Path) -> Path:
    """The newest checkpoint alone."""
    found = newest(run_folder)
    assert found is not None
    return Path(shutil.copytree(found, to / found.name))


# How it goes on ---------------------------------------------------------------------------------------------------


def test_automodel_5637_prime_rl_1035_a_killed_run_goes_on_with_the_same_samples_on_fewer_ranks(
    saved: tuple[Path, Path, list[float]], tmp_path: Path
) -> None:
    """Killed while it writes the second checkpoint; resumed without data parallelism, from the first."""
    plan, _, whole = saved
    words = "--json", "--save", tmp_path / "run", "--save-every", 3, "--warmup", 2
    done = shardwise("kill", 6, "train", plan, "--steps", 6, *words, code=BROKEN_SAVE)
    assert done.returncode == 1
    assert said(done)[0].startswith("rank 1")
    assert "killed by SIGKILL" in said(done)[0]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000000003"]
    other = small_plan(tmp_path, "mb=16", cluster='"1xcpu"')
    found = resumed(train(other, "--steps", 6, "--resume", tmp_path / "run", *words))
    assert list(found) == [4, 5, 6]
    assert list(found.values()) == pytest.approx(whole[3:], abs=1e-5)
    assert not list((tmp_path / "run").glob(".*")), "what the killed run left is gone"
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told][-3:] == [4, 5, 6]
    assert told[-1]["learning_rate"] == 3e-3


def test_kempnerforge_51_a_resumed_run_is_bit_for_bit_the_one_that_never_stopped(
    saved: tuple[Path, Path, list[float]], tmp_path: Path
) -> None:
    """In the middle of an epoch, over the end of that and of the next one: losses and all that is saved."""
    plan, folder, whole = saved
    shutil.copytree(folder / "step-000000003", tmp_path / "step-000000003")
    found = resumed(train(plan, "--steps", 6, "--resume", tmp_path, "--save", tmp_path, "--warmup", 2, "--json"))
    assert list(found.items()) == list(enumerate(whole[3:], 4))
    files = [json.loads((run / "step-000000006" / "shardwise.json").read_text())["files"] for run in (folder, tmp_path)]
    assert files[0].keys() == files[1].keys()
    tensors = [name for name in files[0] if name.endswith(".distcp")]
    assert [files[0][name] for name in tensors] == [files[1][name] for name in tensors]


def test_the_last_checkpoints_stay(saved: tuple[Path, Path, list[float]], tmp_path: Path) -> None:
    plan, _, _ = saved
    done = train(plan, "--steps", 4, "--save", tmp_path, "--save-every", 1, "--keep", 2)
    assert done.stdout.splitlines()[-1] == f"saved {tmp_path / 'step-000000004'}"
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000003", "step-000000004"]
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "metrics.jsonl"


# How it fails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("raise", 1, "rank 1, step 2: saving into {folder}: TypeError: 'NoneType' object is not callable"),
        ("full disk", 74, "rank 1, step 2: saving into {folder}: File too large"),
        ("hang", 1, ": saving into {folder}: waited 5 s for ranks [1]: "),  # as rank 0 says, or rank 1 of itself
    ],
)
def test_a_save_that_fails_ends_all_and_is_never_taken(
    how: str, code: int, cause: str, saved: tuple[Path, Path, list[float]], tmp_path: Path
) -> None:
    plan, _, _ = saved
    before = time.monotonic()
    words = how, 2, "train", plan, "--steps", 200, "--save", tmp_path, "--save-every", 1
    done = shardwise(*words, code=BROKEN_SAVE)
    assert time.monotonic() - before < 30
    assert done.returncode == code, done.stderr
    assert cause.format(folder=tmp_path) in said(done)[0]
    assert sum(line.startswith("rank ") for line in said(done)) == 1
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000001"], "the last good one is still there"


def test_damage_inside_a_file_is_found_by_the_ranks(saved: tuple[Path, Path, list[float]], tmp_path: Path) -> None:
    plan, folder, _ = saved
    broken = copy_of(folder, tmp_path)
    with (broken / "__1_0.distcp").open("r+b") as file:
        file.seek(5000)
        file.write(bytes([file.read(1)[0] ^ 1]))
    done = train(plan, "--steps", 7, "--resume", tmp_path)
    assert done.returncode == 2
    assert len(said(done)) == 1
    wanted = f", step 6: loading {broken}: {broken / '__1_0.distcp'}: its content is not what was saved"
    assert re.sub(r"^rank \d", "", said(done)[0]) == wanted


def test_ctrl_c_names_the_last_checkpoint(saved: tuple[Path, Path, list[float]], tmp_path: Path) -> None:
    words = "train", saved[0], "--steps", 1000, "--save", tmp_path
    with forked(*words, "--save-every", 1) as process:
        for line in process.stdout:
            if line.startswith("step") and "saved" in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == f"shardwise: interrupted; go on with --resume {newest(tmp_path)}\n"


def test_another_model_is_refused_with_all_faults_before_a_rank_starts(
    saved: tuple[Path, Path, list[float]], tmp_path: Path
) -> None:
    other = small_plan(tmp_path, hidden_size="64", seed="1")
    done = train(other, "--steps", 9, "--resume", saved[1])
    assert done.returncode == 2
    where = saved[1] / "step-000000006"
    assert said(done) == [
        f"{where}: saved with model.head_dim 16; this run has 8",
        f"{where}: saved with model.hidden_size 128; this run has 64",
        f"{where}: saved with seed 0; this run has 1",
    ]
    assert done.stdout == ""


def test_a_run_that_has_nothing_to_do_or_would_hide_another_is_refused(
    saved: tuple[Path, Path, list[float]], tmp_path: Path
) -> None:
    plan, folder = load_plan(saved[0]), saved[1]
    settings = plan.train or TrainSettings()
    for steps, options, message in [
        (6, Options(resume=folder), "6 steps are done; this run ends at 6"),
        (9, Options(save=folder), "holds step-000000006, this run starts at step 0"),
        (9, Options(resume=tmp_path / "none"), "no such folder; wanted a folder with shardwise.json"),
        (9, Options(resume=tmp_path), "no checkpoint in it"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            training_loop.train(replace(plan, train=replace(settings, steps=steps)), options=options)
    with pytest.raises(OptionError, match="--init-from: refused beside --resume"):
        Options(resume=folder, init_from=folder)


# What is a checkpoint ---------------------------------------------------------------------------------------------


def faults(path: Path, identity: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(path, identity)
    return "\n".join(caught.value.faults)


def test_a_checkpoint_that_is_not_whole_is_refused(saved: tuple[Path, Path, list[float]], tmp_path: Path) -> None:
    found = copy_of(saved[1], tmp_path)
    identity = json.loads((found / "shardwise.json").read_text())["identity"]
    assert find_checkpoint(tmp_path, identity).step == find_checkpoint(found, identity).step == 6
    assert "saved with seed 0; this run has 7" in faults(tmp_path, identity | {"seed": 7})
    metadata, data = found / ".metadata", found / "__0_0.distcp"
    content = metadata.read_bytes()
    metadata.write_bytes(content[:-1] + b"x")
    assert ".metadata: its content is not what was saved" in faults(tmp_path, identity)
    metadata.write_bytes(content)
    os.truncate(data, 100)
    assert "__0_0.distcp has 100 bytes" in faults(tmp_path, identity)
    data.unlink()
    shutil.copytree(saved[1] / "step-000000003", tmp_path / "step-000000003")
    assert "__0_0.distcp is missing" in faults(tmp_path, identity)
    assert f"an earlier one is there: {tmp_path / 'step-000000003'}" in faults(tmp_path, identity)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        '{"format": 1}',
        "[" * 100_000,
        '{"format": 1, "files": {"../../etc/passwd": [1, ""]}}',
    ],
)
def test_what_is_no_manifest_is_refused(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "step-000000001"
    folder.mkdir()
    (folder / "shardwise.json").write_text(content)
    assert "manifest" in faults(tmp_path, {}) or "this version reads 1" in faults(tmp_path, {})


def test_only_a_whole_folder_of_the_right_name_is_a_checkpoint(tmp_path: Path) -> None:
    for name in (".step-000000009.00000000.partial", "step-9", "step-000000007", "step-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    (tmp_path / ".step-000000009.00000000.partial" / "shardwise.json").touch()
    assert checkpoints(tmp_path) == []
    (tmp_path / "step-000000007" / "shardwise.json").touch()
    assert newest(tmp_path) == tmp_path / "step-000000007"
    open_folder(tmp_path, 7)
    with pytest.raises(CheckpointError, match="holds step-000000007, this run starts at step 6"):
        open_folder(tmp_path, 6)


# The learning rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_schedule_is_torchs(decay: str) -> None:
    import torch
    from torch.optim import lr_scheduler as torchs

    steps, warmup, floor = 20, 4, 0.25
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rise = torchs.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    fall: torchs.LRScheduler = torchs.ConstantLR(optimizer, 1.0)
    if decay == "linear":
        fall = torchs.LinearLR(optimizer, 1.0, floor, steps - 1 - warmup)
    if decay == "cosine":
        fall = torchs.CosineAnnealingLR(optimizer, steps - 1 - warmup, floor)
    both = torchs.SequentialLR(optimizer, [rise, fall], [warmup])
    wanted = []
    for _ in range(steps):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    settings = TrainSettings(steps, learning_rate=1.0, warmup=warmup, decay=decay, floor=floor)
    found = [settings.learning_rate_at(step) for step in range(steps)]
    assert found == pytest.approx(wanted, abs=1e-12)
