"""The lowering pass: actions on stages become instructions on units, with unshard, reshard and reduce placed.

The unit list is a value that the caller passes in. ZeRO-3 gathers one unit ahead of the unit that runs, across the
borders of actions too, and drops a unit's parameters after each use, unless the next instruction uses them again.
A gradient is reduced when it is there: those that stay whole once, behind the last backward of their bucket's units,
those that are cut behind each. The two ranks that hold one stage may end its gradients at different places of their
rows, so the sums between them come last, in the order of the stages on both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shardwise.schedule.table import Action, Batch, Op, Row


class Do(StrEnum):
    """What the executor does for a storage; the compute instructions are the `Op`s themselves."""

    UNSHARD = "unshard"
    """start the gather"""
    READY = "ready"
    """finish the gather: the parameters may be used"""
    RESHARD = "reshard"
    OPEN = "open"
    """a gradient buffer for one micro-batch"""
    REDUCE = "reduce"
    """sum the gradient over the shards' axis; with `final`, over every other axis of the mesh as well"""
    TWIN = "twin"
    """sum the gradients of the two copies of a stage"""
    TIE = "tie"
    """sum the gradients of the copies of a tied weight"""


class Instruction(NamedTuple):
    """`unit` names the unit of a compute instruction, the bucket of `REDUCE` and `TWIN`, the storage of another one."""

    do: Op | Do
    unit: str
    stage: int = -1
    micro_batch: int = -1
    final: bool = False
    first: bool = False
    """the first unit that the action runs: it takes what arrived for the stage"""
    last: bool = False
    """the last unit that the action runs: it makes what leaves the stage"""


Lowered = tuple[Instruction | Batch, ...]


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the pass must know of a rank: units of each of its stages, storages that each unit uses, the ZeRO kind.

    `resharded`: parameters are gathered before use (ZeRO-3). `scattered`: gradients are reduced each micro-batch
    (ZeRO-2 and 3); otherwise a bucket is reduced once, after its last gradient. `buckets`: the bucket of each storage
    that shares one. `forward_only`: units whose backward reads no parameters. `twins`: buckets of stages that another
    rank holds too, in the order of the stages; `tied`: storages with copies of one of their weights elsewhere.
    """

    units: Mapping[int, Sequence[str]]
    uses: Mapping[str, Sequence[str]]
    resharded: bool
    scattered: bool
    buckets: Mapping[str, str] = field(default_factory=dict[str, str])
    forward_only: Collection[str] = ()
    twins: Sequence[str] = ()
    tied: Sequence[str] = ()

    def reduced(self, unit: str) -> list[str]:
        """The buckets that a unit's gradients lie in."""
        return list(dict.fromkeys(self.buckets.get(s, s) for s in self.uses[unit]))


def lower(row: Row, holdings: Holdings) -> Lowered:
    """The row as instructions on units."""
    flat: list[Instruction | Batch] = []
    for step in row:
        if isinstance(step, Action):
            flat += _expand(step, holdings)
        else:
            flat.append(step)
    work = [x for x in flat if isinstance(x, Instruction)]
    state = _Placing(holdings, work, [_needs(x, holdings) for x in work])
    for step in flat:
        if isinstance(step, Instruction):
            state.compute(step)
        else:
            state.out.append(step)
    last = [(Do.TWIN, holdings.twins), (Do.TIE, holdings.tied)]
    return (*state.out, *(Instruction(do, s) for do, storages in last for s in storages))


class _Placing:
    """Walks the compute instructions and places the others around them."""

    def __init__(self, holdings: Holdings, work: Sequence[Instruction], needs: Sequence[tuple[str, ...]]) -> None:
        self.holdings, self.needs = holdings, needs
        self.out: list[Instruction | Batch] = []
        self.resident: set[str] = set()
        self.started: set[str] = set()
        self.index = 0
        gradients = [(i, x) for i, x in enumerate(work) if x.do in (Op.W, Op.BW)]
        self.last_gradient = {bucket: i for i, x in gradients for bucket in holdings.reduced(x.unit)}

    def compute(self, step: Instruction) -> None:
        """One instruction: its parameters ready, the next ones under way, its gradients reduced."""
        needed = self.needs[self.index]
        following = self.needs[self.index + 1] if self.index + 1 < len(self.needs) else ()
        self._gather(needed, following)
        opened, reduces = self._gradients(step)
        self.out += [*opened, step, *reduces]
        dropped = [s for s in needed if s not in following]
        self.out += [Instruction(Do.RESHARD, s) for s in dropped]
        self.resident -= set(dropped)
        self.index += 1

    def _gather(self, needed: Sequence[str], following: Sequence[str]) -> None:
        absent = [s for s in needed if s not in self.resident]
        self.out += [Instruction(Do.UNSHARD, s) for s in absent if s not in self.started]
        self.out += [Instruction(Do.READY, s) for s in absent]
        self.resident |= set(needed)
        ahead = [s for s in following if s not in self.resident]
        self.out += [Instruction(Do.UNSHARD, s) for s in ahead]
        self.started = set(ahead)

    def _gradients(self, step: Instruction) -> tuple[list[Instruction], list[Instruction]]:
        """(buffers to open before the instruction, reductions that it makes due)."""
        if step.do not in (Op.W, Op.BW):
            return [], []
        scattered = self.holdings.scattered
        final = {b: self.last_gradient[b] == self.index for b in self.holdings.reduced(step.unit)}
        opened = [Instruction(Do.OPEN, s) for s in self.holdings.uses[step.unit]] if scattered else []
        return opened, [Instruction(Do.REDUCE, b, final=final[b]) for b in final if scattered or final[b]]


def _expand(action: Action, holdings: Holdings) -> list[Instruction]:
    """F runs the stage's units forwards, B and W backwards."""
    units = list(holdings.units[action.stage])
    if action.op is not Op.F:
        units.reverse()
    end = len(units) - 1
    return [
        Instruction(action.op, unit, action.stage, action.micro_batch, first=i == 0, last=i == end)
        for i, unit in enumerate(units)
    ]


def _needs(step: Instruction, holdings: Holdings) -> tuple[str, ...]:
    """Storages whose parameters must be whole: products and norms read them in F and B, no weight gradient does."""
    reads = step.do is Op.F or (step.do is not Op.W and step.unit not in holdings.forward_only)
    return tuple(holdings.uses[step.unit]) if holdings.resharded and reads else ()
