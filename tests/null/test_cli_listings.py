"""The listings: everything that is known is in them, one in detail, both forms, at both widths."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from shardwise import schedule as schedules
from shardwise.cli import app
from shardwise.cluster.survey import known_parts
from shardwise.model.hf import catalog
from shardwise.plan.rules import RULES
from shardwise.plan.runs import RUNS

PAGES = (
    *(
        ("models",),
        ("models", "llama-3.1-8b"),
        ("models", "deepseek-v3", "--seq", "4K"),
        ("models", "gpt:L=2,h=64,a=4"),
    ),
    *(
        ("clusters",),
        ("clusters", "h100"),
        ("clusters", "v5p"),
        ("clusters", "4x72xgb200"),
        ("clusters", "8xC=1e14,W=1e11,M=8e10"),
    ),
    *(
        ("schedules",),
        ("schedules", "zb-v"),
        ("schedules", "interleaved:3", "--pp", "2", "--micro-batches", "4"),
        ("rules",),
    ),
)


def run(*words: str, width: int = 80) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": str(width)})


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_listings_fit_their_width_and_lose_nothing(words: tuple[str, ...], width: int) -> None:
    result = run(*words, width=width)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= width
    assert "…" not in result.stdout


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_listings_are_json_too(words: tuple[str, ...]) -> None:
    assert json.loads(run(*words, "--json").stdout)


@pytest.mark.parametrize(
    ("verb", "names"),
    [
        ("models", catalog()),
        ("clusters", [part.name for part in known_parts()]),
        ("schedules", list(schedules.NAMES)),
        ("rules", [rule.id for rule in (*RULES, *RUNS)]),
    ],
)
def test_everything_known_is_listed(verb: str, names: list[str]) -> None:
    printed, data = run(verb).stdout, run(verb, "--json").stdout
    for name in names:
        assert name in printed
        assert f'"{name}"' in data


def test_a_model_in_detail_is_the_published_one() -> None:
    """Llama 3.1 8B: 8,030,261,248 parameters (transformers' own count)."""
    found = json.loads(run("models", "llama-3.1-8b", "--json").stdout)
    assert found["parameters"] == 8_030_261_248
    assert found["config"]["num_hidden_layers"] == 32
    together = sum(kind["units"] * kind["parameters"] for kind in found["kinds"].values())
    assert together == found["parameters"]


def test_the_bubble_of_1f1b_is_the_papers() -> None:
    """(p - 1) / (m + p - 1) of the step, Narayanan et al. 2104.04473, section 2.2.1; p - r in flight on rank r."""
    found = json.loads(run("schedules", "1f1b", "--pp", "4", "--micro-batches", "8", "--json").stdout)
    assert found["bubble_share"] == pytest.approx(3 / 11)
    assert found["in_flight"] == [4, 3, 2, 1]


def test_a_schedule_as_torch_reads_it() -> None:
    text = run("schedules", "zb-v", "--pp", "4", "--micro-batches", "8", "--csv").stdout
    read = schedules.load(text, 4)
    assert read.rows == schedules.build("zb-v", 4, 8).rows


def test_a_whiteboard_model_says_only_what_it_has() -> None:
    done = CliRunner().invoke(app, ["models", "mlp:D=64,F=128,L=2"])
    assert done.exit_code == 0
    assert "hidden 64; feed-forward 128" in done.stdout
    assert "heads" not in done.stdout.split("\n\n")[0]
    assert "vocabulary" not in done.stdout.split("\n\n")[0]
