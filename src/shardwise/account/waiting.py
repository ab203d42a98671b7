"""How much waits on a rank while an action runs: the live states of a schedule, as far as memory can tell them apart.

Chunks that hold the same units are counted together, and neighbouring actions matter only by the units that they begin
or end with. Of states that are equal then, those are kept that no other one exceeds in everything.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise import schedule as schedules
from shardwise.account.static import SAME, Held
from shardwise.model.spec import Model
from shardwise.schedule.table import Op

Profile = tuple[str, ...]
"""A stage as the kinds of its units; stages with equal profiles have equal memory."""

Ints = npt.NDArray[np.int32]

OPS = tuple(Op)


class Running(NamedTuple):
    """An action by what it does to memory: `before` and `after` are the kinds of the units just before and after it on
    this rank, None where one reads no parameters, SAME where it is the unit that runs."""

    op: Op
    profile: Profile
    before: str | None
    after: str | None


class Waiting(NamedTuple):
    """A state: the micro-batches of each profile in flight and queued, and the buffers of messages."""

    running: Running
    in_flight: tuple[tuple[Profile, int], ...]
    queued: tuple[tuple[Profile, int], ...]
    buffers: int


def reads(model: Model, op: Op, kind: str) -> bool:
    """Whether an action reads the parameters of a unit of this kind; W never does."""
    return op is Op.F or (op is not Op.W and model.block(kind).backward_reads)


Act = tuple[Op, int]
"""(op, chunk)"""


def running(model: Model, held: Held, act: Act, preceding: Act | None, following: Act | None) -> Running:
    """An action between its neighbours on a rank that holds these stages."""
    op, chunk = act
    profile = held[chunk]
    first, last = (0, len(profile) - 1) if op is Op.F else (len(profile) - 1, 0)

    def end(neighbour: Act | None, end: int, ours: int) -> str | None:
        """The kind of the first (0) or last (1) unit of a neighbouring action."""
        if neighbour is None:
            return None
        units = held[neighbour[1]]
        position = (len(units) - 1) * (end == (neighbour[0] is Op.F))
        if not reads(model, neighbour[0], units[position]):
            return None
        # Where the unit reads no parameters it holds none that a neighbour could go on using.
        same = (neighbour[1], position) == (chunk, ours) and reads(model, op, profile[ours])
        return SAME if same else units[position]

    return Running(op, profile, end(preceding, 1, first), end(following, 0, last))


@lru_cache(maxsize=4096)
def waiting(
    model: Model, name: str, pp: int, micro_batches: int, ranks: tuple[Held, ...]
) -> dict[Held, tuple[Waiting, ...]]:
    """The states of every class of ranks that hold equal stages."""
    members: dict[Held, list[int]] = {}
    for rank, mine in enumerate(ranks):
        members.setdefault(mine, []).append(rank)
    states = schedules.rank_states(name, pp, micro_batches)
    return {
        held: _largest(model, held, _unique(np.concatenate([states[r] for r in those])))
        for held, those in members.items()
    }


def _unique(rows: Ints) -> Ints:
    """Distinct rows [n, c]; a set of bytes finds them faster than sorting all."""
    rows = np.ascontiguousarray(rows, dtype=np.int32)
    raw = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel().tolist()
    return np.frombuffer(b"".join(dict.fromkeys(raw)), dtype=np.int32).reshape(-1, rows.shape[1])


def _largest(model: Model, held: Held, states: Ints) -> tuple[Waiting, ...]:
    chunks = len(held)
    profiles = list(dict.fromkeys(held))
    place = np.asarray([profiles.index(profile) for profile in held])
    together = place[:, None] == np.arange(len(profiles))  # [chunk, profile]
    counts = states[:, 4:]
    in_flight, queued = counts[:, :chunks] @ together, counts[:, chunks : 2 * chunks] @ together
    numbers = np.concatenate([in_flight, queued, counts[:, 2 * chunks :].sum(axis=1, keepdims=True)], axis=1)

    def act(code: int) -> Act | None:
        return None if code < 0 else (OPS[code // chunks], code % chunks)

    acting: dict[Running, list[Ints]] = {}
    # One number for each key: sorting rows takes longer.
    base = len(OPS) * chunks + 1
    codes = np.ravel_multi_index(tuple((states[:, :4] + 1).T), (base, base, base, base))
    _, one_of, place_of = np.unique(codes, return_index=True, return_inverse=True)
    rows: list[list[int]] = states[one_of, :4].tolist()
    for i, (op, chunk, following, preceding) in enumerate(rows):
        key = running(model, held, (OPS[op], chunk), act(preceding), act(following))
        acting.setdefault(key, []).append(numbers[place_of == i])
    found: list[Waiting] = []
    for key, parts in acting.items():
        for row in _maximal(_unique(np.concatenate(parts))).tolist():
            n = len(profiles)
            flying = tuple((p, k) for p, k in zip(profiles, row[:n], strict=True) if k)
            put_off = tuple((p, k) for p, k in zip(profiles, row[n : 2 * n], strict=True) if k)
            found.append(Waiting(key, flying, put_off, row[-1]))
    return tuple(found)


def _maximal(rows: Ints) -> Ints:
    """The rows that no other row reaches or exceeds in every column."""
    order = np.argsort(-rows.sum(axis=1), kind="stable")
    rows, kept = rows[order], list[Ints]()
    while len(rows):
        # A row can only be exceeded by one with a larger sum: the first of those left is one to keep.
        kept.append(rows[0])
        rows = rows[~(rows <= rows[0]).all(axis=1)]
    return np.asarray(kept)
