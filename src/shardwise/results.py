"""What is found out about a layout: memory by part, time by cause, findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PARAMETERS: Final = "parameters"
GRADIENTS: Final = "gradients"
OPTIMIZER: Final = "optimizer"
TABLES: Final = "tokens and tables"
GATHERED: Final = "gathered parameters"
ACTIVATIONS: Final = "activations"
BUFFERS: Final = "pipeline buffers"
"""The parts of memory that are proved: of an account, and of a profile of what a run held."""


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Memory of one pipeline rank at its peak: named parts in bytes, and the action at which they peak.

    `proved` parts are tensor bytes and are compared with a dry run; `assumed` parts (context, communicators,
    allocator margin) are counted for fit and never compared.
    """

    rank: int
    action: str
    proved: dict[str, int]
    assumed: dict[str, int]

    @property
    def proved_bytes(self) -> int:
        return sum(self.proved.values())

    @property
    def total_bytes(self) -> int:
        return self.proved_bytes + sum(self.assumed.values())


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step by cause, read along the busiest rank's timeline: the parts sum to `total_s`."""

    parts_s: dict[str, float]
    tokens: int
    devices: int
    model_flops: float
    peak_flops_per_s: float
    micro_batches: int
    walked: int
    """micro-batches walked action by action; the others continue by the period (0: closed form)"""

    @property
    def total_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens / self.total_s / self.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs (causal attention counted exactly, no recompute) over time and data-sheet peak."""
        return self.model_flops / (self.total_s * self.devices * self.peak_flops_per_s)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that a layout breaks: its id, what is wrong with the numbers, the smallest change that mends it."""

    rule: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message} ({self.rule}); {self.fix}"
