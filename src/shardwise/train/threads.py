"""Ranks as threads of one process that pass a baton: exactly one runs, and hands over when it blocks.

What this buys over processes: 32 ranks start in milliseconds, the order of everything is fixed, reductions are summed
in rank order (two runs agree bit for bit), and the model of point-to-point is strict, so a schedule that could hang
under NCCL hangs here, always, and is reported with every rank and what it waits for.

Point-to-point model: sends are unbuffered and each rank has one queue of batches. Operations of the batch at the head
progress independently; each is matched with the first fitting operation of the batch at the head of its peer's queue.
Later batches of a rank wait until every operation of the head is matched.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, NoReturn, TypeVar

import torch

from shardwise.train.arithmetic import ARITHMETIC, group_index, require, require_divisible, require_op, type_text
from shardwise.train.comm import Group, Message, Work

T = TypeVar("T")

GRACE_S = 5.0
"""How long a rank that ran past the timeout may take to reach its next communication call, where it ends."""


def run_threads(world_size: int, function: Callable[[ThreadComm], T], timeout_s: float = 60.0) -> list[T]:
    """Run `function(comm)` once per rank and return the results in rank order.

    Raises ValueError below one rank, and RankError when a rank raises (chained), operations of ranks do not fit
    together, no rank can run, an operation is left unmatched at the end, or `timeout_s` passes. Then every rank ends
    inside its blocking call.
    A new thread starts with torch's default thread-local state: gradients on, no dispatch mode.
    """
    if world_size < 1:
        raise ValueError(f"world_size is at least 1, not {world_size}")
    world = _World(world_size)
    results: dict[int, T] = {}

    def rank_main(rank: int) -> None:
        world.batons[rank].get()
        try:
            world.check()
            results[rank] = function(ThreadComm(world, rank))
        except _Abort:
            pass
        except BaseException as error:  # SystemExit included: a rank that leaves early fails the others
            world.fail(f"rank {rank} raised {type(error).__name__}: {error}", rank, error)
        finally:
            world.leave(rank)

    threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank {r}", daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    world.hand_over()
    try:
        if not world.all_left.wait(timeout_s):
            world.stop = f"not done after {timeout_s:g} s"
    except BaseException:
        world.stop = "interrupted"
        raise
    finally:
        _join(world, threads)
    if world.failure is not None:
        raise world.failure from world.failure.cause
    return [results[rank] for rank in range(world_size)]


def _join(world: _World, threads: list[threading.Thread]) -> None:
    """End all threads. A rank that never communicates again cannot be stopped; the others do not wait for it."""
    if not world.all_left.wait(GRACE_S):
        world.fail(f"{world.stop}; rank {world.running} runs without communicating and cannot be stopped")
        for baton in world.batons:
            baton.put(None)
    for thread in threads:
        thread.join(GRACE_S if world.all_left.is_set() else 0.1)


def _ranks_text(ranks: tuple[int, ...] | list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class RankError(RuntimeError):
    """One or several ranks failed. `rank` raised `cause`, where one did; `states` says what each rank was doing."""

    def __init__(self, what: str, states: dict[int, str], rank: int | None = None, cause: BaseException | None = None):
        super().__init__("\n".join([what, *(f"  rank {r} {state}" for r, state in states.items())]))
        self.rank = rank
        self.cause = cause
        self.states = states


class _Abort(BaseException):
    """Unwinds a rank after another failed. Not an Exception, so that no handler of the user's swallows it."""


@dataclass(slots=True, eq=False)
class _Gate:
    """Opens once; ranks wait before it. `describe` is called only to report; it holds tensors, so opening drops it."""

    describe: Callable[[], str] | None = None
    is_open: bool = False
    waiters: list[int] = field(default_factory=list)


class _Signature(NamedTuple):
    """What all members of a collective must agree on."""

    kind: str
    op: str
    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = f"{self.kind} {self.op}" if self.op else self.kind
        return f"{kind} {type_text(self)}"


class _Meeting:
    """One collective under way: who has come, with which tensors."""

    def __init__(self, channel: _Channel, number: int, signature: _Signature, first: int):
        self.channel = channel
        self.number = number
        self.signature = signature
        self.first = first
        self.parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.gate = _Gate(self.describe)

    def describe(self) -> str:
        missing = [rank for index, rank in enumerate(self.channel.ranks) if index not in self.parts]
        return f"{self.signature}, {self.channel.describe(self.number)}; missing: {_ranks_text(missing)}"

    def complete(self) -> None:
        """Compute from all inputs before writing any output: an output may be a part of an input."""
        pairs = [self.parts[index] for index in range(len(self.parts))]
        outs, xs = [out for out, _ in pairs], [x for _, x in pairs]
        with torch.no_grad():
            ARITHMETIC[self.signature.kind](outs, xs, self.signature.op)
        self.parts.clear()


