"""The live profile: in which states of its memory a rank runs its actions, for the memory model to price.

A state is counted while its action runs. What the action itself holds (its activation, the gradient it takes over) is
not in the counts, so that the memory model can price the running action apart from the waiting ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import ge
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.schedule.passes import unit_ends
from shardwise.schedule.registry import capped, copies, generate, saturation, virtual_stages
from shardwise.schedule.table import Op, Schedule

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Ranks = tuple[int, ...]

Neighbour = tuple[Op, int] | None
"""(op, chunk) of a neighbouring action of the rank; None beyond the ends of its row."""


class LiveState(NamedTuple):
    """One rank while `op` of `chunk` runs; chunks are counted on this rank, in the order of `Schedule.stages_of`.

    `in_flight[chunk]` micro-batches have their F behind them and their B or BW before them, `queued[chunk]` their B
    behind and their W before, the running one excluded from both. A SEND buffer lives from its batch to the rank's
    next batch, a RECV buffer from its batch to the start of the action that takes it over. What a stage hands to
    another stage of the same rank counts as received when the action that makes it ends.
    """

    op: Op
    chunk: int
    following: Neighbour
    in_flight: tuple[int, ...]
    queued: tuple[int, ...]
    send_buffers: int
    recv_buffers: int
    preceding: Neighbour = None


def profile(
    name: str, pp: int, micro_batches: int, groups: tuple[Ranks, ...] | None = None
) -> tuple[tuple[LiveState, ...], ...]:
    """`live_states` of a schedule. Beyond `saturation` more micro-batches add no state, so fewer are looked at.

    Where in-flight grows with m (gpipe), every count grows linearly once the pipeline is full: two short profiles
    tell the slope.
    """
    short = pp + 2
    if saturation(name, pp) is not None or micro_batches <= short + 1:
        return _profile(name, pp, capped(name, pp, micro_batches), groups)
    pairs = zip(_profile(name, pp, short, groups), _profile(name, pp, short + 1, groups), strict=True)
    more = micro_batches - short
    return tuple(tuple(_extended(a, b, more) for a, b in zip(x, y, strict=True)) for x, y in pairs)


def _extended(one: LiveState, next_one: LiveState, more: int) -> LiveState:
    """The state `more` micro-batches after `one`, from the one that is one after it."""
    in_flight = tuple(x + more * (y - x) for x, y in zip(one.in_flight, next_one.in_flight, strict=True))
    sends = one.send_buffers + more * (next_one.send_buffers - one.send_buffers)
    receives = one.recv_buffers + more * (next_one.recv_buffers - one.recv_buffers)
    return one._replace(in_flight=in_flight, send_buffers=sends, recv_buffers=receives)


@lru_cache(maxsize=1024)
def _profile(
    name: str, pp: int, micro_batches: int, groups: tuple[Ranks, ...] | None
) -> tuple[tuple[LiveState, ...], ...]:
    return live_states(generate(name, pp, micro_batches), groups)  # the schedule is not kept: the profile is


def live_states(schedule: Schedule, groups: Iterable[Ranks] | None = None) -> tuple[tuple[LiveState, ...], ...]:
    """The distinct states of the ranks of each group that no other state of the group with equal op, chunk and
    neighbours exceeds in every count. Without `groups` each rank is one.
    """
    states = _states(schedule)
    ranks = groups or [(rank,) for rank in range(schedule.pp)]
    return tuple(tuple(_maximal(_distinct(np.concatenate([states[r] for r in group])))) for group in ranks)


@lru_cache(maxsize=4)
def rank_states(name: str, pp: int, micro_batches: int) -> tuple[npt.NDArray[np.int32], ...]:
    """Of each rank [state, 6 + 2 chunks]: every state as numbers, for those that compare them by other rules than
    `profile`'s. Columns: op (its place in Op), chunk, the codes op * chunks + chunk of the actions after and before it
    (-1 for none), in_flight and queued of each chunk, SEND and RECV buffers.
    """
    short = pp + 2
    if saturation(name, pp) is not None or micro_batches <= short + 1:
        return tuple(_states(generate(name, pp, capped(name, pp, micro_batches))))
    chunks = virtual_stages(name) * copies(name)

    def code(neighbour: Neighbour) -> int:
        return -1 if neighbour is None else _NUMBER[neighbour[0]] * chunks + neighbour[1]

    return tuple(
        np.asarray(
            [
                (
                    *(_NUMBER[s.op], s.chunk, code(s.following), code(s.preceding)),
                    *(*s.in_flight, *s.queued, s.send_buffers, s.recv_buffers),
                )
                for s in states
            ],
            dtype=np.int32,
        )
        for states in profile(name, pp, micro_batches)
    )


_OPS = tuple(Op)
_NUMBER = {op: i for i, op in enumerate(_OPS)}
_Key = tuple[int, int, int, int]
"""Number of the op, chunk, and the codes (op * chunks + chunk) of the actions after and before it, -1 for none."""
_Counts = tuple[int, ...]
"""in_flight of each chunk, queued of each chunk, send buffers, RECV buffers."""


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows as arrays [rank, place in the row]; `kind` -1 fills up short rows."""

    kind: Ints
    stage: Ints
    micro_batch: Ints
    forward: Bools
    gradient: Bools
    """B or BW"""

    @property
    def filled(self) -> Bools:
        return self.kind >= 0


