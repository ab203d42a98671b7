"""`shardwise` as a command, for tests: as a process of its own, or forked from a server that has imported torch.

Most of a short run is spent on importing torch, so a test forks unless it is about the start or the signals of a real
process. What is forked leads a session of its own and has its own streams, environment and arguments, as a command
has; it ends with the exit code of `main()`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT), *filter(None, sys.path))),
    "OMP_NUM_THREADS": "1",
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
PATIENCE_S = 120.0

PRELOADED = ("shardwise.cli", "shardwise.train.loop", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
"""The last two are what torch's first backward and first optimizer import."""


class Forked:
    """A forked `shardwise`, with what the tests take of subprocess.Popen. `code`: what to run instead of `main()`."""

    def __init__(self, words: tuple[object, ...], code: str | None, environment: dict[str, str]) -> None:
        self.args = [str(word) for word in words]
        server = _server()
        (out, out_end), (err, err_end) = server.Pipe(duplex=False), server.Pipe(duplex=False)
        self._process = server.Process(target=_command, args=(self.args, code, environment, out_end, err_end))
        self._process.start()
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno())) for end in (out, err))
        for end in (out, out_end, err, err_end):
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"{self.args} did not end within {timeout:g} s")
        return self._process.exitcode

    def kill(self) -> None:
        """It and its session."""
        self._process.kill()
        _end(self.pid)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What is left of both streams, and the end."""
        found = ["", ""]

        def read(place: int, stream: IO[str]) -> None:
            found[place] = stream.read()

        readers = [
            threading.Thread(target=read, args=each, daemon=True) for each in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
        self.wait(timeout)
        return found[0], found[1]


@lru_cache(maxsize=1)
def _server() -> ForkServerContext:
    """Started with the environment of the commands: some of it is read when torch is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _command(words: list[str], code: str | None, environment: dict[str, str], out: Connection, err: Connection) -> None:
    """The child: become a command."""
    os.setsid()
    for end, number in ((out, 1), (err, 2)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - they stay open
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["shardwise", *words]
    if code is None:
        from shardwise.cli import main

        main()
    else:
        exec(compile(code, "<command>", "exec"), {"__name__": "__main__"})


@contextmanager
def forked(*words: object, code: str | None = None, **environment: str) -> Iterator[Forked]:
    """`shardwise` with these words; whatever is left of its session at the end is killed."""
    process = Forked(words, code, ENVIRONMENT | environment)
    try:
        yield process
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()


def shardwise(*words: object, code: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command's end; nothing that it started is left in its session."""
    with forked(*words, code=code, **environment) as process:
        out, err = process.communicate(PATIENCE_S)
        assert not session_members(process.pid), "processes are left"
        return subprocess.CompletedProcess(process.args, process.wait(0), out, err)


@contextmanager
def started(*command: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process at the head of a session of its own; whatever is left of it at the end is killed."""
    with subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | environment,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            _end(process.pid)


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same of a process of its own."""
    with started(*command, **environment) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert not session_members(process.pid), "processes are left"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _end(session: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """Live processes of a session, by /proc; none where there is no /proc."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Our own lines on stderr."""
    return [line.removeprefix("shardwise: ") for line in done.stderr.splitlines() if line.startswith("shardwise: ")]
