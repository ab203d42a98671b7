"""Start the ranks of this machine, when no launcher did, by forking; end all of them when one fails.

A fork costs 0.1 s a rank where a spawn pays for importing torch again (2 s). It is safe as long as this process has
imported torch but run no operation of it, and has started no threads.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

TERMINATE_S = 5.0
"""From SIGTERM to SIGKILL."""

GATHER_S = 0.3
"""After the first sign of failure: when one rank dies, its peers fail too, and the first to be heard may be a peer."""

FRAMES = 4
"""Innermost stack frames reported, of each exception in the chain."""

PR_SET_PDEATHSIG = 1

OnWord = Callable[[Any], None]


def launch(
    world_size: int,
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    timeout_s: float | None = None,
    on_word: OnWord | None = None,
) -> list[Any]:
    """Run `target(rank, world_size, init_method, *args)` in one forked process per rank; their results in rank order.

    `init_method` is a file rendezvous for `open_world`. Output is inherited. Results are pickled. With `on_word` the
    target takes one argument more: what a rank calls it with is pickled, and `on_word` is called with it here, soon.
    Raises RankFailed when a rank raises, dies, or is not done after `timeout_s`; by then, as after any other
    exception (Ctrl-C, SIGTERM, one of `on_word`), all ranks have ended: SIGTERM, then SIGKILL. A rank never outlives
    this process (on Linux).
    """
    context = multiprocessing.get_context("fork")
    with _sigterm_raises(), tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        init_method = f"file://{Path(folder, 'rendezvous')}"
        children: list[_Child] = []
        try:
            with _ctrl_c_held_back():
                for rank in range(world_size):
                    reader, writer = context.Pipe(duplex=False)
                    tell = () if on_word is None else (partial(_tell, writer),)
                    call = (writer, os.getpid(), target, (rank, world_size, init_method, *args, *tell))
                    process = context.Process(target=_rank_main, args=call, name=f"rank {rank}")
                    process.start()
                    children.append(_Child(rank, process, reader))
                    writer.close()  # only the child holds it now, so that its death shows as the end of the file
            return _supervise(children, timeout_s, on_word)
        finally:
            _end(children)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM, a scheduler's last word, unwind this process instead of cutting it off."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may have handlers
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Deliver SIGINT at the end of the block: no rank is forked and then forgotten, none hears of it unprepared."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rank_main(writer: connection.Connection, parent: int, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The child. It leaves Ctrl-C, which the terminal sends to every process, to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(parent)
    try:
        _send(writer, _Message(result=target(*args)))
    except BaseException as error:  # whatever ends the rank is the parent's to report, SystemExit included
        _send(writer, _Message(failure_of(error), time.monotonic()))
    finally:
        writer.close()


def failure_of(error: BaseException) -> Failure:
    """What is told of an exception that ended a rank. One with a `kind` is told in its own words, and may be of another
    rank's failure, which all ranks have heard of."""
    step, kind = getattr(error, "step", None), getattr(error, "kind", None)
    if kind is not None:
        return Failure(str(error), getattr(error, "trace", ""), step, getattr(error, "rank", None), kind)
    rows = "".join(traceback.format_exception(error, limit=-FRAMES)).splitlines()
    trace = "\n".join(row for row in rows if row.strip(" ^~"))  # without the marks under the lines
    return Failure(f"{type(error).__name__}: {error}", trace, step)


def _tell(writer: connection.Connection, content: Any) -> None:
    _send(writer, _Word(content))


def _send(writer: connection.Connection, message: _Message | _Word) -> None:
    """Pickled here: `writer.send` would hand a tensor over by shared memory, which ends with this process."""
    content = pickle.dumps(message)
    sys.stdout.flush()  # what was printed must be out before the parent hears of a failure and ends this process
    sys.stderr.flush()
    writer.send_bytes(content)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _supervise(children: list[_Child], timeout_s: float | None, on_word: OnWord | None) -> list[Any]:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = {child.reader: child for child in children}
    results: dict[int, Any] = {}
    while waiting:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            late = sorted(child.rank for child in waiting.values())
            raise RankFailed(late[0], Failure(f"not done after {timeout_s:g} s, like all of {late}"))
        heard = _hear(waiting, left, on_word)
        if any(report.failed for report in heard):
            until = time.monotonic() + GATHER_S
            while waiting and (left := until - time.monotonic()) > 0:
                heard += _hear(waiting, left, on_word)
            raise _root_cause([report for report in heard if report.failed])
        results |= {report.rank: report.message.result for report in heard if report.message}
    return [results[child.rank] for child in children]


