"""Worked examples of the literature, with their sources: `data/worked-examples.csv`. What is not computed, and why.

Every row is held by a test that names it, or stands in NOT_COMPUTED; `test_worked_examples.py` sees to it.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path
from typing import Final

_FILE: Final = Path(__file__).parent / "data" / "worked-examples.csv"


@cache
def rows() -> dict[str, dict[str, str]]:
    """By id."""
    with open(_FILE, encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def published(row: str) -> float:
    """The printed number; where only a formula was printed, what it gives."""
    text = rows()[row]["published"].replace(",", "")
    found = re.match(r"~?(-?[0-9.]+(?:e[0-9]+)?)", text)
    return float(found[1] if found else rows()[row]["recomputed"])


def digit(row: str) -> float:
    """One unit of the last printed digit."""
    decimals = rows()[row]["published"].partition(".")[2]
    return 10.0 ** -len(re.match("[0-9]*", decimals)[0])  # type: ignore[index]


_OFFLOAD = "the state stays on the device: offloading to the host is not planned"
_SCRIPT = "a convention of that script (its own activations, fp32 gradients that tensor parallelism does not cut)"
_QUOTIENT = "a quotient or sum of two published measurements: nothing of ours enters"

NOT_COMPUTED: Final = {
    "W071": "a rough count of 12 h values a token and layer, which no software keeps",
    "W086": _QUOTIENT,
    "W089": _QUOTIENT,
    "W092": _QUOTIENT,
    "W142": _QUOTIENT,
    "W143": _QUOTIENT,
    "W194": "the source's own total, in which it counts a fourth checkpoint a layer",
    **dict.fromkeys(("W221", "W222", "W224", "W225", "W226"), _OFFLOAD),
    **dict.fromkeys(("W231", "W232", "W233", "W234", "W235", "W236", "W240", "W242", "W243", "W244"), _SCRIPT),
    **dict.fromkeys(("W245", "W246", "W247", "W248", "W250", "W251"), _SCRIPT),
    "W253": _SCRIPT,
    **dict.fromkeys(("W257", "W265"), "18 + 4 f/h bytes is GELU's layer: with SwiGLU that report is not what is kept"),
    **dict.fromkeys(("W159", "W164", "W165"), "V-Min and V-Half are not built"),
    "W281": "no collective of ours passes whole tensors round the ring",
    **dict.fromkeys(("W287", "W288"), "the best split of a pod, as a closed form of large N: rooflines find it"),
}
"""Id -> why no test computes it."""
