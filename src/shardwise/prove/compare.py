"""Proof: predicted against recorded, collective by collective and byte by byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.collective import Collective, Ledger

MEMORY_TOLERANCE = 0.01
"""Predicted and measured peak may differ by this share of the measured."""


class Difference(NamedTuple):
    """One line of a disagreement: where, and what was predicted and recorded there."""

    module: str
    phase: str
    axis: str
    predicted: str
    recorded: str


@dataclass(frozen=True, slots=True)
class Proof:
    """What the dry run of one rank showed. `executed` of `micro_batches` ran; the rest continue by the period."""

    rank: int
    predicted: Ledger
    recorded: Ledger
    predicted_peak_bytes: int
    measured_peak_bytes: int
    peak_at: str
    executed: int
    micro_batches: int
    seconds: float
    max_rss_bytes: int

    @property
    def missing(self) -> Ledger:
        """Predicted and not recorded."""
        return self.predicted - self.recorded

    @property
    def extra(self) -> Ledger:
        """Recorded and not predicted."""
        return self.recorded - self.predicted

    @property
    def collectives(self) -> int:
        """How many collectives the rank issues in one step."""
        return sum(self.recorded.values())

    @property
    def memory_error(self) -> float:
        """(predicted - measured) / measured peak."""
        return (self.predicted_peak_bytes - self.measured_peak_bytes) / self.measured_peak_bytes

    @property
    def ok(self) -> bool:
        return not self.missing and not self.extra and abs(self.memory_error) <= MEMORY_TOLERANCE

    def differences(self) -> list[Difference]:
        """Every key at which the ledgers disagree, in the order of modules."""
        keys = sorted({c.key for c in (*self.missing, *self.extra)})
        return [Difference(*k, _said(self.predicted, k), _said(self.recorded, k)) for k in keys]


def _said(ledger: Ledger, key: tuple[str, str, str]) -> str:
    """All collectives of one key as text."""
    found = sorted((c, n) for c, n in ledger.items() if c.key == key)
    return "; ".join(f"{n} x {_text(c)}" for c, n in found) or "nothing"


def _text(c: Collective) -> str:
    ranks = ",".join(map(str, c.ranks)) if len(c.ranks) <= 4 else f"{c.ranks[0]}..{c.ranks[-1]} ({len(c.ranks)})"
    return f"{c.kind} of {c.payload_bytes:,} bytes {c.dtype} over ranks {ranks}"
