"""Table 1, the schedule: which rank runs which action on which stage and micro-batch, in which order.

A generator is a pure function that returns a `Schedule` of compute actions alone. The passes add communication, the
lowering expands actions to units. The simulator gives the rows times, the executor gives them tensors, the memory
model walks their live set, the drawing paints them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """F forward; B input gradient; W weight gradient; BW both gradients in one action."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


class Action(NamedTuple):
    op: Op
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """`placement[copy][stage]` is the rank (0 .. pp-1) that holds the stage; `rows[rank]` its actions in order.

    `copy` is 0 but in schedules that hold the weights twice.
    """

    name: str
    placement: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[Action, ...], ...]
    micro_batches: int

    @property
    def stages(self) -> int:
        return len(self.placement[0])

    @property
    def pp(self) -> int:
        return len(self.rows)

    def rank_of(self, stage: int, copy: int = 0) -> int:
        return self.placement[copy][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that `rank` holds, ascending: its virtual stages (chunks)."""
        return tuple(s for copy in self.placement for s, r in enumerate(copy) if r == rank)


class P2P(NamedTuple):
    """One point-to-point operation of a rank. `tensor` is F (activation) or B (its gradient); `stage` is the stage
    *on this rank* that produces (SEND) or consumes (RECV) it; `peer` is the other pipeline rank (0 .. pp-1).
    """

    send: bool
    tensor: Op
    stage: int
    micro_batch: int
    peer: int

    @property
    def message(self) -> tuple[Op, int, int]:
        """(tensor, producing stage, micro-batch): equal on both ends."""
        shift = 0 if self.send else (-1 if self.tensor is Op.F else 1)
        return self.tensor, self.stage + shift, self.micro_batch


Batch = tuple[P2P, ...]
"""Operations posted together: they progress independently of one another."""

Step = Action | Batch
"""One entry of a row after the point-to-point pass."""

Row = tuple[Step, ...]
