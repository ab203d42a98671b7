"""docs/users.md: every question's command runs, and prints the sentence that answers it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from shardwise.cli import app

ROOT = Path(__file__).parents[2]

NUMBER = re.compile(r"[0-9][0-9.,]*")
CODE = re.compile(r"`([^`]+)`")


class Question(NamedTuple):
    """One row of the table: the words of a command, and what it must print, figures apart."""

    number: str
    words: tuple[str, ...]
    said: tuple[str, ...]


def questions() -> list[Question]:
    found: list[Question] = []
    for line in (ROOT / "docs" / "users.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].isdigit():
            _, *words = shlex.split(cells[3].strip("`"))
            said = [code for code in CODE.findall(cells[4]) if not code.startswith(("shardwise ", "--", "plan", "sp="))]
            found.append(Question(cells[0], tuple(words), tuple(said)))
    return found


def pattern(said: str) -> str:
    """The sentence with any figures; a unit may change with its figure, a layout may have another degree."""
    escaped = NUMBER.sub("\0", said)
    text = re.escape(escaped).replace("\0", NUMBER.pattern)
    return re.sub(r"\\ (?:m?s|[KMG]iB)\b", r" (?:µs|ms|s|[KMG]iB)", text)


def test_the_questions_are_read() -> None:
    found = questions()
    assert len(found) >= 25
    assert all(one.said for one in found)
    kinds = (ROOT / "docs" / "users.md").read_text(encoding="utf-8")
    assert all(f"| {kind} |" in kinds for kind in "FWES")


@pytest.mark.slow
@pytest.mark.parametrize("asked", [q for q in questions() if q.words[0] != "prove"], ids=lambda q: q.number)
def test_the_command_prints_the_answer(asked: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, list(asked.words), env={"COLUMNS": "120"})
    assert result.exit_code in (0, 2, 3), result.output
    printed = " ".join(result.output.split())
    for said in asked.said:
        assert re.search(pattern(said), printed), f"{said!r} is not in: {printed[:2000]}"
