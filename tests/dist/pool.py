"""Real gloo ranks for tests: a fork server that has imported torch and run nothing of it.

`run_gloo(4, "module:function", *args)` calls `function(comm, *args)` in four forked processes, joined over gloo, and
returns the four results. The server starts at the first call (a fresh interpreter, since TORCH_DISTRIBUTED_DEBUG must
be set before torch is imported, and since the process that runs the tests has used torch) and ends with its client.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import select
import subprocess
import sys
from typing import IO, Any

PRELOADED = (
    "pytest",
    "shardwise.train.checkpoint",
    "shardwise.train.loop",
    "tests.support.parity",
    # what torch's first backward and first optimizer import, 1.2 s a rank
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
)
"""Imported by the server once, so that no rank imports them again; the test's own module is imported by the ranks."""

PATIENCE_S = 20.0
"""Beyond a case's own timeout: the start of the server, and the end of the ranks."""


def run_gloo(world_size: int, function: str, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Results in rank order. Raises `launch.RankFailed`, naming rank and cause; TimeoutError if the server is stuck."""
    answer = _server.ask((world_size, function, args, timeout_s), timeout_s + PATIENCE_S)
    if isinstance(answer, Exception):
        raise answer
    return [pickle.loads(result) for result in answer]


class _Server:
    """The client's end of the fork server, started when it is first asked, and again after it got stuck."""

    process: subprocess.Popen[bytes] | None = None

    def ask(self, request: object, timeout_s: float) -> Any:
        process = self.process
        if process is None or process.poll() is not None:
            self.process = process = self._start()
        assert process.stdin
        assert process.stdout
        pickle.dump(request, process.stdin)
        process.stdin.flush()
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            self.stop()
            raise TimeoutError(f"the fork server did not answer within {timeout_s:g} s: {request}")
        return pickle.load(process.stdout)

    def stop(self) -> None:
        if self.process is not None:
            with self.process as process:
                process.kill()  # its ranks die with it
            self.process = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL",  # without it gloo lets a [3] meet a [4] in silence
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, os.path.abspath(__file__)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


_server = _Server()
atexit.register(_server.stop)


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    from shardwise.train.launch import launch

    while True:
        try:
            world_size, function, args, timeout_s = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Any = launch(world_size, _rank, (function, args, timeout_s), timeout_s)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


def _rank(
    rank: int, world_size: int, init_method: str, function: str, args: tuple[Any, ...], timeout_s: float
) -> bytes:
    """The result is pickled here and unpickled by the client, so that no tensor comes to life in the server."""
    import torch

    from shardwise.train.distributed import close_world, open_world

    torch.set_num_threads(1)
    comm = open_world("gloo", rank, world_size, init_method, timeout_s=timeout_s / 2)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(comm, *args)
    close_world()
    return pickle.dumps(result)


def _main() -> None:
    # Ranks inherit standard output: what they print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name in PRELOADED:
        importlib.import_module(name)
    _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
