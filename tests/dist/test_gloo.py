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
from shardwise.plan.layout import parse
from shardwise.train.comm import Comm
from shardwise.train.distributed import close_world, open_world
from tests.dist.pool import run_gloo
from tests.support.models import job, tiny
from tests.support.parity import RankTrace, assert_parity, run_rank

torch.set_num_threads(1)

CHOSEN = (
    "dp=4 mb=1",
    "dp=4 zero=1 mb=2",
    "dp=4 zero=3 mb=1 recompute=full",
    "dp_replicate=2 dp_shard=2 zero=3 mb=2",
    "tp=4 sp=0 mb=2",
    "tp=4 mb=2 recompute=full",
    "pp=4 schedule=gpipe mb=1",
    "pp=2 dp=2 zero=3 schedule=interleaved:2 mb=1",
    "tp=2 pp=2 schedule=zb-h1 mb=1",
    "tp=2 pp=2 dp=2 zero=1 mb=1",
    "pp=2 dp=2 zero=2 schedule=dualpipe-v mb=1",
    "pp=2 dp_replicate=2 dp_shard=2 zero=2 schedule=dualpipe mb=1",
)
UNDER_TORCHRUN = CHOSEN[8]


def work_of(text: str, tied: bool) -> Job:
    layout = parse(text)
    return job(tiny(3, tied), f"{layout.world_size}xcpu")


def rank(comm: Comm, text: str, tied: bool, masked: bool) -> RankTrace:
    """One gloo rank of a case: what the pool calls."""
    torch.set_num_threads(1)
    return run_rank(comm, work_of(text, tied), parse(text), masked)


@pytest.mark.dist
@pytest.mark.parametrize("text", CHOSEN)
def test_gloo_equals_one_process(text: str) -> None:
    tied = "pp" in text  # both ends of the pipeline hold a copy
    traces = run_gloo(parse(text).world_size, "tests.dist.test_gloo:rank", text, tied, True)
    assert_parity(traces, work_of(text, tied), masked=True)


def under_torchrun(folder: Path) -> None:
    """One rank that torchrun started: leaves its trace in the folder."""
    me, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    comm = open_world("gloo", me, world_size, labels=Labels(), timeout_s=30)
    try:
        trace = rank(comm, UNDER_TORCHRUN, True, False)
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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    traces = [pickle.loads((tmp_path / f"{r}.pickle").read_bytes()) for r in range(4)]
    assert_parity(traces, work_of(UNDER_TORCHRUN, True), masked=False)
