"""The core answers without torch: `shardwise plan` is done before torch would have loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
NEEDS_TORCH = ("train", "prove")


def modules(*, below: Path) -> list[str]:
    names: list[str] = []
    for path in sorted(below.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if not name.endswith("__main__")]


CORE = [name for name in modules(below=SOURCE / "shardwise") if name.split(".")[1:2] not in [[n] for n in NEEDS_TORCH]]


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter after `statement`."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_there_is_a_core() -> None:
    assert {"shardwise.units", "shardwise.cluster.topology"} <= set(CORE)


def test_the_core_loads_without_torch() -> None:
    heavy = {"torch", "transformers", "pandas", "scipy", "plotly"}
    assert loaded_by("import " + ", ".join(CORE)).isdisjoint(heavy)


@pytest.mark.parametrize("name", ["shardwise", "shardwise.units"])
def test_what_only_needs_the_standard_library_loads_nothing_else(name: str) -> None:
    assert loaded_by(f"import {name}").isdisjoint({"torch", "numpy", "typer", "rich", "cattrs"})
