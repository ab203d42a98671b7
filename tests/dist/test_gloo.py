"""Compositions on real processes over gloo, against the same one-process run; one of them under torchrun too."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.collective import Labels
from shardwise.plan.job import Job
from shardwise.plan.layout import ZERO, parse
from shardwise.train.comm import Comm
from shardwise.train.distributed import close_world, open_world
from shardwise.train.threads import run_threads
from tests.dist.pool import run_gloo
from tests.support.front import NAMES, RECOMPUTE, Case
from tests.support.parity import RankTrace, assert_parity, run_rank

torch.set_num_threads(1)

HERE = "tests.dist.test_gloo"

CHOSEN = (
    # every way to hold the state
    "dp=4 mb=1",
    "dp=4 zero=1 mb=2",
    "dp=4 zero=2 mb=1 recompute=full",
    "dp=4 zero=3 mb=1 recompute=full",
    "dp_replicate=2 dp_shard=2 zero=1 mb=1",
    "dp_replicate=2 dp_shard=2 zero=2 mb=1",
    "dp_replicate=2 dp_shard=2 zero=3 mb=2",
    # tensor and sequence parallelism
    "tp=4 sp=0 mb=2",
    "tp=4 mb=2 recompute=full",
    "tp=2 dp=2 zero=3 mb=2 recompute=norm,act,core",
    "tp=2 sp=0 dp=2 zero=2 mb=2 recompute=full",
    # every schedule, with every other axis
    "pp=4 schedule=gpipe mb=1",
    "pp=2 dp=2 zero=3 schedule=gpipe mb=1",
    "pp=4 mb=4",
    "tp=2 pp=2 mb=2 recompute=full",
    "pp=2 dp=2 zero=3 mb=1",
    "tp=2 sp=0 pp=2 schedule=interleaved:2 mb=2",
    "pp=2 dp=2 zero=3 schedule=interleaved:2 mb=1",
    "tp=2 pp=2 schedule=zb-h1 mb=2",
    "pp=2 dp=2 zero=2 schedule=zb-h1 mb=1 recompute=full",
    "pp=4 schedule=zb-h2 mb=1",
    "pp=2 dp=2 zero=1 schedule=zb-h2 mb=1",
    "pp=4 schedule=zb-v mb=1",
    "tp=2 pp=2 schedule=zb-v mb=2",
    "pp=2 dp=2 zero=3 schedule=zb-v mb=1 recompute=full",
    "pp=2 dp=2 zero=2 schedule=dualpipe-v mb=1",
    "tp=2 pp=2 schedule=dualpipe-v mb=2",
    "pp=4 schedule=dualpipe mb=1",
    # all axes at once
    "tp=2 pp=2 dp=2 zero=1 mb=2",
    "pp=2 dp_replicate=2 dp_shard=2 zero=2 schedule=dualpipe mb=1",
    "tp=2 pp=2 dp=2 zero=3 schedule=zb-v mb=2 recompute=full",
)
UNDER_TORCHRUN = "pp=2 schedule=zb-h1 mb=2"
NARROW = "tp=2 pp=2 dp=2 zero=2 mb=2"


def work_of(text: str, precision: str = "fp64") -> Job:
    """Tied where there is a pipeline: both of its ends hold a copy."""
    layout = parse(text)
    return Case(layout, tied=layout.pp > 1).job(precision)


def rank(comm: Comm, text: str, masked: bool, precision: str = "fp64") -> RankTrace:
    """One rank of a case: what the pool calls."""
    torch.set_num_threads(1)
    return run_rank(comm, work_of(text, precision), parse(text), masked)


@pytest.mark.dist
@pytest.mark.parametrize("text", CHOSEN)
def test_gloo_equals_one_process(text: str) -> None:
    traces = run_gloo(parse(text).world_size, f"{HERE}:rank", text, True)
    assert_parity(traces, work_of(text), masked=True)


def test_every_schedule_and_every_way_to_hold_the_state_is_among_them() -> None:
    layouts = [parse(text) for text in CHOSEN]
    assert {x.schedule for x in layouts if x.pp > 1} == set(NAMES)
    assert {x.zero for x in layouts} == set(ZERO)
    assert {x.recompute for x in layouts} == set(RECOMPUTE)


@pytest.mark.dist
def test_gloo_equals_threads_in_bf16() -> None:
    """Sums of two have one order: gradients and weights of the first step are those of the threads, bit for bit.

    The scalars are sums over all ranks, which gloo takes in an order of its own.
    """
    world_size = parse(NARROW).world_size
    found = run_gloo(world_size, f"{HERE}:rank", NARROW, True, "bf16")
    wanted = run_threads(world_size, lambda comm: rank(comm, NARROW, True, "bf16"))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.losses, theirs.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(mine.norms, theirs.norms, rtol=1e-5, atol=0)
        for one, other in zip(mine.gradients[0], theirs.gradients[0], strict=True):
            assert one.box == other.box
            assert torch.equal(one.value, other.value), one.name


def under_torchrun(folder: Path) -> None:
    """One rank that torchrun started: leaves its trace in the folder."""
    me, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    comm = open_world("gloo", me, world_size, labels=Labels(), timeout_s=30)
    try:
        trace = rank(comm, UNDER_TORCHRUN, False)
    finally:
        close_world()
    (folder / f"{me}.pickle").write_bytes(pickle.dumps(trace))


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_equals_one_process(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    imports = "from pathlib import Path; from tests.dist.test_gloo import under_torchrun"
    code = f"{imports}; under_torchrun(Path({str(tmp_path)!r}))"
    script = tmp_path / "rank.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}:{root / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    traces = [pickle.loads((tmp_path / f"{r}.pickle").read_bytes()) for r in range(2)]
    assert_parity(traces, work_of(UNDER_TORCHRUN), masked=False)