def _table(schedule: Schedule) -> _Table:
    lengths = [len(row) for row in schedule.rows]
    kind, stage, micro_batch = (np.full((len(lengths), max(lengths)), -1, dtype=np.int64) for _ in range(3))
    for rank, row in enumerate(schedule.rows):
        ops, stages, micro_batches = zip(*row, strict=True)
        kind[rank, : len(row)] = [_NUMBER[op] for op in ops]
        stage[rank, : len(row)], micro_batch[rank, : len(row)] = stages, micro_batches
    gradient = (kind == _NUMBER[Op.B]) | (kind == _NUMBER[Op.BW])
    return _Table(kind, stage, micro_batch, kind == _NUMBER[Op.F], gradient)


def _states(schedule: Schedule) -> list[npt.NDArray[np.int32]]:
    """[action, key and counts] of every action of each rank, in the order of its row."""
    table, chunks = _table(schedule), schedule.copies * schedule.stages // schedule.pp
    chunk_of = np.zeros((schedule.pp, schedule.stages), dtype=np.int64)
    for rank in range(schedule.pp):
        chunk_of[rank, list(schedule.stages_of(rank))] = np.arange(chunks)
    chunk = np.take_along_axis(chunk_of, table.stage % schedule.stages, axis=1)
    begun, left = _by_chunk(table.forward, chunk, chunks), _by_chunk(table.gradient, chunk, chunks)
    put_off = _by_chunk(table.kind == _NUMBER[Op.B], chunk, chunks)
    made = _by_chunk(table.kind == _NUMBER[Op.W], chunk, chunks)
    code = np.where(table.filled, table.kind * chunks + chunk, -1)
    key = (table.kind, chunk, _shifted(code, -1), _shifted(code, 1))
    # What the action itself holds is left out: its own F is not begun yet, its own B or W is done.
    in_flight, queued = _shifted(begun, 1, 0) - left, _shifted(put_off, 1, 0) - made
    columns = (np.stack(key, axis=-1), in_flight, queued, np.stack(_buffers(schedule, table), axis=-1))
    states = np.concatenate(columns, axis=-1, dtype=np.int32)
    return [states[rank, : len(row)] for rank, row in enumerate(schedule.rows)]


def _by_chunk(these: Bools, chunk: Ints, chunks: int) -> Ints:
    """[rank, action, chunk] how many of `these` actions a rank has had, the running one among them."""
    return np.cumsum(these[..., None] & (chunk[..., None] == np.arange(chunks)), axis=1)


