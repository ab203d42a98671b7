"""The pass that puts the communication into the rows (`check.py` proves that they run)."""

from __future__ import annotations

from bisect import bisect_right

from shardwise.schedule.errors import ScheduleError
from shardwise.schedule.table import P2P, Action, Op, Row, Schedule, Step

_UNIT_TIME = {Op.F: 1, Op.B: 1, Op.W: 1, Op.BW: 2}


def add_p2p(schedule: Schedule) -> tuple[Row, ...]:
    """The rows with their SENDs and RECVs, deadlock-free even if a send does not return before it is received.

    The rows are timed with F = B = W = 1. An output that another rank needs is sent when its action ends; the
    receiver posts the RECV at that same moment, before the action it is then busy with. So all messages have one
    global order, which every row keeps. What a rank sends and receives at one moment is one batch: in the steady
    state of 1F1B the activation and the gradient that two neighbours exchange.

    Raises `ScheduleError` if the rows cannot run even with perfect communication.
    """
    ends = unit_ends(schedule)
    moments: list[dict[int, list[P2P]]] = [{} for _ in schedule.rows]
    rank_of, last = schedule.placement[0], schedule.stages - 1
    for rank, row in enumerate(schedule.rows):
        own = moments[rank]
        for action, end in zip(row, ends[rank], strict=True):
            op, stage, micro_batch = action
            if op is Op.F:
                if stage == last:
                    continue
                tensor, to_stage = Op.F, stage + 1
            elif op is Op.W or stage == 0:
                continue
            else:
                tensor, to_stage = Op.B, stage - 1
            peer = rank_of[to_stage]
            if peer != rank:
                own.setdefault(end, []).append(P2P(True, tensor, stage, micro_batch, peer))
                moments[peer].setdefault(end, []).append(P2P(False, tensor, to_stage, micro_batch, rank))
    return tuple(_merge(row, e, b) for row, e, b in zip(schedule.rows, ends, moments, strict=True))


def _merge(row: tuple[Action, ...], ends: list[int], batches: dict[int, list[P2P]]) -> Row:
    """Put the batch of moment t before the first action that ends after t: never later than its consumer."""
    merged: list[Step] = []
    done = 0
    for moment in sorted(batches):
        gap = bisect_right(ends, moment, done)
        merged += row[done:gap]
        merged.append(tuple(batches[moment]))
        done = gap
    merged += row[done:]
    return tuple(merged)


def unit_ends(schedule: Schedule) -> list[list[int]]:
    """When each action ends if F = B = W = 1 and communication is free. Ranks that wait are woken by their input."""
    m, last = schedule.micro_batches, schedule.stages - 1
    rank_of = schedule.placement[0]
    forward = [[-1] * m for _ in range(last + 1)]  # end of F, by stage and micro-batch
    backward = [[-1] * m for _ in range(last + 1)]  # end of B or BW
    ends: list[list[int]] = [[] for _ in schedule.rows]
    ready = list(range(schedule.pp))
    while ready:
        rank = ready.pop()
        own, row = ends[rank], schedule.rows[rank]
        now = own[-1] if own else 0
        while len(own) < len(row):
            op, stage, i = row[len(own)]
            if op is Op.F:
                start = forward[stage - 1][i] if stage else 0
                done, neighbour = forward, stage + 1
            elif op is Op.W:
                start, done, neighbour = backward[stage][i], None, -1
            else:
                start = backward[stage + 1][i] if stage < last else forward[stage][i]
                done, neighbour = backward, stage - 1
            if start < 0:
                break
            now = max(now, start) + _UNIT_TIME[op]
            own.append(now)
            if done is not None:
                done[stage][i] = now
                if 0 <= neighbour <= last and rank_of[neighbour] != rank:
                    ready.append(rank_of[neighbour])
    stuck = [f"rank {r} at {row[len(ends[r])]}" for r, row in enumerate(schedule.rows) if len(ends[r]) < len(row)]
    if stuck:
        raise ScheduleError(f"{schedule.name}: the actions wait for one another: {'; '.join(stuck)}")
    return ends