def _hear(
    waiting: dict[connection.Connection, _Child], timeout_s: float | None, on_word: OnWord | None
) -> list[_Report]:
    """Wait for ranks to speak: words are passed on, reports returned; their children no longer wait."""
    ready = connection.wait(list(waiting), timeout_s)
    reports: list[_Report] = []
    for reader in [reader for reader in waiting if reader in ready]:
        heard = waiting[reader].listen()
        if isinstance(heard, _Report):
            del waiting[reader]
            reports.append(heard)
        elif on_word is not None:
            on_word(heard.content)
    return reports


def _root_cause(failed: list[_Report]) -> RankFailed:
    """The first failure; who dies without a word cannot name its step, but its peers name theirs."""
    first = min(failed, key=_Report.order)
    steps = [report.failure.step for report in failed if report.failure.step is not None]
    failure = first.failure if first.failure.step is not None else first.failure._replace(step=min(steps, default=None))
    return RankFailed(first.rank, failure)


def _end(children: list[_Child]) -> None:
    """Give ranks that are done the time to leave by themselves; stop the others."""
    done = time.monotonic() + TERMINATE_S
    for child in children:
        if not child.finished:
            child.process.terminate()
    for child in children:
        child.process.join(max(0.0, done - time.monotonic()))
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
        child.reader.close()
        child.process.close()


class Failure(NamedTuple):
    """Why a rank ended: `cause` in one line, `trace` its innermost frames, `step` and `rank` where the exception names
    them. `kind`: "input" or "io" where it is no fault of the program."""

    cause: str
    trace: str = ""
    step: int | None = None
    rank: int | None = None
    kind: str = "fault"


class RankFailed(RuntimeError):  # noqa: N818 - says what happened
    """A rank raised, died or was late. `step` is the attribute of that name of the exception that it raised."""

    def __init__(self, rank: int, failure: Failure):
        super().__init__(rank, failure)
        self.rank = rank if failure.rank is None else failure.rank
        self.cause, self.trace, self.step, self.kind = failure.cause, failure.trace, failure.step, failure.kind

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.step is None else f"rank {self.rank}, step {self.step}"
        return f"{where}: {self.cause}" + (f"\n{self.trace}" if self.trace else "")


class _Word(NamedTuple):
    """What a child says while it runs."""

    content: Any


class _Message(NamedTuple):
    """A child's last word to its parent: its result or, with a failure, when that happened."""

    failure: Failure | None = None
    time: float = 0.0
    result: Any = None


class _Report(NamedTuple):
    """What the parent heard of a rank: its message, or how it ended without one."""

    rank: int
    message: _Message | None
    death: str = ""

    @property
    def failed(self) -> bool:
        return self.message is None or self.message.failure is not None

    @property
    def failure(self) -> Failure:
        found = self.message.failure if self.message else None
        return found or Failure(self.death)

    def order(self) -> tuple[bool, float]:
        """The root cause first: a death without a word, then the earliest error (one clock serves all processes)."""
        return (True, self.message.time) if self.message else (False, 0.0)


@dataclass(slots=True, eq=False)
class _Child:
    rank: int
    process: BaseProcess
    reader: connection.Connection
    finished: bool = False

    def listen(self) -> _Report | _Word:
        try:
            message: _Message | _Word = pickle.loads(self.reader.recv_bytes())
        except (EOFError, OSError):
            self.process.join(TERMINATE_S)
            return _Report(self.rank, None, _death_text(self.process.exitcode))
        if isinstance(message, _Word):
            return message
        self.finished = message.failure is None
        return _Report(self.rank, message)


def _death_text(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"ended without a word, exit code {exitcode}"
