"""Communicators that the account assumes memory for, against those that a rank really opens."""

from __future__ import annotations

import pytest
import torch

from shardwise.account.static import columns_of
from shardwise.collective import Labels
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.layout import parse
from shardwise.train.distributed import DistributedComm, close_world, open_world
from shardwise.train.rank import build_rank
from tests.support.models import job, tiny

torch.set_num_threads(1)


def opened(comm: DistributedComm) -> int:
    """Distinct process groups of one rank, collectives and point-to-point."""
    groups = [*comm._groups.values(), *comm._pairs.values()]
    return len({id(g.handle) for g in groups})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("mb=1", 0),
        ("tp=4 mb=1", 1),
        ("dp=4 zero=3 mb=1", 1),
        ("dp_replicate=2 dp_shard=2 zero=1 mb=1", 3),  # each axis, both
        ("pp=4 mb=1", 2),  # the loss and the norm share one, messages have their own
        ("tp=2 pp=2 mb=1", 4),
        ("pp=4 dp=2 zero=1 schedule=zb-h1 mb=1", 3),
        ("tp=2 pp=2 dp_replicate=2 dp_shard=2 zero=3 mb=1", 7),
        ("pp=4 schedule=dualpipe-v mb=1", 2),
        ("pp=4 schedule=dualpipe mb=1", 3),  # and the two ranks that hold the same stages
        ("tp=2 pp=4 schedule=dualpipe mb=1", 5),
        ("pp=4 dp=2 zero=2 schedule=dualpipe mb=1", 4),
    ],
)
def test_communicators_are_counted_as_they_are_made(text: str, count: int, tied: bool) -> None:
    """On rank 0, which holds a tied weight's first copy. The two ends of a V, and those of two copies, share it."""
    layout = parse(text)
    work = job(tiny(6, tied), f"{layout.world_size}xcpu", batch=16)
    comm = open_world("fake", 0, layout.world_size, labels=Labels())
    try:
        build_rank(work, layout, comm, Labels(), seed=None, device=torch.device("meta"))
        made = opened(comm)
    finally:
        close_world()
    assumed = int(columns_of(work, LayoutBatch.of([layout]).expanded(2)).groups.item())
    copies = tied and layout.pp > 1 and not layout.schedule.startswith("dualpipe")
    assert assumed == count + copies
    # Two pipeline ranks that hold the copies may be the whole group of another collective.
    assert assumed - copies <= made <= assumed
