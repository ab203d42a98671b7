"""The table of the score: rows apart at both widths, nothing lost, blanks where nothing was measured."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from shardwise.view import scores


def source(name: str, device: str, precision: str, **figures: float | None) -> SimpleNamespace:
    empty = dict.fromkeys(("median_abs_error", "mean_abs_error", "bias", "memory_median_abs_error", "kendall"))
    counts = {"rows": 7, "memory_rows": 0, "out_of_memory": 2, "false_fits": 1, "false_ooms": 3}
    rest = {"stack": "megatron", "rival_median_abs_error": None, **empty, **counts}
    return SimpleNamespace(**{**rest, "source": name, "device": device, "precision": precision, **figures})


SCORE: Any = SimpleNamespace(
    file="runs.csv",
    sources=[
        source("Megatron-Bridge", "h100-96gb", "bf16-pure", median_abs_error=0.123, bias=-0.5, kendall=-0.25),
        source("Megatron-Bridge", "h100-96gb", "fp8"),
        source("a source with a very long name, of 2021", "ascend-910b", "fp16", memory_median_abs_error=13.76),
    ],
    skipped=[("precision", 123), ("model", 7)],
    total=SimpleNamespace(median=0.1, mean=0.2, bias=-0.05),
    predicted=14,
)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_tells_rows_apart(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(scores.page(SCORE, width))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    said = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    assert "…" not in said
    for words in ("bf16-pure", "fp8", "12.3", "-50.0", "-0.25", "1376.0", "1/2,3", "-5.0", "14 runs of runs.csv"):
        assert words in said
    assert "left out, by reason: 123 precision, 7 model" in said
