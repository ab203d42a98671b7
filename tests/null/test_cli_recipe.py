"""The recipe of a run: optimizer and training settings in options and plan files, all faults at once, nothing lost."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from shardwise.cli import app
from shardwise.model.hf import load_model
from shardwise.plan.layout import parse
from shardwise.plan.optimizer import ADAMW, OPTIMIZERS
from shardwise.plan.plan import Plan, PlanError, load_plan, parse_plan, to_toml, write
from shardwise.plan.settings import DECAYS, TrainSettings
from shardwise.view import training
from shardwise.view.asking import InputError, read_recipe
from tests.support.models import job, tiny

FIT = ("fit", "llama-3.1-8b", "--on", "8xh100", "--batch", "8", "--seq", "1K", "--layout", "dp=8 zero=1 mb=1")
RECIPE = TrainSettings(
    *(500, 1e-3, 50, "cosine", 0.1, 0.05),
    beta1=0.8,
    beta2=0.99,
    eps=1e-7,
    momentum=0.95,
    clip_norm=0.5,
    seed=3,
    data="text",
)
PLAN = Plan(
    replace(job(tiny(), "2xcpu", precision="fp32"), optimizer=OPTIMIZERS["sgd-momentum"]), parse("tp=2 mb=8"), RECIPE
)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "100"})


def answer(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# ---------------------------------------------------------------------------------------------------------- optimizer


def test_states_cost_four_bytes_a_parameter_and_are_named_in_what_is_assumed() -> None:
    """Llama 3.1 8B under ZeRO-1 over eight ranks: an eighth of each state on every rank."""
    found = {name: answer(*FIT, "--optimizer", name) for name in OPTIMIZERS}
    parts = {name: one["memory"][0]["proved_bytes"]["optimizer"] for name, one in found.items()}
    state = 4 * load_model("llama-3.1-8b").parameters // 8
    assert parts["sgd-momentum"] - parts["sgd"] == state
    # AdamW's counters: 4 bytes for the vectors and for the matrices of each of 32 layers, of the embedding, of the head
    assert parts["adamw"] - parts["sgd-momentum"] == state + 4 * (32 * 2 + 1 + 2)
    assert parts["sgd"] == state, "the float32 master copy is all that is left"
    for name, one in found.items():
        assert (one["optimizer"], one["optimizer_title"]) == (name, OPTIMIZERS[name].title)
        said = " ".join(run(*FIT, "--optimizer", name).stdout.split())
        assert f"; {OPTIMIZERS[name].title}; full training" in said
    assert answer(*FIT) == found["adamw"]


def test_fewer_states_make_it_fit_and_step_sooner() -> None:
    """Llama 2 7B on one H100: 2 + 4 + 4 bytes a parameter and two more states are 113 GiB, without them 63."""
    tight = ("fit", "llama-2-7b", "--on", "1xh100", "--batch", "1", "--seq", "1K", "--layout", "recompute=full mb=1")
    assert [run(*tight, "--optimizer", name).exit_code for name in ("adamw", "sgd-momentum", "sgd")] == [3, 3, 0]
    parts = [answer(*FIT, "--optimizer", name)["step"]["parts_s"]["optimizer"] for name in ("sgd", "adamw")]
    assert parts[0] < parts[1]


def test_a_plan_carries_its_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    words = ("plan", "llama-3.1-8b", "--on", "8xh100", "--batch", "8", "--optimizer", "sgd")
    assert run(*words, "-o", str(path)).exit_code == 0
    assert load_plan(path).job.optimizer is OPTIMIZERS["sgd"]
    assert answer("show", str(path))["optimizer"] == "sgd"
    tables = tomllib.loads(path.read_text())
    assert tables["job"].pop("optimizer") == "sgd"
    assert parse_plan(tables, "older.toml").job.optimizer is OPTIMIZERS["adamw"]
    tables["job"]["optimizer"] = "adam"
    with pytest.raises(PlanError) as error:
        parse_plan(tables, "plan.toml")
    assert error.value.faults == ["plan.toml: job.optimizer: found 'adam'; wanted one of adamw, sgd-momentum, sgd"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*FIT, "--optimizer", "Adam"), "--optimizer: found 'Adam'; wanted one of adamw, sgd-momentum, sgd"),
        (("fit", "examples/tiny.toml", "--optimizer", "sgd"), "--optimizer: refused beside examples/tiny.toml"),
    ],
)
def test_what_is_no_optimizer_is_refused(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


# ----------------------------------------------------------------------------------------------------------- settings


def test_a_plan_carries_a_whole_recipe() -> None:
    assert all(getattr(RECIPE, f.name) != getattr(TrainSettings(), f.name) for f in fields(TrainSettings))
    assert parse_plan(tomllib.loads(to_toml(PLAN)), "plan.toml") == PLAN


def test_the_documented_recipe_is_the_default_one() -> None:
    """Every key of docs/training.md, with its default."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    tables = tomllib.loads(text.partition("```toml\n")[2].partition("```")[0])
    assert tables == {"job": {"optimizer": ADAMW.name}, "train": asdict(TrainSettings())}


