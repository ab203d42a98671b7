"""Table 1, the schedule: which rank runs which action on which stage and micro-batch, in which order.

A generator is a pure function that returns a `Schedule` of compute actions alone. The passes add communication, the
lowering expands actions to units. The simulator gives the rows times, the executor gives them tensors, the memory
model walks their live set, the drawing paints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


class Op(StrEnum):
    """F forward; B input gradient; W weight gradient; BW both gradients in one action."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"

    __hash__ = str.__hash__  # that of Enum is Python code, and every message is looked up by its op


Placement = tuple[tuple[int, ...], ...]
"""[copy][stage] -> the rank (0 .. pp-1) that holds the stage."""


def in_turn(pp: int, virtual: int = 1) -> Placement:
    """One copy, whose stage s lies on rank s % pp."""
    return (tuple(stage % pp for stage in range(pp * virtual)),)


class Action(NamedTuple):
    op: Op
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Where the stages lie; `rows[rank]` has the actions of a rank in order.

    `copy` is 0 but in schedules that hold the weights twice (dualpipe). `overlaps`: an F and the BW that follows it are
    run as one where `pairs` says so.
    """

    name: str
    placement: Placement
    rows: tuple[tuple[Action, ...], ...]
    micro_batches: int
    overlaps: bool = False

    @property
    def stages(self) -> int:
        return len(self.placement[0])

    @property
    def pp(self) -> int:
        return len(self.rows)

    @property
    def copies(self) -> int:
        """How often the weights are held."""
        return len(self.placement)

    def copy_of(self, micro_batch: int) -> int:
        """The copy of the weights that a micro-batch passes through, on its way down and up: they take turns."""
        return micro_batch % len(self.placement)

    def rank_of(self, stage: int, copy: int = 0) -> int:
        return self.placement[copy][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that `rank` holds, its chunks: by copy, and ascending in each."""
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


def pairs(row: Sequence[Step]) -> dict[Action, Action]:
    """The F and the BW after it that an overlapping schedule runs as one, so that the compute of each hides the
    all-to-all of the other (DeepSeek-V3, 2412.19437, section 3.2.1).

    They are neighbours and of two micro-batches, so that neither waits for the other. The first gradient of a row has
    no partner: the other ranks wait for it.
    """
    actions = [step for step in row if isinstance(step, Action)]
    first = next((i for i, action in enumerate(actions) if action.op is not Op.F), 0)
    return {
        forward: backward
        for forward, backward in pairwise(actions[first:])
        if forward.op is Op.F and backward.op is Op.BW and forward.micro_batch != backward.micro_batch
    }
