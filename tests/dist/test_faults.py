"""A rank that ends in any phase of a run ends all, in one message; and files that cannot be written are named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardwise.train.options import checkpoints
from tests.dist.commands import said, shardwise
from tests.dist.test_checkpoint_runs import small_plan
from tests.dist.test_train import train

pytestmark = pytest.mark.dist

BROKEN_PHASE = """
import os, signal, sys
import torch.distributed
from shardwise.cli import main
from shardwise.train import checkpoint, loop

how, phase = sys.argv.pop(1), sys.argv.pop(1)
started = os.getpid()

def broken(ours):
    def call(*words, **names):
        if os.getpid() != started:
            rank = words[1] if phase == "joining" else torch.distributed.get_rank()
            if rank == 1:
                if how == "raise":
                    raise ValueError("boom")
                os.kill(os.getpid(), signal.SIGKILL)
        return ours(*words, **names)
    return call

module, name = {
    "joining": (loop, "open_world"),
    "building": (loop, "build_rank"),
    "loading": (checkpoint, "load"),
    "leaving": (loop, "close_world"),
}[phase]
setattr(module, name, broken(getattr(module, name)))
main()
"""

CAUSES = {"raise": "ValueError: boom", "kill": "killed by SIGKILL"}


@pytest.mark.parametrize(
    ("phase", "how"), [("joining", "kill"), ("building", "raise"), ("loading", "kill"), ("leaving", "raise")]
)
def test_a_rank_that_ends_in_any_phase_ends_all_and_is_named(phase: str, how: str, tmp_path: Path) -> None:
    """torchtitan 810: a time-out that told no cause. Beside the steps and the saves, whose tests name the step."""
    plan, words = small_plan(tmp_path), ["--steps", 2, "--save", tmp_path / "run", "--save-every", 1]
    if phase == "loading":
        assert train(plan, *words[:1], 1, *words[2:]).returncode == 0
        words += ["--resume", tmp_path / "run"]
    before = time.monotonic()
    done = shardwise(how, phase, "train", plan, *words, code=BROKEN_PHASE)
    assert time.monotonic() - before < 30
    assert done.returncode == 1
    where = "rank 1, step 1" if phase == "loading" else "rank 1"
    assert said(done)[0] == f"{where}: {CAUSES[how]}"
    assert sum(line.startswith("rank ") for line in said(done)) == 1
    assert len(checkpoints(tmp_path / "run")) == {"loading": 1, "leaving": 2}.get(phase, 0)
