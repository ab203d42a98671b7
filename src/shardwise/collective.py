"""Collective, Ledger and the label stack: the words in which communication is predicted and recorded.

Prediction (`account/comm.py`) and recording (`prove/record.py`) both speak of `Collective`s and share nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
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
    READY = "ready"
    RESHARD = "reshard"
    OPEN = "open"
    REDUCE = "reduce"
    TWIN = "twin"
    TIE = "tie"
    """the two copies of a tied weight sum their gradients"""
    SEND = "send"
    RECV = "recv"
    ARRIVE = "arrive"
    """wait for what another rank sends"""
    SETTLE = "settle"
    """wait until what was sent may be let go"""
    DATA = "data"
    """tokens of the step"""
    COUNT = "count"
    """valid tokens of the step"""
    REPORT = "report"
    """the loss, for every rank to print"""
    NORM = "norm"
    """the clip norm"""
    UPDATE = "optimizer step"
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


Watch = Callable[["Labels"], AbstractContextManager[object]]


@dataclass(slots=True)
class Labels:
    """The neutral label stack of one rank: which module and action is running. It declares no quantity.

    `micro_batch` and `peer` (the global rank that a message goes to or comes from) are -1 where there is none; they are
    part of no key. `watch`, where there is one, is entered for every block that changes a label.
    """

    module: str = ""
    phase: str = ""
    axis: str = ""
    micro_batch: int = -1
    peer: int = -1
    watch: Watch | None = field(default=None, compare=False)

    @contextmanager
    def at(
        self,
        module: str | None = None,
        phase: str | None = None,
        axis: str | None = None,
        micro_batch: int | None = None,
        peer: int | None = None,
    ) -> Generator[None]:
        """Set the given parts for the duration of the block."""
        before = self.parts
        self.module = before[0] if module is None else module
        self.phase = before[1] if phase is None else phase
        self.axis = before[2] if axis is None else axis
        self.micro_batch = before[3] if micro_batch is None else micro_batch
        self.peer = before[4] if peer is None else peer
        try:
            if self.watch is None or self.parts == before:
                yield
            else:
                with self.watch(self):
                    yield
        finally:
            self.module, self.phase, self.axis, self.micro_batch, self.peer = before

    @property
    def parts(self) -> tuple[str, str, str, int, int]:
        return self.module, self.phase, self.axis, self.micro_batch, self.peer

    @property
    def key(self) -> Key:
        return Key(self.module, self.phase, self.axis)


def axis_label(axes: tuple[str, ...]) -> str:
    """`("pp", "tp")` -> `pp+tp`, the axis part of a key."""
    return "+".join(axes)