def _shifted(values: Ints, by: int, end: int = -1) -> Ints:
    """Each action's predecessor's value (by=1) or its successor's (by=-1); `end` where it has none."""
    moved = np.roll(values, by, axis=1)
    moved[:, 0 if by > 0 else -1] = end
    return moved


def _buffers(schedule: Schedule, table: _Table) -> tuple[Ints, Ints]:
    """(send, RECV) buffers [rank, action] by the rule of `add_p2p`: a message is sent and its RECV posted when the
    action that makes it ends; both go before the first action that ends later. (A test compares with its rows.)
    """
    last, rank = schedule.stages - 1, np.arange(schedule.pp)[:, None]
    forward, messages = table.forward, table.forward | table.gradient
    holder = np.asarray([schedule.placement[schedule.copy_of(i)] for i in range(schedule.micro_batches)])
    ends = np.full(forward.shape, -1)
    ends[table.filled] = [end for row in unit_ends(schedule) for end in row]
    never = int(ends.max()) + 1
    ends[~table.filled] = never
    end_of = np.zeros((2, schedule.stages, schedule.micro_batches), dtype=np.int64)
    end_of[table.gradient.astype(int)[messages], table.stage[messages], table.micro_batch[messages]] = ends[messages]
    onward = np.where(forward, 1, -1)
    source, target = np.clip(table.stage - onward, 0, last), np.clip(table.stage + onward, 0, last)
    takes = messages & (source != table.stage)
    receives = takes & (holder[table.micro_batch, source] != rank)
    sends = messages & (holder[table.micro_batch, target] != rank)
    made = end_of[(~forward).astype(int), source, table.micro_batch]
    place = rank * (never + 1)  # one search for all ranks

    def there(these: Bools) -> tuple[Ints, Ints]:
        """(how many of these inputs are made before each action ends, when the latest of them was)"""
        moments = np.sort(np.where(these, made, never), axis=1)
        before = np.searchsorted((moments + place).ravel(), (ends + place).ravel()).reshape(ends.shape)
        count = before - rank * moments.shape[1]
        return count, np.where(count > 0, moments.ravel()[before - 1], -1)

    _, latest = there(receives)
    waiting = there(takes)[0] - np.cumsum(takes, axis=1)
    sent = _shifted(np.maximum.accumulate(np.where(sends, ends, -1), axis=1), 1)
    return ((sent >= 0) & (sent >= latest)).astype(np.int64), waiting


def _distinct(states: npt.NDArray[np.int32]) -> dict[_Key, set[_Counts]]:
    """The counts of each key. A set of bytes finds the few distinct states faster than sorting all."""
    rows = np.ascontiguousarray(states.reshape(-1, states.shape[-1]))
    raw = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel().tolist()
    unique = np.frombuffer(b"".join(dict.fromkeys(raw)), dtype=np.int32).reshape(-1, rows.shape[1])
    found: dict[_Key, set[_Counts]] = {}
    for op, chunk, following, behind, *counts in unique.tolist():
        found.setdefault((op, chunk, following, behind), set()).add(tuple(counts))
    return found


def _maximal(states: dict[_Key, set[_Counts]]) -> Iterator[LiveState]:
    """Pareto-maximal within equal op, chunk and neighbours, the largest first."""
    for (op, chunk, following, behind), found in states.items():
        kept: list[_Counts] = []
        # A state can only be exceeded by one with a larger sum, so those kept so far are all that need be looked at.
        for counts in sorted(found, key=lambda counts: (-sum(counts), counts)):
            for other in kept:
                if all(map(ge, other, counts)):
                    break
            else:
                kept.append(counts)
                chunks = len(counts) // 2 - 1
                after, before = _neighbour(following, chunks), _neighbour(behind, chunks)
                in_flight, queued, (sends, received) = counts[:chunks], counts[chunks:-2], counts[-2:]
                yield LiveState(_OPS[op], chunk, after, in_flight, queued, sends, received, before)


def _neighbour(code: int, chunks: int) -> Neighbour:
    return None if code < 0 else (_OPS[code // chunks], code % chunks)
