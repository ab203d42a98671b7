"""`train --profile` on several ranks: every rank has its files, and they agree with the account."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.account.memory import memory_of
from shardwise.plan.plan import load_plan
from shardwise.plan.shards import rank_units
from tests.dist.commands import said, shardwise
from tests.dist.test_train import plan_file, train

pytestmark = pytest.mark.dist

SCALARS = 256
"""Bytes of scalars that the account has in other parts, or counts where none are."""


def profiled(folder: Path, layout: str) -> tuple[list[dict[str, Any]], list[set[str]], str]:
    """Of every rank the memory timeline and the names of its ranges; what the run printed last."""
    plan = plan_file(folder, layout, cluster='"2xcpu"')
    done = train(plan, "--steps", 3, "--profile", folder / "profile")
    assert done.returncode == 0, done.stderr[-3000:]
    files = sorted(path.name for path in (folder / "profile").iterdir())
    assert files == [f"rank-{rank}{end}" for rank in range(2) for end in ("-memory.json", "-memory.svg", ".json")]
    timelines = [json.loads((folder / "profile" / f"rank-{rank}-memory.json").read_text()) for rank in range(2)]
    traces = [json.loads((folder / "profile" / f"rank-{rank}.json").read_text())["traceEvents"] for rank in range(2)]
    names = [{event["name"] for event in events if event.get("cat") == "user_annotation"} for events in traces]
    return timelines, names, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("layout", ["pp=2 mb=4 schedule=zb-v", "pp=2 mb=4 schedule=1f1b", "dp=2 mb=4"])
def test_every_category_is_the_accounts(layout: str, tmp_path: Path) -> None:
    timelines, names, last = profiled(tmp_path, layout)
    plan = load_plan(tmp_path / "plan.toml")
    account = memory_of(plan.job, plan.layout)
    for rank, found in enumerate(timelines):
        mine, parts = dict(found["peak"]["bytes"]), account[rank % plan.layout.pp].proved
        mine["activations"] += mine.pop("workspace")
        assert {c for c, size in mine.items() if abs(size - parts.get(c, 0)) > SCALARS} == set()
        assert [step["name"] for step in found["steps"]] == ["step 2", "step 3"]
    assert last.startswith(f"profile in {tmp_path / 'profile'}: rank-N.json ")
    if "pp" in layout:
        assert any(name.startswith("send stages.0 #0 to rank 1") for name in names[0])
        assert any(name.startswith("recv stages.1 #0 from rank 0") for name in names[1])
        assert {"arrive stages.1 #0", "settle stages"} <= names[1]
    assert any(name.startswith("W layers.") for name in names[0]) == ("zb-v" in layout)


@pytest.mark.parametrize("layout", ["dp=2 mb=4 zero=1", "dp=2 mb=4 zero=3"])
def test_a_cut_state_peaks_where_the_account_says(layout: str, tmp_path: Path) -> None:
    """Above it may lie one unit: gloo gathers, and exchanges the parts of a sum, in a buffer of its own meanwhile."""
    timelines, names, _ = profiled(tmp_path, layout)
    plan = load_plan(tmp_path / "plan.toml")
    (account,) = memory_of(plan.job, plan.layout)
    unit = 4 * max(int(s.padded_numel) for s in rank_units(plan.job.model, plan.layout, 0).storages.values())
    for found in timelines:
        assert -SCALARS <= found["peak"]["total_bytes"] - account.proved_bytes <= unit + SCALARS
        assert abs(found["peak"]["bytes"]["optimizer"] - account.proved["optimizer"]) <= SCALARS
    wanted = {"unshard layers.1", "ready layers.1", "reshard layers.1", "open layers.1"}
    assert wanted <= names[0] if "zero=3" in layout else {"gather layers.1", "reduce layers.1"} <= names[0]


LITTLE_ROOM = """
import resource
from shardwise.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
main()
"""


def test_a_full_disk_ends_the_run_as_any_other_output_does(tmp_path: Path) -> None:
    plan, folder = plan_file(tmp_path, "dp=2 mb=4", cluster='"2xcpu"'), tmp_path / "profile"
    done = shardwise("train", plan, "--steps", 3, "--profile", folder, code=LITTLE_ROOM)
    assert done.returncode == 74
    assert "disk full" in said(done)[0] or "File too large" in said(done)[0]
    assert said(done)[-1].startswith(f"no profile in {folder}")
    assert not list(folder.iterdir())
