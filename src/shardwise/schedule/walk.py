"""Gives the rows times: when each action starts and ends if computes take `durations` and messages take `p2p_s`.

The rule of the point-to-point queue, which the backends and NCCL obey too: a rank puts its batches into one queue, in
the order of its row, when the row reaches them; computing does not block the queue, but a compute waits for its RECV.
An operation runs once it is at the head of the queue on both ends; those of one batch run independently, and the batch
leaves the queue when all are done.

All of this is max and plus, so the walk needs no clock: it evaluates whatever has its inputs, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import NamedTuple

from shardwise.schedule.errors import ScheduleError
from shardwise.schedule.table import P2P, Action, Batch, Op, Schedule, Step, pairs

Durations = Mapping[tuple[Op, int], float] | Callable[[Op, int], float]
"""(op, stage) -> seconds."""

Delays = float | Mapping[tuple[int, int], float] | Callable[[int, int], float]
"""(from rank, to rank) -> seconds of one message."""

Pairs = Mapping[tuple[int, int], float] | Callable[[int, int], float]
"""(stage of the F, stage of the BW) -> seconds of both, run as one."""

Message = tuple[Op, int, int]
"""(tensor, producing stage, micro-batch)."""

Wire = tuple[int, int, Message]
"""(from rank, to rank, message)."""


class Slot(NamedTuple):
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """`rows[rank]` has the actions in order; the span runs from 0 to the end of the last action of any rank."""

    rows: tuple[tuple[Slot, ...], ...]
    span_s: float
    busy_s: tuple[float, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Per rank: the span less its busy time."""
        return tuple(self.span_s - busy for busy in self.busy_s)


def walk(
    rows: Sequence[Sequence[Step]],
    schedule: Schedule,
    durations: Durations,
    p2p_s: Delays = 0.0,
    pair_s: Pairs | None = None,
) -> Timeline:
    """Time the rows of `add_p2p`; or `schedule.rows` as they are, with messages that no queue ever holds up.

    With `pair_s`, each F and BW of `pairs` run as one in a schedule that overlaps: they start when both have their
    inputs and end together. The rows are then those of `add_p2p(schedule, paired=True)`. Without it one runs after the
    other.

    Raises `ScheduleError`, naming each rank and what it waits for, if the rows deadlock.
    """
    run = _Walk(rows, schedule, durations, p2p_s)
    if pair_s is not None and schedule.overlaps:
        run.paired = _paired(rows, schedule, run.duration, pair_s)
    run.finish()
    slots = tuple(map(tuple, run.slots))
    span_s = max((row[-1].end_s for row in slots if row), default=0.0)
    return Timeline(slots, span_s, tuple(sum(slot.end_s - slot.start_s for slot in row) for row in slots))


def needs(action: Action, stages: int) -> Message:
    """The output, of any rank, that an action waits for. F of stage 0 is told apart by its stage, -1."""
    op, stage, micro_batch = action
    if op is Op.F:
        return Op.F, stage - 1, micro_batch
    if op is Op.W:
        return Op.B, stage, micro_batch
    return (Op.B, stage + 1, micro_batch) if stage < stages - 1 else (Op.F, stage, micro_batch)


class _Pair(NamedTuple):
    message: Message
    """what the BW waits for"""
    both_s: float
    forward_s: float
    """the part that is drawn as the F"""


