"""docs/known-failures.md: every row names its report, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|")
REPORT = re.compile(r"[\w.-]+/[\w.-]+ #\d+")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)(?:\[([^]]+)])?`")
WAITS = ("yet", "refused", "planned only")
"""What a row says that waits for something that the runtime does not do."""

ROWS = [
    found.groups()
    for found in map(ROW.fullmatch, (TESTS.parent / "docs/known-failures.md").read_text().splitlines())
    if found
]


@lru_cache
def tree(path: str) -> ast.Module:
    return ast.parse((TESTS / path).read_text())


def functions(path: str) -> set[str]:
    return {node.name for node in tree(path).body if isinstance(node, ast.FunctionDef)}


def strings(path: str) -> list[str]:
    """What may be a parameter's name."""
    return [n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def test_rows_are_numbered_from_one() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) > 50


@pytest.mark.parametrize(("number", "report", "wrong", "here"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_its_report_and_tests_that_exist(number: str, report: str, wrong: str, here: str) -> None:
    assert REPORT.search(report)
    assert wrong.strip()
    named = NAMED.findall(here)
    assert here.count("::") == len(named), "a test that is spelled in another way"
    assert named or any(word in here for word in WAITS)
    for path, function, parameter in named:
        assert (TESTS / path).is_file(), path
        assert function in functions(path), function
        assert not parameter or any(text.startswith(parameter) for text in strings(path)), parameter


def test_every_named_failure_is_in_a_row() -> None:
    """Parameters of the re-enacted failures that are named by a report, `project number: what`."""
    every = " ".join(report + here for _, report, _, here in ROWS)
    for path in ("dist/test_failures.py", "dist/test_checkpoint.py"):
        for text in strings(path):
            if found := re.match(r"([\w.-]+) (\d+)(?:, finding \d+)?: ", text):
                assert found[1] in every, text
                assert f"#{found[2]}" in every, text
