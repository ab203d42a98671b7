"""The rules: what a layout must keep to be planned, and what it must keep to be proved and trained here."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from shardwise.plan.rules import RULES, Rule
from shardwise.plan.runs import RUNS
from shardwise.view.tables import plain, section


def page() -> Group:
    """Two tables."""
    return Group(
        Text("A rule's id stands in brackets behind what it finds."),
        section("To be planned, a layout must keep", _table(RULES)),
        section("To be proved and trained here, a plan must keep too (`plan --runnable`)", _table(RUNS)),
    )


def data() -> dict[str, Any]:
    return {"rules": [_one(r) for r in RULES], "runs": [_one(r) for r in RUNS]}


def _one(rule: Rule) -> dict[str, str]:
    return {"id": rule.id, "summary": rule.summary}


def _table(rules: tuple[Rule, ...]) -> Table:
    table = plain()
    table.add_column("rule", no_wrap=True)
    table.add_column("", ratio=1)
    for rule in rules:
        table.add_row(rule.id, rule.summary)
    return table
