"""The rows as a graph: which action and which message wait for which others. Times are read from it (`walk.py`).

The rule of the point-to-point queue, which the backends and NCCL obey too: a rank puts its batches into one queue, in
the order of its row, when the row reaches them; computing does not block the queue, but a compute waits for its RECV.
An operation runs once it is at the head of the queue on both ends; those of one batch run independently, and the batch
leaves the queue when all are done.

None of this asks a clock, so one graph serves all durations of actions and messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from shardwise.schedule.errors import ScheduleError
from shardwise.schedule.table import P2P, Action, Batch, Op, Schedule, Step, pairs

Message = tuple[Op, int, int]
"""(tensor, producing stage, micro-batch)."""

Wire = tuple[int, int, Message]
"""(from rank, to rank, message)."""

Cost = tuple[Op, int] | tuple[int, int] | tuple[str, int, int] | None
"""What a node takes: an action (op, stage), a message (from rank, to rank), an F and a BW as one ("pair", their
stages); None for a node that only waits."""


class Drawn(NamedTuple):
    """An action of a row: it begins when both nodes `after` have ended and ends with the node `end`. Of an F and a BW
    that are one, each is drawn as its part; `pair` is the stage of the F and of the BW."""

    action: Action
    end: int
    after: tuple[int, int]
    pair: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """Node i ends `costs[cost[i]]` after both `first[i]` and `second[i]`, which come before it; node 0 ends at 0."""

    first: list[int] = field(default_factory=lambda: [0])
    second: list[int] = field(default_factory=lambda: [0])
    cost: list[int] = field(default_factory=lambda: [0])
    costs: dict[Cost, int] = field(default_factory=lambda: {None: 0})
    rows: list[list[Drawn]] = field(default_factory=list[list[Drawn]])

    def add(self, first: int, second: int, cost: Cost = None) -> int:
        """A node after these two; two that need no node between them make none."""
        if cost is None and (first == second or not second):
            return first
        if cost is None and not first:
            return second
        self.first.append(first)
        self.second.append(second)
        self.cost.append(self.costs.setdefault(cost, len(self.costs)))
        return len(self.cost) - 1


def graph_of(rows: Sequence[Sequence[Step]], schedule: Schedule, paired: bool = False) -> Graph:
    """Of the rows of `add_p2p`; or of `schedule.rows` as they are, with messages that no queue ever holds up.

    `paired`: each F and BW of `pairs` run as one in a schedule that overlaps: they start when both have their inputs
    and end together. The rows are then those of `add_p2p(schedule, paired=True)`.

    Raises `ScheduleError`, naming each rank and what it waits for, if the rows deadlock.
    """
    build = _Building(rows, schedule)
    if paired and schedule.overlaps:
        build.paired = _paired(rows, schedule)
    build.finish()
    return build.graph


def needs(action: Action, stages: int) -> Message:
    """The output, of any rank, that an action waits for. F of stage 0 is told apart by its stage, -1."""
    op, stage, micro_batch = action
    if op is Op.F:
        return Op.F, stage - 1, micro_batch
    if op is Op.W:
        return Op.B, stage, micro_batch
    return (Op.B, stage + 1, micro_batch) if stage < stages - 1 else (Op.F, stage, micro_batch)


class _Building:
    """Ranks are advanced until their next action lacks an input, and woken when it comes."""

    def __init__(self, rows: Sequence[Sequence[Step]], schedule: Schedule) -> None:
        self.rows, self.schedule, self.graph = rows, schedule, Graph()
        self.paired: dict[Action, tuple[Action, Action]] = {}  # by both the F and the BW
        self.queued = any(not isinstance(step, Action) for row in rows for step in row)
        ranks = range(schedule.pp)
        self.graph.rows.extend([] for _ in ranks)
        self.next = [0 for _ in ranks]  # index in the row
        self.free = [0 for _ in ranks]  # the node after which the rank computes no more
        self.here: list[dict[Message, int]] = [{} for _ in ranks]  # inputs that come to the rank
        self.queue: list[list[tuple[int, Batch]]] = [[] for _ in ranks]  # what was posted after which node
        self.head = [0 for _ in ranks]  # index in the queue
        self.left = [0 for _ in ranks]  # after which node the last batch left the queue
        self.pending = [0 for _ in ranks]  # operations of the head batch that are not done
        self.offers: dict[Wire, int] = {}  # operations at the head of one end alone, and after which node
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
        while self.next[rank] < len(row):
            step = row[self.next[rank]]
            if isinstance(step, Action):
                message = needs(step, stages)
                ready = here.get(message) if message[1] >= 0 else 0
                if ready is None or (step in self.paired and not self._pair(step, rank, ready)):
                    return
                if step not in self.paired:
                    self._compute(step, rank, ready)
                self._produce(step, rank)
            else:
                self.queue[rank].append((self.free[rank], step))
                if self.head[rank] == len(self.queue[rank]) - 1:
                    self._reach_head(rank)
            self.next[rank] += 1

    def _compute(self, action: Action, rank: int, ready: int) -> None:
        after = self.free[rank], ready
        self.free[rank] = self.graph.add(*after, (action.op, action.stage))
        self.graph.rows[rank].append(Drawn(action, self.free[rank], after))

    def _pair(self, action: Action, rank: int, ready: int) -> bool:
        """The F takes the time of both, the BW is done with it; False if the BW lacks its input."""
        forward, backward = self.paired[action]
        stages = forward.stage, backward.stage
        if action == forward:
            other = self.here[rank].get(needs(backward, self.schedule.stages))
            if other is None:
                return False
            start = self.graph.add(self.graph.add(self.free[rank], ready), other)
            self.free[rank] = self.graph.add(start, start, ("pair", *stages))
            self.graph.rows[rank].append(Drawn(action, self.free[rank], (start, start), stages))
        else:
            before = self.graph.rows[rank][-1]
            self.graph.rows[rank].append(Drawn(action, self.free[rank], before.after, stages))
        return True

    def _produce(self, action: Action, rank: int) -> None:
        """An output is at once on its own rank; without a queue, after the delay on the rank that needs it."""
        op, stage, micro_batch = action
        if op is Op.W:
            return
        tensor = Op.F if op is Op.F else Op.B
        message, end = (tensor, stage, micro_batch), self.free[rank]
        self.here[rank][message] = end
        to_stage = stage + 1 if tensor is Op.F else stage - 1
        if not self.queued and 0 <= to_stage < self.schedule.stages:
            peer = self.schedule.rank_of(to_stage, self.schedule.copy_of(micro_batch))
            if peer != rank:
                self.here[peer][message] = self.graph.add(end, end, (rank, peer))
                self.awake.append(peer)

    def _reach_head(self, rank: int) -> None:
        """Offer the batch that is now at the head; each operation whose other end is there too runs."""
        posted, batch = self.queue[rank][self.head[rank]]
        since = self.graph.add(posted, self.left[rank])
        self.left[rank], self.pending[rank] = since, len(batch)
        for operation in batch:
            wire = self._wire(rank, operation)
            other = self.offers.pop(wire, None)
            if other is None:
                self.offers[wire] = since
                continue
            sender, receiver, message = wire
            end = self.graph.add(since, other, (sender, receiver))
            self.here[receiver][message] = end
            self.awake.append(receiver)
            self._complete(rank, end)
            self._complete(operation.peer, end)

    @staticmethod
    def _wire(rank: int, operation: P2P) -> Wire:
        ends = (rank, operation.peer) if operation.send else (operation.peer, rank)
        return (*ends, operation.message)

    def _complete(self, rank: int, end: int) -> None:
        self.left[rank] = self.graph.add(self.left[rank], end)
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


def _paired(rows: Sequence[Sequence[Step]], schedule: Schedule) -> dict[Action, tuple[Action, Action]]:
    found: dict[Action, tuple[Action, Action]] = {}
    for rank, row in enumerate(rows):
        together = set(pairwise(row))
        for forward, backward in pairs(row).items():
            if (forward, backward) not in together:
                raise ScheduleError(f"{schedule.name}: rank {rank} communicates between {forward} and {backward}")
            found[forward] = found[backward] = forward, backward
    return found
