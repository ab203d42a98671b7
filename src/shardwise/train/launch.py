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
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
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


def launch(
    world_size: int, target: Callable[..., Any], args: tuple[Any, ...] = (), timeout_s: float | None = None
) -> list[Any]:
    """Run `target(rank, world_size, init_method, *args)` in one forked process per rank; their results in rank order.

    `init_method` is a file rendezvous for `open_world`. Output is inherited. Results are pickled. Raises RankFailed
    when a rank raises, dies, or is not done after `timeout_s`; by then, as after any other exception (Ctrl-C), all
    ranks have ended: SIGTERM, then SIGKILL. A rank never outlives this process (on Linux).
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        init_method = f"file://{Path(folder, 'rendezvous')}"
        children: list[_Child] = []
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                call = (writer, os.getpid(), target, rank, world_size, init_method, args)
                process = context.Process(target=_rank_main, args=call, name=f"rank {rank}")
                process.start()
                children.append(_Child(rank, process, reader))
                writer.close()  # only the child holds it now, so that its death shows as the end of the file
            return _supervise(children, timeout_s)
        finally:
            _end(children)


def _rank_main(
    writer: connection.Connection,
    parent: int,
    target: Callable[..., Any],
    rank: int,
    world_size: int,
    init_method: str,
    args: tuple[Any, ...],
) -> None:
    """The child. It leaves Ctrl-C, which the terminal sends to every process, to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(parent)
    try:
        result = target(rank, world_size, init_method, *args)
        _send(writer, _Message(time.monotonic(), result=result))
    except BaseException as error:  # whatever ends the rank is the parent's to report, SystemExit included
        text = "".join(traceback.format_exception(error, limit=-FRAMES))
        step = getattr(error, "step", None)
        _send(writer, _Message(time.monotonic(), f"{type(error).__name__}: {error}", text, step))
    finally:
        writer.close()


def _send(writer: connection.Connection, message: _Message) -> None:
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


def _supervise(children: list[_Child], timeout_s: float | None) -> list[Any]:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = {child.reader: child for child in children}
    results: dict[int, Any] = {}
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        heard = _hear(waiting, left)
        if not heard:
            late = sorted(child.rank for child in waiting.values())
            raise RankFailed(late[0], f"not done after {timeout_s:g} s, like all of {late}")
        if any(report.failed for report in heard):
            time.sleep(GATHER_S)
            heard += _hear(waiting, 0.0)
            raise min((report for report in heard if report.failed), key=_Report.order).error()
        results |= {report.rank: report.message.result for report in heard if report.message}
    return [results[child.rank] for child in children]


def _hear(waiting: dict[connection.Connection, _Child], timeout_s: float | None) -> list[_Report]:
    """The reports that have come, once there is one; their children no longer wait."""
    ready = connection.wait(list(waiting), timeout_s)
    return [waiting.pop(reader).listen() for reader in list(waiting) if reader in ready]


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


class RankFailed(RuntimeError):  # noqa: N818 - says what happened
    """A rank raised, died or was late: `cause` in one line, `trace` its innermost frames.

    `step` is the attribute of that name of the exception that it raised, where there is one.
    """

    def __init__(self, rank: int, cause: str, trace: str = "", step: int | None = None):
        super().__init__(rank, cause, trace, step)
        self.rank, self.cause, self.trace, self.step = rank, cause, trace, step

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.step is None else f"rank {self.rank}, step {self.step}"
        return f"{where}: {self.cause}" + (f"\n{self.trace.rstrip()}" if self.trace else "")


class _Message(NamedTuple):
    """A child's only word to its parent: its result or, with a cause, its failure."""

    time: float
    cause: str = ""
    trace: str = ""
    step: int | None = None
    result: Any = None


class _Report(NamedTuple):
    """What the parent heard of a rank: its message, or how it ended without one."""

    rank: int
    message: _Message | None
    death: str = ""

    @property
    def failed(self) -> bool:
        return self.message is None or bool(self.message.cause)

    def order(self) -> tuple[bool, float]:
        """The root cause first: a death without a word, then the earliest error (one clock serves all processes)."""
        return (True, self.message.time) if self.message else (False, 0.0)

    def error(self) -> RankFailed:
        if self.message is None:
            return RankFailed(self.rank, self.death)
        return RankFailed(self.rank, self.message.cause, self.message.trace, self.message.step)


@dataclass(slots=True, eq=False)
class _Child:
    rank: int
    process: BaseProcess
    reader: connection.Connection
    finished: bool = False

    def listen(self) -> _Report:
        try:
            message: _Message = pickle.loads(self.reader.recv_bytes())
        except (EOFError, OSError):
            self.process.join(TERMINATE_S)
            return _Report(self.rank, None, _death_text(self.process.exitcode))
        self.finished = not message.cause
        return _Report(self.rank, message)


def _death_text(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"ended without a word, exit code {exitcode}"
