"""The dry run against the real CPU allocator: the same training step in one process, whatever is computed again."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.collective import Labels
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.prove.dryrun import prove_rank
from shardwise.train.distributed import close_world, open_world
from shardwise.train.rank import build_rank, train_step
from tests.support.models import job, tiny

torch.set_num_threads(1)


def allocator_peak(work: Job, layout: Layout, trace: Path) -> int:
    """The CPU allocator's highest level during one step, as torch's profiler reports it."""
    labels = Labels()
    comm = open_world("fake", 0, 1, labels=labels)
    gc.collect()  # nothing of an earlier run may be freed in between
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            torch.empty(16, dtype=torch.uint8)  # its event tells the level at the start
            rank = build_rank(work, layout, comm, labels, seed=None)
            shape = (work.micro_batches(layout), work.cut(layout).tokens)
            ids, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
            with record_function("the step"):
                train_step(rank, ids, targets)
    finally:
        close_world()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    step = next(e for e in events if e.get("name") == "the step" and e.get("cat") == "user_annotation")
    start, end = step["ts"], step["ts"] + step["dur"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    before = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
    return max(e["args"]["Total Allocated"] for e in memory if start <= e["ts"] <= end) - before


@pytest.mark.parametrize("recompute", ["none", "full", "act", "norm,core", "norm,act,core"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_dry_run_equals_the_real_allocator(recompute: str, tied: bool, tmp_path: Path) -> None:
    work = job(tiny(4, tied, hidden=256, ffn=704, vocab=2048), "1xcpu", seq_len=256, batch=4, precision="fp32")
    layout = parse(f"mb=2 recompute={recompute}")
    proof = prove_rank(work, layout, 0)
    real = allocator_peak(work, layout, tmp_path / "trace.json")
    assert proof.measured_peak_bytes == pytest.approx(real, rel=1e-3)
    assert proof.ok
