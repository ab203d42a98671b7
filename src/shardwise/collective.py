"""Collective, Ledger and the label stack: the words in which communication is predicted and recorded.

Prediction (`account/comm.py`) and recording (`prove/record.py`) both speak of `Collective`s and share nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    SEND = "send"
    RECV = "recv"


class Phase(StrEnum):
    """What a rank is doing: an action of the schedule, or one of the executor's own."""

    F = "F"
    B = "B"
    W = "W"
    RECOMPUTE = "recompute"
    UNSHARD = "unshard"
    REDUCE = "reduce"
    TIE = "tie"
    """the two copies of a tied weight sum their gradients"""
    SEND = "send"
    RECV = "recv"
    COUNT = "count"
    """valid tokens of the step"""
    REPORT = "report"
    """the loss, for every rank to print"""
    NORM = "norm"
    """the clip norm"""
    GATHER = "gather"
    """parameters after the optimizer's step"""


class Key(NamedTuple):
    """Where a collective comes from: `layers.3.attention.out / B / tp`."""

    module: str
    phase: str
    axis: str

    def __str__(self) -> str:
        return " / ".join(self)


class Collective(NamedTuple):
    """One logical collective as one rank sees it.

    `payload_bytes` is the whole tensor, padding included: the output of an all-gather, the input of a reduce-scatter
    or an all-to-all, the tensor of an all-reduce or of a point-to-point. `ranks` are global; of a point-to-point
    they are (from, to).
    """

    key: Key
    kind: Kind
    ranks: tuple[int, ...]
    payload_bytes: int
    dtype: str


Ledger = Counter[Collective]
"""Collective -> how often one rank issues it in one step. `predicted - recorded` and its mirror are the proof."""


@dataclass(slots=True)
class Labels:
    """The neutral label stack of one rank: which module and action is running. It declares no quantity."""

    module: str = ""
    phase: str = ""
    axis: str = ""

    @contextmanager
    def at(self, module: str | None = None, phase: str | None = None, axis: str | None = None) -> Generator[None]:
        """Set the given parts for the duration of the block."""
        before = self.module, self.phase, self.axis
        self.module = before[0] if module is None else module
        self.phase = before[1] if phase is None else phase
        self.axis = before[2] if axis is None else axis
        try:
            yield
        finally:
            self.module, self.phase, self.axis = before

    @property
    def key(self) -> Key:
        return Key(self.module, self.phase, self.axis)


def axis_label(axes: tuple[str, ...]) -> str:
    """`("pp", "tp")` -> `pp+tp`, the axis part of a key."""
    return "+".join(axes)