def test_another_layout_of_a_plan_keeps_the_recipe(tmp_path: Path) -> None:
    one, other = tmp_path / "plan.toml", tmp_path / "other.toml"
    write(PLAN, one)
    assert run("show", str(one), "--layout", "dp=2 mb=4", "-o", str(other)).exit_code == 0
    found = load_plan(other)
    assert (found.train, found.job, str(found.layout)) == (RECIPE, PLAN.job, "dp=2 mb=4")


WRONG: dict[str, Any] = {
    "steps": 0,
    "learning_rate": float("nan"),
    "warmup": -1,
    "decay": "cosinus",
    "floor": 1.5,
    "weight_decay": -1.0,
    "beta1": 1.0,
    "beta2": 1,
    "eps": "small",
    "momentum": True,
    "clip_norm": 0,
    "seed": 2**63,
    "data": "",
}


def test_every_setting_out_of_its_range_is_named_at_once() -> None:
    assert WRONG.keys() == asdict(RECIPE).keys()
    tables = tomllib.loads(to_toml(PLAN))
    tables["train"] = WRONG
    with pytest.raises(PlanError) as error:
        parse_plan(tables, "plan.toml")
    assert [fault.partition(": found")[0] for fault in error.value.faults] == [
        f"plan.toml: train.{key}" for key in WRONG
    ]
    assert "plan.toml: train.decay: found 'cosinus'; wanted one of constant, linear, cosine" in error.value.faults


def test_options_take_the_place_of_the_plans_settings(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    write(PLAN, path)
    assert read_recipe(str(path), warmup=None, decay=None) == PLAN
    found = read_recipe(str(path), warmup=7, decay="linear", floor=0.0, learning_rate=2.0, steps=9, data="other")
    wanted = replace(RECIPE, warmup=7, decay="linear", floor=0.0, learning_rate=2.0, steps=9, data="other")
    assert found == replace(PLAN, train=wanted)
    tables = tomllib.loads(to_toml(PLAN))
    del tables["train"]
    path.write_text(tomli_w.dumps(tables))
    assert read_recipe(str(path), floor=0.5).train == TrainSettings(floor=0.5)


def test_wrong_options_are_named_as_they_are_typed_beside_the_plans_own_faults(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    tables = tomllib.loads(to_toml(PLAN))
    tables["train"]["floor"] = 2
    path.write_text(tomli_w.dumps(tables))
    with pytest.raises(InputError) as error:
        read_recipe(str(path), learning_rate=float("inf"), decay="cosinus")
    assert error.value.faults == [
        f"{path}: train.floor: found 2; wanted a number from 0 to 1",
        "--learning-rate: found inf; wanted a number from 0 to 100",
        "--decay: found 'cosinus'; wanted one of constant, linear, cosine",
    ]
    result = run("train", "examples/tiny.toml", "--floor", "2", "--warmup", "-1")
    assert result.exit_code == 2
    assert result.stderr.count("shardwise: --") == 2


@given(
    steps=st.integers(1, 10_000),
    warmup=st.integers(0, 20_000),
    decay=st.sampled_from(DECAYS),
    floor=st.floats(0, 1),
    step=st.integers(0, 20_000),
)
def test_a_learning_rate_is_never_above_its_highest_nor_below_its_floor(
    steps: int, warmup: int, decay: str, floor: float, step: int
) -> None:
    settings = TrainSettings(steps, 0.5, warmup, decay, floor)
    step %= steps
    found = settings.learning_rate_at(step)
    assert found <= 0.5 * (1 + 1e-12)
    if step < warmup:
        assert found == pytest.approx(0.5 * (step + 1) / warmup)
    else:
        assert found >= 0.5 * floor - 1e-12
    if step == steps - 1 > warmup and decay != "constant":
        assert found == pytest.approx(0.5 * floor, abs=1e-12)


# ---------------------------------------------------------------------------------------------------------- telling


def test_the_opening_says_recipe_kernel_weights_and_what_mfu_is_a_share_of() -> None:
    said = training.opening(PLAN, "in place", "hf/")
    assert "; MFU of 80.0 GFLOP/s in float32 a rank" in said
    update = "SGD with momentum (in place), learning rate 0.001, warmup 50 steps, cosine to 10 %, weight decay 0.05"
    assert f"data: text; {update}, clip norm 0.5, seed 3\nweights: from hf/" in said
    device = PLAN.job.cluster.device
    bare = replace(PLAN.job.cluster, device=replace(device, peak_flops={"bfloat16": 1.0}))
    assert "; MFU n/a, cpu has no peak for float32" in training.opening(
        replace(PLAN, job=replace(PLAN.job, cluster=bare))
    )


@pytest.mark.parametrize("name", ["train", "export", "plan"])
def test_help_loads_neither_torch_nor_numpy(name: str) -> None:
    code = f"""
import sys
from shardwise.cli import app
try:
    app(["{name}", "--help"])
except SystemExit as ended:
    assert not ended.code
print(sorted({{n.partition(".")[0] for n in sys.modules}} & {{"torch", "safetensors", "transformers"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
