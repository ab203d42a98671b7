"""The live profile: in which states of its memory a rank runs its actions, for the memory model to price.

A state is counted while its action runs. What the action itself holds (its activation, the gradient it takes over) is
not in the counts, so that the memory model can price the running action apart from the waiting ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from shardwise.schedule.passes import add_p2p
from shardwise.schedule.registry import capped, generate, saturation
from shardwise.schedule.table import Action, Op, Row, Schedule, Step

Neighbour = tuple[Op, int] | None
"""(op, chunk) of a neighbouring action of the rank; None beyond the ends of its row."""


class LiveState(NamedTuple):
    """One rank while `op` of `chunk` runs; chunks are counted on this rank, in the order of `Schedule.stages_of`.

    `in_flight[chunk]` micro-batches have their F behind them and their B or BW before them, `queued[chunk]` their B
    behind and their W before, the running one excluded from both. A SEND buffer lives from its batch to the rank's
    next batch, a RECV buffer from its batch to the start of the action that takes it over.
    """

    op: Op
    chunk: int
    following: Neighbour
    in_flight: tuple[int, ...]
    queued: tuple[int, ...]
    send_buffers: int
    recv_buffers: int
    preceding: Neighbour = None


def live_states(rows: Sequence[Row], schedule: Schedule, rank: int) -> tuple[LiveState, ...]:
    """The distinct states of `rank` that no other state with equal op, chunk and neighbours exceeds in every count."""
    return tuple(_maximal(_states(rows[rank], schedule, rank)))


def profile(name: str, pp: int, micro_batches: int) -> tuple[tuple[LiveState, ...], ...]:
    """`live_states` of every rank. Beyond `saturation` more micro-batches add no state, so fewer are looked at.

    Where in-flight grows with m (gpipe), every count grows linearly once the pipeline is full: two short profiles
    tell the slope.
    """
    short = pp + 2
    if saturation(name, pp) is not None or micro_batches <= short + 1:
        return _profile(name, pp, capped(name, pp, micro_batches))
    pairs = zip(_profile(name, pp, short), _profile(name, pp, short + 1), strict=True)
    more = micro_batches - short
    return tuple(tuple(_extended(a, b, more) for a, b in zip(x, y, strict=True)) for x, y in pairs)


def _extended(one: LiveState, next_one: LiveState, more: int) -> LiveState:
    """The state `more` micro-batches after `one`, from the one that is one after it."""
    in_flight = tuple(x + more * (y - x) for x, y in zip(one.in_flight, next_one.in_flight, strict=True))
    sends = one.send_buffers + more * (next_one.send_buffers - one.send_buffers)
    receives = one.recv_buffers + more * (next_one.recv_buffers - one.recv_buffers)
    return one._replace(in_flight=in_flight, send_buffers=sends, recv_buffers=receives)


def merged(states: Iterable[LiveState]) -> tuple[LiveState, ...]:
    """The states of several ranks as one set, without those that another exceeds in every count."""
    found: dict[_Key, set[_Counts]] = {}
    for s in states:
        counts = (*s.in_flight, *s.queued, s.send_buffers, s.recv_buffers)
        found.setdefault((s.op, s.chunk, s.following, s.preceding), set()).add(counts)
    return tuple(_maximal(found))


@lru_cache(maxsize=1024)
def _profile(name: str, pp: int, micro_batches: int) -> tuple[tuple[LiveState, ...], ...]:
    schedule = generate(name, pp, micro_batches)  # not kept: the profile is
    rows = add_p2p(schedule)
    return tuple(live_states(rows, schedule, rank) for rank in range(pp))


_Key = tuple[Op, int, Neighbour, Neighbour]
"""op, chunk, the action after it and the action before it."""
_Counts = tuple[int, ...]
"""in_flight of each chunk, queued of each chunk, send buffers, RECV buffers."""


def _states(row: Sequence[Step], schedule: Schedule, rank: int) -> dict[_Key, set[_Counts]]:
    """The distinct counts of every action in its place between two others."""
    chunk_of = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
    remote = _remote_inputs(schedule, rank)
    chunks = len(chunk_of)
    counts = [0] * (2 * chunks + 2)
    states: dict[_Key, set[_Counts]] = {}
    running: tuple[Op, int, _Counts] | None = None
    behind: Neighbour = None
    for step in row:
        if not isinstance(step, Action):
            counts[-2] = [operation[0] for operation in step].count(True)
            counts[-1] += len(step) - counts[-2]
            continue
        op, stage, _ = step
        chunk = chunk_of[stage]
        if running is not None:
            states.setdefault((running[0], running[1], (op, chunk), behind), set()).add(running[2])
            behind = running[:2]
        if (op, stage) in remote:
            counts[-1] -= 1
        if op is Op.F:
            running = (op, chunk, tuple(counts))
            counts[chunk] += 1
            continue
        counts[chunk + chunks if op is Op.W else chunk] -= 1
        running = (op, chunk, tuple(counts))
        if op is Op.B:
            counts[chunk + chunks] += 1
    if running is not None:
        states.setdefault((running[0], running[1], None, behind), set()).add(running[2])
    return states


def _remote_inputs(schedule: Schedule, rank: int) -> set[tuple[Op, int]]:
    """(op, stage) of this rank whose input comes from another rank."""
    remote: set[tuple[Op, int]] = set()
    for stage in schedule.stages_of(rank):
        if stage > 0 and schedule.rank_of(stage - 1) != rank:
            remote.add((Op.F, stage))
        if stage < schedule.stages - 1 and schedule.rank_of(stage + 1) != rank:
            remote |= {(Op.B, stage), (Op.BW, stage)}
    return remote


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
                in_flight, queued, (sends, received) = counts[:chunks], counts[chunks:-2], counts[-2:]
                yield LiveState(op, chunk, following, in_flight, queued, sends, received, behind)
