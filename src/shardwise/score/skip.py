"""Why a published run is not predicted: one of few kinds, with the detail of the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

KINDS: Final[Mapping[str, str]] = {
    "excluded": "no measurement of a training that can be planned: it contradicts itself, or trains adapters alone",
    "source": "a source of which no software stack is known",
    "model": "a model whose dimensions are not printed, or of a family that is not planned",
    "device": "a device that is not in the catalogue",
    "precision": "a precision that is not planned, or not printed",
    "recompute": "a recomputation that is not planned, or not printed",
    "layout": "degrees, micro-batch or schedule that are not printed",
    "rule": "a layout that breaks a rule",
    "measurement": "no step time, no rate, or a rate whose meaning is not known",
}
"""Kind -> what it means."""


class SkipError(Exception):
    """A row that is not predicted."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")