@dataclass(slots=True, eq=False)
class _Channel:
    """What the members of one group share: how many collectives each has issued, and those not complete."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    issued: list[int]
    meetings: dict[int, _Meeting] = field(default_factory=dict)

    def describe(self, number: int) -> str:
        return f"#{number} on {'+'.join(self.axes)} ({_ranks_text(self.ranks)})"


@dataclass(slots=True, eq=False)
class _Operation:
    """One end of a point-to-point, in a queue until it is matched."""

    rank: int
    message: Message
    gate: _Gate

    def __str__(self) -> str:
        message = self.message
        kind, preposition = ("send", "to") if message.send else ("recv", "from")
        return f"{kind} {message.name!r} {type_text(message.tensor)} {preposition} rank {message.peer}"


class _World:
    """The baton and all that ranks share. Only the rank that has the baton touches it, so it needs no lock."""

    def __init__(self, world_size: int):
        self.size = world_size
        # SimpleQueue is a binary semaphore in C here; unlike a lock it does not mind a second release.
        self.batons: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(world_size)]
        self.ready = deque(range(world_size))
        self.running = 0
        self.alive = [True] * world_size
        self.waiting: dict[int, _Gate] = {}
        self.channels: dict[tuple[tuple[str, ...], tuple[int, ...]], _Channel] = {}
        self.queues: list[deque[list[_Operation]]] = [deque() for _ in range(world_size)]
        self.failure: RankError | None = None
        self.stop = ""  # set by the caller's thread, which must not touch the rest: the running rank acts on it
        self.all_left = threading.Event()

    def check(self) -> None:
        """Called on entry to every operation: after a failure no rank goes on."""
        if self.stop:
            self.fail(f"{self.stop}; rank {self.running} was running")
        if self.failure is not None:
            raise _Abort

    def hand_over(self) -> None:
        self.running = self.ready.popleft()
        self.batons[self.running].put(None)

    def block(self, rank: int, gate: _Gate) -> None:
        """Return once `gate` is open; let others run meanwhile."""
        self.check()
        if gate.is_open:
            return
        gate.waiters.append(rank)
        self.waiting[rank] = gate
        if not self.ready:
            self.abort("deadlock: no rank can run")
        self.hand_over()
        self.batons[rank].get()
        self.check()

    def open(self, gate: _Gate) -> None:
        gate.is_open = True
        gate.describe = None
        for rank in gate.waiters:
            del self.waiting[rank]
            self.ready.append(rank)

    def leave(self, rank: int) -> None:
        """The end of a rank's thread: pass the baton on, or say that all is done."""
        self.alive[rank] = False
        if not any(self.alive):
            if self.failure is None and (left := self.unmatched()):
                self.fail("all ranks have returned, but operations are left unmatched: " + "; ".join(left))
            self.all_left.set()
            return
        if self.failure is None and not self.ready:
            self.fail("deadlock: no rank can run")
        if self.failure is not None:
            self.ready = deque([self.alive.index(True)])
        self.hand_over()

    def fail(self, what: str, rank: int | None = None, cause: BaseException | None = None) -> None:
        """Keep the first failure, with the state of every rank but the one that caused it."""
        if self.failure is None:
            self.failure = RankError(what, {}, rank, cause)  # already now: no fault in reporting may let ranks go on
            states = {r: self.state(r) for r in range(self.size) if r != rank}
            self.failure = RankError(what, states, rank, cause)

    def abort(self, what: str) -> NoReturn:
        self.fail(what)
        raise _Abort

    def state(self, rank: int) -> str:
        if not self.alive[rank]:
            return "has returned"
        gate = self.waiting.get(rank)
        if gate is not None and gate.describe is not None:
            return f"waits for {gate.describe()}"
        return "is running" if rank == self.running else "can run"

    def unmatched(self) -> list[str]:
        meetings = [m.describe() for channel in self.channels.values() for m in channel.meetings.values()]
        operations = [op for queue in self.queues for batch in queue for op in batch]
        return meetings + [f"rank {op.rank}: {op}" for op in operations]

    def arrive(self, group: Group, kind: str, op: str, out: torch.Tensor, x: torch.Tensor) -> _Gate:
        """Take part in the next collective of `group`; the last member to come completes it for all."""
        self.check()
        channel = group.handle
        if not isinstance(channel, _Channel):
            raise ValueError(f"{kind}: the group {group.axes} was not made by this backend")
        number = channel.issued[group.index]
        channel.issued[group.index] += 1
        signature = _Signature(kind, op, x.shape, x.dtype)
        rank = group.ranks[group.index]
        meeting = channel.meetings.get(number)
        if meeting is None:
            meeting = channel.meetings[number] = _Meeting(channel, number, signature, rank)
        if meeting.signature != signature:
            where = channel.describe(number)
            first = f"rank {meeting.first} issued {meeting.signature}"
            self.abort(f"mismatch in collective {where}: {first}, rank {rank} issued {signature}")
        meeting.parts[group.index] = (out, x)
        if len(meeting.parts) == group.size:
            meeting.complete()
            del channel.meetings[number]
            self.open(meeting.gate)
        return meeting.gate

    def post(self, rank: int, batch: list[Message]) -> list[_Gate]:
        self.check()
        operations: list[_Operation] = []
        for message in batch:
            if message.peer == rank or not 0 <= message.peer < self.size:
                raise ValueError(f"point-to-point {message.name!r}: rank {rank} has no peer {message.peer}")
            operation = _Operation(rank, message, _Gate())
            operation.gate.describe = partial(self.describe, operation)
            operations.append(operation)
        if operations:
            self.queues[rank].append(list(operations))  # the queue forgets what is matched, we do not
            self.match(rank)
        return [operation.gate for operation in operations]

    def describe(self, operation: _Operation) -> str:
        """The operation, and what keeps it from the head of its queue."""
        head = self.queues[operation.rank][0]
        return str(operation) if operation in head else f"{operation}, behind {head[0]}"

    def match(self, rank: int) -> None:
        """Match what can be, starting from the head of one rank's queue and following every head that moves up."""
        moved = [rank]
        while moved:
            queue = self.queues[moved.pop()]
            for mine in list(queue[0]) if queue else ():
                theirs = self.counterpart(mine)
                if theirs is not None:
                    self.transfer(mine, theirs)
                    moved += [op.rank for op in (mine, theirs) if self.leave_queue(op)]

    def counterpart(self, mine: _Operation) -> _Operation | None:
        queue = self.queues[mine.message.peer]
        for theirs in queue[0] if queue else ():
            if theirs.message.peer == mine.rank and theirs.message.send != mine.message.send:
                return theirs
        return None

    def leave_queue(self, operation: _Operation) -> bool:
        """True if the operation was the last of its batch, so that the next batch is now the head."""
        queue = self.queues[operation.rank]
        queue[0].remove(operation)
        if not queue[0]:
            queue.popleft()
            return True
        return False

    def transfer(self, mine: _Operation, theirs: _Operation) -> None:
        source, target = (mine, theirs) if mine.message.send else (theirs, mine)
        sent, received = source.message, target.message
        for name, a, b in (
            ("name", sent.name, received.name),
            ("shape", sent.tensor.shape, received.tensor.shape),
            ("dtype", sent.tensor.dtype, received.tensor.dtype),
        ):
            if a != b:
                ends = f"rank {source.rank} issued {source}, rank {target.rank} issued {target}"
                self.abort(f"mismatch of {name} in point-to-point: {ends}")
        with torch.no_grad():
            received.tensor.copy_(sent.tensor)
        self.open(source.gate)
        self.open(target.gate)


