"""The pass that puts the communication into the rows (`check.py` proves that they run)."""

from __future__ import annotations

from bisect import bisect_right

from shardwise.schedule.errors import ScheduleError
from shardwise.schedule.table import P2P, Action, Op, Row, Schedule, Step, pairs


def add_p2p(schedule: Schedule, paired: bool = False) -> tuple[Row, ...]:
    """The rows with their SENDs and RECVs, deadlock-free even if a send does not return before it is received.

    The rows are timed with F = B = W = 1. An output that another rank needs is sent when its action ends; the
    receiver posts the RECV at that same moment, before the action it is then busy with. So all messages have one
    global order, which every row keeps. What a rank sends and receives at one moment is one batch: in the steady
    state of 1F1B the activation and the gradient that two neighbours exchange. `paired`: of a schedule that overlaps,
    each F and its BW (`pairs`) count as one, with no communication between them.

    Raises `ScheduleError` if the rows cannot run even with perfect communication.
    """
    ends = unit_ends(schedule, paired)
    moments: list[dict[int, list[P2P]]] = [{} for _ in schedule.rows]
    last = schedule.stages - 1
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
            peer = schedule.placement[schedule.copy_of(micro_batch)][to_stage]
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


def unit_ends(schedule: Schedule, paired: bool = False) -> list[list[int]]:
    """When each action ends if F = B = W = 1 and communication is free. Ranks that wait are woken by their input."""
    m, (op_f, op_w, op_bw) = schedule.micro_batches, (Op.F, Op.W, Op.BW)
    # When the input of each stage is there, by micro-batch, -1 while it is not known; the last stage turns round.
    ahead = [[0] * m, *([-1] * m for _ in range(schedule.stages))]
    back = [*([-1] * m for _ in range(schedule.stages)), ahead[-1]]
    # The ranks before and after each stage, by copy: whom its gradient and its activation wake, if anyone.
    around = [(-1, *copy, -1) for copy in schedule.placement]
    partners = [pairs(row) if paired and schedule.overlaps else {} for row in schedule.rows]
    done_with = [set(partner.values()) for partner in partners]
    ends: list[list[int]] = [[] for _ in schedule.rows]
    asleep = [False for _ in (*schedule.rows, None)]
    ready = list(range(schedule.pp))
    while ready:
        rank = ready.pop()
        own, row, partner = ends[rank], schedule.rows[rank], partners[rank]
        now, place, end = own[-1] if own else 0, len(own), len(row)
        while place < end:
            op, stage, i = action = row[place]
            start = (ahead[stage] if op is op_f else back[stage] if op is op_w else back[stage + 1])[i]
            length = 2 if op is op_bw else 1
            if partner and action in partner:
                other = partner[action]
                also = back[other.stage + 1][other.micro_batch]
                start, length = max(start, also) if min(start, also) >= 0 else -1, 3
            elif partner and action in done_with[rank]:
                length = 0
            if start < 0:
                asleep[rank] = True
                break
            now = (now if now > start else start) + length
            own.append(now)
            place += 1
            if op is not op_w:
                (ahead[stage + 1] if op is op_f else back[stage])[i] = now
                neighbour = around[i % len(around)][stage + 2 if op is op_f else stage]
                if asleep[neighbour]:
                    asleep[neighbour] = False
                    ready.append(neighbour)
    stuck = [f"rank {r} at {row[len(ends[r])]}" for r, row in enumerate(schedule.rows) if len(ends[r]) < len(row)]
    if stuck:
        raise ScheduleError(f"{schedule.name}: the actions wait for one another: {'; '.join(stuck)}")
    return ends
