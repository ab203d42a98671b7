"""Sums of whole gradients run behind the backward: when they start, and when they are waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from shardwise.collective import Labels, Phase
from shardwise.plan.layout import parse
from shardwise.train.comm import Comm, Group, Work
from shardwise.train.rank import build_rank, gradients
from shardwise.train.reduction import Reductions, Start
from shardwise.train.threads import run_threads
from tests.support.filled import filled_by
from tests.support.models import job, tiny
from tests.support.parity import batches, local_data


@dataclass
class Logged:
    """A work that tells when it is waited for."""

    log: list[str]
    name: str
    work: Work | None = None

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        if self.work is not None:
            self.work.wait()


def moves(log: list[str], *names: str) -> list[Start]:
    """Those of one sum; "-" is one on a group of one rank."""

    def start(name: str) -> Work | None:
        if name == "-":
            return None
        log.append(name)
        return Logged(log, name)

    return [lambda name=name: start(name) for name in names]


def test_a_sum_goes_on_when_another_starts_and_one_at_a_time_is_under_way() -> None:
    log: list[str] = []
    sums = Reductions()
    for names in (("a1", "-", "a2"), ("-",), ("b1",), ("c1", "c2", "c3")):
        sums.add(moves(log, *names))
    assert log == ["a1", "wait a1", "a2", "wait a2", "b1", "wait b1", "c1"]
    sums.finish()
    assert log[7:] == ["wait c1", "c2", "wait c2", "c3", "wait c3"]
    sums.finish()
    assert len(log) == 12


class Watched:
    """A rank's communication that logs its sums of gradients."""

    def __init__(self, comm: Comm, labels: Labels, log: list[str]) -> None:
        self.comm, self.labels, self.log = comm, labels, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def all_reduce(self, x: torch.Tensor, group: Group, op: str = "sum") -> Work:
        return self._logged(self.comm.all_reduce(x, group, op))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Work:
        return self._logged(self.comm.reduce_scatter(out, x, group))

    def _logged(self, work: Work) -> Work:
        if self.labels.phase != Phase.REDUCE:
            return work
        self.log.append(self.labels.module)
        return Logged(self.log, self.labels.module, work)


@pytest.mark.parametrize("text", ["dp=2 mb=2", "dp=2 zero=1 mb=2", "pp=2 dp=2 schedule=zb-h1 mb=1"])
def test_a_layers_sum_is_under_way_while_the_layers_below_it_compute(text: str) -> None:
    """Of layers that fill their buckets."""
    layout = parse(text)
    work = job(tiny(4), f"{layout.world_size}xcpu", batch=8)

    def rank(comm: Comm) -> list[str]:
        log: list[str] = []

        @contextmanager
        def watch(labels: Labels) -> Iterator[None]:
            if labels.phase in (Phase.B, Phase.W) and not labels.axis and labels.module in built.states:
                log.append(f"backward of {labels.module}")
            yield

        labels = Labels(watch=watch)
        built = build_rank(work, layout, cast(Comm, Watched(comm, labels, log)), labels)
        tokens = batches(work.model.vocab, work.seq_len, 8, masked=False)[0]
        ids, targets = (local_data(work, layout, built, x) for x in tokens)
        gradients(built, ids if built.needs_ids else None, targets if built.needs_targets else None)
        return log

    with filled_by(1):
        logs = run_threads(layout.world_size, rank)
    for log in logs:
        sums = [entry for entry in log if not entry.startswith(("backward", "wait"))]
        last = [len(log) - 1 - log[::-1].index(f"backward of {unit}") for unit in sums]
        starts = [log.index(unit) for unit in sums]
        assert len(sums) > 2
        assert last == sorted(last)
        assert all(own < start < below for own, start, below in zip(last, starts, last[1:], strict=False))
        waits = [log.index(f"wait {unit}") for unit in sums]
        assert all(wait > below for wait, below in zip(waits, last[1:], strict=False))