class _Walk:
    """The state of one walk. Ranks are advanced until their next action lacks an input, and woken when it comes."""

    def __init__(self, rows: Sequence[Sequence[Step]], schedule: Schedule, durations: Durations, p2p_s: Delays) -> None:
        self.rows, self.schedule = rows, schedule
        self.duration = _table(durations, schedule.stages)
        self.paired: dict[Action, _Pair] = {}  # by both the F and the BW
        self.delay = _delays(p2p_s, schedule.pp)
        self.queued = any(not isinstance(step, Action) for row in rows for step in row)
        ranks = range(schedule.pp)
        self.slots: list[list[Slot]] = [[] for _ in ranks]
        self.next = [0 for _ in ranks]  # index in the row
        self.free_s = [0.0 for _ in ranks]
        self.here: list[dict[Message, float]] = [{} for _ in ranks]  # when an input is on the rank
        self.queue: list[list[tuple[float, Batch]]] = [[] for _ in ranks]  # posted and at what time
        self.head = [0 for _ in ranks]  # index in the queue
        self.left_s = [0.0 for _ in ranks]  # when the last finished batch left the queue
        self.pending = [0 for _ in ranks]  # operations of the head batch that are not done
        self.offers: dict[Wire, float] = {}  # operations at the head of one end alone, and since when
        self.awake = list(ranks)

    def finish(self) -> None:
        while self.awake:
            self._advance(self.awake.pop())
        stuck = [
            self._waits_for(rank)
            for rank, row in enumerate(self.rows)
            if self.next[rank] < len(row) or self.head[rank] < len(self.queue[rank])
        ]
        if stuck:
            raise ScheduleError(f"{self.schedule.name}: deadlock: {'; '.join(stuck)}")

    def _advance(self, rank: int) -> None:
        row, here, stages = self.rows[rank], self.here[rank], self.schedule.stages
        slots, duration, paired = self.slots[rank], self.duration, self.paired
        while self.next[rank] < len(row):
            step = row[self.next[rank]]
            if isinstance(step, Action):
                message = needs(step, stages)
                ready_s = here.get(message) if message[1] >= 0 else 0.0
                if ready_s is None:
                    return
                if paired and step in paired:
                    if not self._advance_pair(step, rank, ready_s):
                        return
                else:
                    start_s = max(ready_s, self.free_s[rank])
                    end_s = start_s + duration[step[0], step[1]]
                    slots.append(Slot(step, start_s, end_s))
                    self.free_s[rank] = end_s
                    self._produce(step, rank, end_s)
            else:
                self.queue[rank].append((self.free_s[rank], step))
                if self.head[rank] == len(self.queue[rank]) - 1:
                    self._reach_head(rank)
            self.next[rank] += 1

    def _advance_pair(self, action: Action, rank: int, ready_s: float) -> bool:
        """The F takes the time of both, the BW is done with it; False if the BW lacks its input."""
        pair = self.paired[action]
        if action.op is Op.F:
            other_s = self.here[rank].get(pair.message)
            if other_s is None:
                return False
            start_s = max(ready_s, other_s, self.free_s[rank])
            self.free_s[rank] = start_s + pair.both_s
            self.slots[rank].append(Slot(action, start_s, start_s + pair.forward_s))
        else:
            self.slots[rank].append(Slot(action, self.slots[rank][-1].end_s, self.free_s[rank]))
        self._produce(action, rank, self.free_s[rank])
        return True

    def _produce(self, action: Action, rank: int, end_s: float) -> None:
        """An output is at once on its own rank; without a queue, after the delay on the rank that needs it."""
        op, stage, micro_batch = action
        if op is Op.W:
            return
        tensor = Op.F if op is Op.F else Op.B
        message = (tensor, stage, micro_batch)
        self.here[rank][message] = end_s
        to_stage = stage + 1 if tensor is Op.F else stage - 1
        if not self.queued and 0 <= to_stage < self.schedule.stages:
            peer = self.schedule.rank_of(to_stage, self.schedule.copy_of(micro_batch))
            if peer != rank:
                self.here[peer][message] = end_s + self.delay[rank][peer]
                self.awake.append(peer)

    def _reach_head(self, rank: int) -> None:
        """Offer the batch that is now at the head; each operation whose other end is there too runs."""
        posted_s, batch = self.queue[rank][self.head[rank]]
        since_s = max(posted_s, self.left_s[rank])
        self.left_s[rank], self.pending[rank] = since_s, len(batch)
        for operation in batch:
            wire = self._wire(rank, operation)
            other_s = self.offers.pop(wire, None)
            if other_s is None:
                self.offers[wire] = since_s
                continue
            sender, receiver, message = wire
            end_s = max(since_s, other_s) + self.delay[sender][receiver]
            self.here[receiver][message] = end_s
            self.awake.append(receiver)
            self._complete(rank, end_s)
            self._complete(operation.peer, end_s)

    @staticmethod
    def _wire(rank: int, operation: P2P) -> Wire:
        ends = (rank, operation.peer) if operation.send else (operation.peer, rank)
        return (*ends, operation.message)

    def _complete(self, rank: int, end_s: float) -> None:
        self.left_s[rank] = max(self.left_s[rank], end_s)
        self.pending[rank] -= 1
        if not self.pending[rank]:
            self.head[rank] += 1
            if self.head[rank] < len(self.queue[rank]):
                self._reach_head(rank)

    def _waits_for(self, rank: int) -> str:
        text = f"rank {rank}"
        if self.next[rank] < len(self.rows[rank]):
            text += f" at {self.rows[rank][self.next[rank]]}"
        if self.head[rank] < len(self.queue[rank]):
            batch = self.queue[rank][self.head[rank]][1]
            unmet = (o for o in batch if self._wire(rank, o) in self.offers)
            text += f", its queue at {', '.join(map(describe, unmet))}"
        return text


def describe(operation: P2P) -> str:
    verb, preposition = ("SEND", "to") if operation.send else ("RECV", "from")
    tensor, stage, micro_batch = operation.message
    return f"{verb} {tensor} of stage {stage}, micro-batch {micro_batch} {preposition} rank {operation.peer}"


def _table(durations: Durations, stages: int) -> dict[tuple[Op, int], float]:
    keys = [(op, stage) for op in Op for stage in range(stages)]
    if isinstance(durations, Mapping):
        return {key: durations[key] for key in keys if key in durations}
    return {key: durations(*key) for key in keys}


def _paired(
    rows: Sequence[Sequence[Step]], schedule: Schedule, duration: Mapping[tuple[Op, int], float], pair_s: Pairs
) -> dict[Action, _Pair]:
    found: dict[Action, _Pair] = {}
    for rank, row in enumerate(rows):
        together = set(pairwise(row))
        for forward, backward in pairs(row).items():
            if (forward, backward) not in together:
                raise ScheduleError(f"{schedule.name}: rank {rank} communicates between {forward} and {backward}")
            stages = forward.stage, backward.stage
            both_s = pair_s(*stages) if callable(pair_s) else pair_s[stages]
            alone_s = duration[Op.F, forward.stage], duration[Op.BW, backward.stage]
            forward_s = both_s * alone_s[0] / (sum(alone_s) or 1.0)
            found[forward] = found[backward] = _Pair(needs(backward, schedule.stages), both_s, forward_s)
    return found


def _delays(p2p_s: Delays, pp: int) -> list[list[float]]:
    """[from rank][to rank] -> seconds. A mapping may leave out pairs that send nothing."""
    if isinstance(p2p_s, (int, float)):
        return [[float(p2p_s)] * pp for _ in range(pp)]
    delays = [[0.0] * pp for _ in range(pp)]
    for source, target in permutations(range(pp), 2):
        if not isinstance(p2p_s, Mapping):
            delays[source][target] = p2p_s(source, target)
        elif (source, target) in p2p_s:
            delays[source][target] = p2p_s[source, target]
    return delays
