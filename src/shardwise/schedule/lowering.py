"""The lowering pass: actions on stages become instructions on units, with unshard, reshard and reduce placed.

The unit list is a value that the caller passes in. ZeRO-3 gathers one unit ahead of the unit that runs, across the
borders of actions too, and drops a unit's parameters after each use, unless the next instruction uses them again.
Gradients that stay whole are reduced once, behind the batch that sends the stage's own gradient on: the stages below
wait for that, and nobody waits for the reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """sum the gradient over the shards' axis; with `final`, over every other axis as well"""
    TIE = "tie"
    """sum the gradients of the copies of a tied weight"""


class Instruction(NamedTuple):
    """`unit` names the unit of a compute instruction, or the storage of another one."""

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

    `resharded`: parameters are gathered before use and gradients reduced each micro-batch (ZeRO-3); otherwise a
    storage is reduced once, after its last gradient. `tied`: storages with copies elsewhere.
    """

    units: Mapping[int, Sequence[str]]
    uses: Mapping[str, Sequence[str]]
    resharded: bool
    tied: Sequence[str] = ()


def lower(row: Row, holdings: Holdings) -> Lowered:
    """The row as instructions on units."""
    computes = [step if _is_batch(step) else _expand(step, holdings) for step in row]
    flat: list[Instruction | Batch] = []
    for step in computes:
        if _is_batch(step):
            flat.append(step)
        else:
            flat.extend(step)
    work = [x for x in flat if isinstance(x, Instruction)]
    needs = [_needs(x, holdings) for x in work]
    last_gradient = {s: i for i, x in enumerate(work) if x.do in (Op.W, Op.BW) for s in holdings.uses[x.unit]}
    out: list[Instruction | Batch] = []
    late: list[Instruction] = []
    resident: set[str] = set()
    started: set[str] = set()
    i = 0
    for step in flat:
        if not isinstance(step, Instruction):
            out += [step, *late]
            late = []
            continue
        if step.first:
            out += late
            late = []
        following = needs[i + 1] if i + 1 < len(needs) else ()
        out += [Instruction(Do.UNSHARD, s) for s in needs[i] if s not in resident | started]
        out += [Instruction(Do.READY, s) for s in needs[i] if s not in resident]
        resident |= set(needs[i])
        started = {s for s in following if s not in resident}
        out += [Instruction(Do.UNSHARD, s) for s in following if s in started]
        computed, reduces = _with_gradients(step, i, holdings, last_gradient)
        out += computed
        if holdings.resharded:
            out += reduces
        else:
            late += reduces
        dropped = [s for s in needs[i] if s not in following]
        out += [Instruction(Do.RESHARD, s) for s in dropped]
        resident -= set(dropped)
        i += 1
    out += late
    out += [Instruction(Do.TIE, s) for s in holdings.tied]
    return tuple(out)


def _is_batch(step: object) -> bool:
    return not isinstance(step, (Action, Instruction, list))


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
    return tuple(holdings.uses[step.unit]) if holdings.resharded and step.do is not Op.W else ()


def _with_gradients(
    step: Instruction, i: int, holdings: Holdings, last_gradient: Mapping[str, int]
) -> tuple[list[Instruction], list[Instruction]]:
    """(the instruction behind the opening of its gradient buffers, the reductions that it makes due)."""
    if step.do not in (Op.W, Op.BW):
        return [step], []
    used = holdings.uses[step.unit]
    opened = [Instruction(Do.OPEN, s) for s in used] if holdings.resharded else []
    due = [s for s in used if holdings.resharded or last_gradient[s] == i]
    return [*opened, step], [Instruction(Do.REDUCE, s, step.stage, step.micro_batch, last_gradient[s] == i) for s in due]