class _GateWork(NamedTuple):
    world: _World
    rank: int
    gate: _Gate

    def wait(self) -> None:
        self.world.block(self.rank, self.gate)


class ThreadComm:
    """`Comm` of one rank among threads; made by `run_threads`."""

    def __init__(self, world: _World, rank: int):
        self._world = world
        self.rank = rank
        self.world_size = world.size

    def group(self, axes: tuple[str, ...], ranks: tuple[int, ...]) -> Group:
        index = group_index(axes, ranks, self.rank, self.world_size)
        channel = self._world.channels.setdefault((axes, ranks), _Channel(axes, ranks, [0] * len(ranks)))
        return Group(axes, ranks, index, channel)

    def point_to_point_group(self, ranks: tuple[int, ...], axes: tuple[str, ...] = ("pp",)) -> None:
        """Nothing to prepare: queues exist between all ranks."""

    def all_reduce(self, x: torch.Tensor, group: Group, op: str = "sum") -> Work:
        require_op(op)
        require(x, x, x.numel())
        return self._start("all_reduce", group, x, x, op)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Work:
        require(out, x, x.numel() * group.size)
        return self._start("all_gather", group, out, x, "")

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Work:
        require_divisible(x, group.size)
        require(out, x, x.numel() // group.size)
        return self._start("reduce_scatter", group, out, x, "sum")

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> None:
        require_divisible(x, group.size)
        require(out, x, x.numel())
        self._start("all_to_all", group, out, x, "").wait()

    def post(self, batch: list[Message]) -> list[Work]:
        for message in batch:
            require(message.tensor, message.tensor, message.tensor.numel())
        return [_GateWork(self._world, self.rank, gate) for gate in self._world.post(self.rank, batch)]

    def _start(self, kind: str, group: Group, out: torch.Tensor, x: torch.Tensor, op: str) -> Work:
        return _GateWork(self._world, self.rank, self._world.arrive(group, kind, op, out, x))
