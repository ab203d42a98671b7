"""`plan` and `show` as they are asked: limits, stacks, what runs here, why not, time to a loss; plan files."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner, Result

from shardwise.account.compute import CONVENTIONS, flops_per_token
from shardwise.cli import app
from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model
from shardwise.plan.job import Job
from shardwise.plan.layout import parse
from shardwise.plan.plan import Plan, PlanError, load_plan, parse_plan, to_toml
from shardwise.plan.runs import runs_here
from shardwise.plan.stack import known_stacks, load_stack, under
from tests.support.models import job, tiny

SMALL = ("plan", "llama-3.1-8b", "--on", "8xh100", "--batch", "16", "--seq", "4K")
SHOW = ("show", "llama-3.1-8b", "--on", "8xh100", "--batch", "16", "--seq", "4K")
MINE = "tp=2 dp=4 zero=1 mb=1"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "100"})


def answer(*words: str, code: int = 0) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def layouts(found: dict[str, Any]) -> list[str]:
    return [one["layout"] for one in found["best"]]


# ------------------------------------------------------------------------------------------------------------- limits


def test_pins_and_forbids_hold_in_every_layout() -> None:
    found = [
        parse(text) for text in layouts(answer(*SMALL, "--pin", "tp=2 pp=2", "--forbid", "cp", "--forbid", "zero=3"))
    ]
    assert found
    assert all((one.tp, one.pp, one.cp) == (2, 2, 1) and one.zero != 3 for one in found)


def test_runnable_plans_are_those_that_prove_and_train_take(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    result = run(*SMALL, "--runnable", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert "runs here: yes" in result.stdout
    plan = load_plan(path)
    assert runs_here(plan.layout, plan.job) == []


def test_every_layout_of_a_runnable_ranking_runs_here() -> None:
    """What runs here is part of the search, not a remark on what it found."""
    found = answer("plan", "llama-3.1-70b", "--on", "8x8xh100", "--batch", "64", "--runnable")
    asked = Job(load_model("llama-3.1-70b"), parse_cluster("8x8xh100"), 8192, 64)
    assert layouts(found)
    assert [text for text in layouts(found) if runs_here(parse(text), asked)] == []
    assert run(*SMALL, "--runnable", "--pin", "cp=2").exit_code == 3


@pytest.mark.parametrize("verb", ["prove", "train"])
@pytest.mark.parametrize(
    ("options", "rules"),
    [
        (("--layout", "cp=2 dp=4 zero=1 mb=1"), ("runs-context",)),
        (("--layout", "cp=2 pp=2 dp=2 mb=1 order=dp"), ("runs-context", "runs-order")),
        (("--layout", MINE, "--stack", "megatron"), ("runs-stack",)),
        (("--layout", MINE, "--precision", "fp8"), ("runs-precision",)),
    ],
)
def test_plans_that_are_planned_only_are_refused_with_their_rules(
    verb: str, options: tuple[str, ...], rules: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    shown = run(*SHOW, *options, "-o", str(path))
    assert shown.exit_code == 0, shown.output
    refused = run(verb, str(path))
    assert refused.exit_code == 2, refused.output
    assert "plan ... --runnable" in refused.stderr
    for rule in rules:
        assert f"({rule})" in refused.stderr
        assert f"({rule})" in shown.stdout


def test_all_faults_of_a_plan_are_said_at_once() -> None:
    words = (
        "--stack",
        "x",
        "--pin",
        "tp",
        "--forbid",
        "y",
        "--critical-batch",
        "z",
        "--why-not",
        "q=1",
        "--imbalance",
        "0",
    )
    said = run("plan", "llama-9", "--on", "8xb1", "--seq", "s", *words).stderr
    for option in ("llama-9", "--on", "--seq", "--batch", *words[::2]):
        assert option in said


# -------------------------------------------------------------------------------------------------------- explanation


def test_a_plan_is_explained_against_the_recipe() -> None:
    result = run(*SMALL)
    said = " ".join(result.stdout.split())
    for words in ("Why", "r: the field's recipe", "Rules of thumb", "runs here:"):
        assert words in said
    found = answer(*SMALL)
    for sentence in (
        found["explanation"]["limit"],
        found["explanation"]["batch"],
        found["explanation"]["recipe"]["text"],
    ):
        assert re.sub(r"[0-9.]+", "#", " ".join(sentence.split())) in re.sub(r"[0-9.]+", "#", said.replace(" - ", " "))
    recipe = found["explanation"]["recipe"]
    assert recipe["step_s"] / found["best"][0]["step_s"] - 1 == pytest.approx(recipe["gap"])
    assert found["explanation"]["advice"]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("tp=3 mb=1", "breaks"),
        ("dp=8 mb=2", "does not fit"),
        ("tp=8 mb=1", "longer"),
    ],
)
def test_why_not_answers_for_any_layout(layout: str, said: str) -> None:
    result = run(*SMALL, "--why-not", layout)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.partition("Why not")[2].split())
    assert said in told
    found = answer(*SMALL, "--why-not", layout)["why_not"]
    assert found["layout"] == str(parse(layout))
    assert found["text"]


def test_a_critical_batch_adds_the_time_to_a_loss() -> None:
    """McCandlish et al.: as many tokens as the critical batch take twice the steps of an endless batch."""
    found = answer(*SMALL, "--critical-batch", "64K")
    assert found["tokens"] == 2**16
    assert [one["steps_factor"] for one in found["time_to_loss"]] == [2.0] * len(found["best"])
    assert found["time_to_loss"][0]["relative_s"] == pytest.approx(2 * found["best"][0]["step_s"])
    assert "loss/S_min" in run(*SMALL, "--critical-batch", "64K").stdout


def test_nothing_fits_comes_with_what_does() -> None:
    words = ("plan", "llama-3.1-70b", "--on", "8xh100", "--batch", "8")
    result = run(*words)
    assert result.exit_code == 3
    assert result.stdout.startswith("no: ")
    assert "What fits, each tried" in result.stdout
    ways = answer(*words, code=3)["nothing_fits"]["ways"]
    assert ways
    assert all(way["fits"] for way in ways)


# ------------------------------------------------------------------------------------------------- stacks and levels


def test_every_figure_names_its_stack() -> None:
    for words in ((*SHOW, "--layout", MINE), ("fit", *SHOW[1:], "--layout", MINE)):
        result = run(*words, "--stack", "megatron")
        assert "under megatron (" in result.stdout
        assert "software stack: megatron" in " ".join(result.stdout.split())
        assert answer(*words, "--stack", "megatron")["stack"] == "megatron"


@pytest.mark.parametrize("name", known_stacks())
def test_every_stack_can_be_planned_for(name: str) -> None:
    found = answer(*SMALL, "--stack", name)
    assert found["stack"] == name
    assert {parse(text).zero for text in layouts(found)} <= {0, *load_stack(name).zero}


def test_the_same_layout_under_all_stacks_and_levels() -> None:
    found = answer(*SHOW, "--layout", MINE, "--stacks", "--levels")
    assert {one["stack"] for one in found["stacks"]} == {"shardwise", *known_stacks()}
    own = next(one for one in found["stacks"] if one["stack"] == "shardwise")["found"]
    assert own["peak_bytes"] == found["peak_bytes"]
    assert [one["zero"] for one in found["levels"]] == [0, 1, 2, 3]
    assert next(one for one in found["levels"] if one["zero"] == 1)["total_bytes"] == found["peak_bytes"]
    optimizer = [one["proved_bytes"]["optimizer"] for one in found["levels"]]
    assert optimizer[0] > 3.9 * optimizer[1]


@pytest.mark.parametrize("name", CONVENTIONS)
def test_mfu_by_every_convention(name: str) -> None:
    found = answer(*SHOW, "--layout", MINE, "--mfu", name)
    flops = flops_per_token(load_model("llama-3.1-8b"), 4096, name)
    assert found["mfu_name"] == name
    assert found["flops_per_token"] == flops
    seconds = found["step"]["step_s"]
    assert found["step"]["mfu"] == pytest.approx(flops * 16 * 4096 / (8 * 989e12 * seconds))


def test_parts_of_a_step_and_of_the_flops_sum() -> None:
    found = answer(*SHOW, "--layout", "tp=2 pp=2 dp=2 zero=1 mb=1 recompute=full")
    assert sum(found["step"]["parts_s"].values()) == pytest.approx(found["step"]["step_s"])
    hardware = found["hardware_flops_per_token"]
    assert hardware["recompute"] > 0
    assert hardware["f"] < hardware["recompute"] + hardware["f"] / 3
    assert hardware["f"] + hardware["b"] + hardware["w"] >= found["flops_per_token"]


def test_a_level_without_effect_is_said() -> None:
    result = run("fit", "llama-3.1-8b", "--on", "8xh100", "--layout", "tp=8 zero=3 mb=1")
    assert "zero=3 has no effect" in " ".join(result.stdout.split())


def test_doubtful_figures_of_a_cluster_are_asked_about(tmp_path: Path) -> None:
    from shardwise.cluster import parse_cluster, to_dict

    tables = to_dict(parse_cluster("8xh100"))
    tables["levels"][0]["bandwidth_GBps_per_device"] = 7200.0
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    result = run("fit", "llama-3.1-8b", "--on", str(path))
    assert "warning: levels[0].bandwidth_GBps_per_device is 7,200" in " ".join(result.stdout.split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "words",
    [
        (*SHOW, "--layout", "tp=2 pp=2 dp=2 zero=1 mb=1 recompute=full", "--stacks", "--levels"),
        (*SMALL, "--critical-batch", "1M", "--why-not", "tp=8 mb=1"),
        ("plan", "llama-3.1-405b", "--on", "8xh100", "--batch", "8"),
    ],
    ids=["show", "plan", "nothing fits"],
)
def test_pages_fit_their_width_and_lose_nothing(words: tuple[str, ...], width: int) -> None:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": str(width)})
    assert result.exit_code in (0, 3)
    assert max(map(len, result.stdout.splitlines())) <= width
    assert "…" not in result.stdout


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "words",
    [
        ("gpt2", "--on", "2x8xh100", "--seq", "1024", "--layout", "pp=2 tp=2 dp_replicate=2 dp_shard=2 zero=1 mb=4"),
        ("llama-3.1-405b", "--on", "2048x8xh100", "--layout", "tp=8 pp=16 dp_replicate=64 dp_shard=2 zero=3 mb=1"),
        ("deepseek-v3", "--on", "256x8xh800", "--layout", "pp=16 ep=64 dp=128 zero=1 mb=1 schedule=dualpipe"),
    ],
    ids=lambda words: words[0],
)
def test_no_figure_of_the_ledger_is_cut(words: tuple[str, ...], width: int) -> None:
    """The columns of words give way, those of numbers do not."""
    result = CliRunner().invoke(app, ["show", *words, "--batch", "15360"], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    table = result.stdout.partition("Communication of rank 0 in one step\n")[2].partition("payload: ")[0].splitlines()
    assert max(map(len, table)) <= width
    assert table[0].split()[-4:] == ["ranks", "count", "payload", "alone"]
    rows = [line for line in table[1:] if re.search(r"(reduce|gather|scatter|to-all|send|recv):", line)]
    assert len(rows) > 7
    assert all(re.search(r"[\d,]+ +[\d,]+ +[\d,.]+ ([KMGTP]i)?B +[\d.,]+ (s|ms|µs)$", line.rstrip()) for line in rows)
    assert "…" not in "".join(table)


# --------------------------------------------------------------------------------------------------------- plan files


@pytest.mark.parametrize("name", known_stacks())
def test_a_stack_goes_into_the_file_by_name_or_whole(name: str) -> None:
    stack = load_stack(name)
    for one in (stack, replace(stack, name="mine", efficiency=0.5, allocator_margin=0.2)):
        asked = job(tiny(), "8xh100", precision="bf16")
        asked = replace(asked, model=under(asked.model, one), stack=one, imbalance=1.5)
        plan = Plan(asked, parse("tp=2 dp=4 mb=1"))
        tables = tomllib.loads(to_toml(plan))
        assert isinstance(tables["job"]["stack"], str) == (one is stack)
        assert parse_plan(tables, "plan.toml") == plan


def test_a_file_without_a_stack_is_our_own() -> None:
    tables = tomllib.loads(to_toml(Plan(job(tiny(), "8xh100", precision="bf16"), parse("dp=8 mb=1"))))
    del tables["job"]["stack"]
    found = parse_plan(tables, "plan.toml").job
    assert (found.stack.name, found.imbalance) == ("shardwise", 1.0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("megatorn", "did you mean megatron"),
        ("other.toml", "wanted the name of a known stack, or its table"),
        (7, "wanted the name of a known stack, or a table"),
        ({"efficiency": 70.0}, "job.stack.efficiency: found 70.0"),
        ({"speed": 1}, "job.stack: unknown key 'speed'"),
        ({"name": "a\x1bb"}, "printable characters"),
    ],
)
def test_a_stack_that_is_none_is_refused(value: object, said: str) -> None:
    tables = tomllib.loads(to_toml(Plan(job(tiny(), "8xh100", precision="bf16"), parse("dp=8 mb=1"))))
    tables["job"] |= {"stack": value, "imbalance": "x"}
    with pytest.raises(PlanError) as error:
        parse_plan(tables, "plan.toml")
    faults = "\n".join(error.value.faults)
    assert said in faults
    assert "job.imbalance: found 'x'" in faults
