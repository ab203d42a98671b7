"""Ranks that are threads take turns: on one core they hand over without waking another one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_core(request: pytest.FixtureRequest, worker_id: str) -> Iterator[None]:
    """A core for each worker, where its test starts no processes."""
    if request.node.get_closest_marker("dist") or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    number = int("0" + "".join(filter(str.isdigit, worker_id)))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
