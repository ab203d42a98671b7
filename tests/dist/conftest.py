"""Ranks that are threads take turns: on one core they hand over without waking another one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """A core for each worker, where its test is not marked as one that starts processes: these would inherit it, and a
    server for later tests too."""
    if request.node.get_closest_marker("dist") or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
