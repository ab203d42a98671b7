"""A survey on two cores: a forked process looks at every other pipeline, from before the search begins."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

from shardwise.plan.job import Job
from shardwise.search.heap import no_collection
from shardwise.search.limits import Limits
from shardwise.search.solve import Front, Progress, Survey, survey

LEAST_RANKS: Final = 256
"""Of smaller clusters a survey is over before a process would have started."""

OURS, THEIRS = slice(0, None, 2), slice(1, None, 2)
"""Which pipelines, of a survey's order."""


@contextmanager
def halves(job: Job, limits: Limits) -> Generator[Survey]:
    """A survey of this job that takes half the time; a plain one where there is one core, or no fork.

    Forks at once: enter it before a thread is started. The other process ends with the block, and with this one.
    """
    if job.cluster.world_size < LEAST_RANKS or not _can_fork():
        yield survey
        return
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    other = context.Process(target=_other_half, args=(writer, job, limits), daemon=True)
    other.start()
    writer.close()

    def both(job: Job, limits: Limits, tell: Progress) -> Front:
        front = survey(job, limits, tell, OURS)
        front.join(_received(reader) or survey(job, limits, tell, THEIRS))
        return front

    try:
        yield both
    finally:
        reader.close()
        other.kill()
        other.join()


def _can_fork() -> bool:
    """On macOS numpy's library does not survive it."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


def _received(reader: Connection) -> Front | None:
    """None where the other process did not come to its end: whatever it was, it will show here again."""
    try:
        return reader.recv()
    except EOFError:
        return None


def _other_half(writer: Connection, job: Job, limits: Limits) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the first process's to tell of
    try:
        with no_collection():
            writer.send(survey(job, limits, share=THEIRS).small())
    except BaseException:
        os._exit(1)
    os._exit(0)  # nothing that was copied from the first process, such as its streams' buffers, is to end here
