"""What ranks run on, decided without any GPU: kind and backend by the plan's device, GPUs counted and found too few."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardwise import cli
from shardwise.cluster import parse_cluster
from shardwise.cluster.catalog import entry, known_devices
from shardwise.plan.layout import parse
from shardwise.plan.plan import Plan, load_plan
from shardwise.plan.settings import TrainSettings
from shardwise.train import device, loop
from shardwise.train.data import read_corpus
from shardwise.train.device import CPUS, GPUS, WorldMismatchError, check_world, gpus_here, target_of
from shardwise.train.environment import local_rank
from shardwise.train.launch import RankFailed
from shardwise.train.options import Options
from tests.support.models import job, tiny

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.toml"

A100S, H100S = ("a100", "a100-40gb", "a100-pcie"), ("h100", "h100-96gb", "h100-pcie", "h200", "h800", "gh200")
NVIDIA = (*A100S, *H100S, "b200", "b300", "gb200", "gb300", "v100-32gb")
AMD = ("mi250x", "mi300x", "mi325x", "mi355x")
TPUS = ("v3", "v4", "v5e", "v5p", "v6e", "v7")
OTHERS = (*TPUS, "ascend-910b", "ascend-910c", "gaudi2", "gaudi3", "trainium2")

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def started_by_torchrun(monkeypatch: pytest.MonkeyPatch, *values: int) -> None:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE."""
    rank, world_size, local, local_world_size = map(str, values)
    for name, value in zip(TORCHRUN, (rank, world_size, "host", "1", local, local_world_size), strict=True):
        monkeypatch.setenv(name, value)


def plan_for(cluster: str, layout: str) -> Plan:
    return Plan(job(tiny(), cluster, batch=16, precision="bf16"), parse(layout))


def found(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(device, "gpus_here", lambda forks: count)


# ------------------------------------------------------------------------------------------------- by the plan's device


def test_every_device_of_the_catalogue_is_decided() -> None:
    """By hand: NCCL on GPUs, gloo on CPUs, and nothing else."""
    wanted = {"cpu": CPUS} | dict.fromkeys((*NVIDIA, *AMD), GPUS) | dict.fromkeys(OTHERS)
    assert set(wanted) == set(known_devices())
    cluster = parse_cluster("2xcpu")
    for name, target in wanted.items():
        for_it = replace(cluster, device=entry(name).device)
        if target is not None:
            assert target_of(for_it) == target, name
            continue
        with pytest.raises(WorldMismatchError, match="CPUs and on GPUs of NVIDIA and AMD only") as caught:
            target_of(for_it)
        assert entry(name).device.title in str(caught.value)


def test_a_device_of_figures_alone_is_refused() -> None:
    with pytest.raises(WorldMismatchError, match="a device of your own: ranks run on"):
        target_of(parse_cluster("8xC=4.6e14,W=1.8e11,M=95e9"))


def test_backends_and_devices_of_ranks() -> None:
    assert (CPUS.backend, GPUS.backend) == ("gloo", "nccl")
    assert [CPUS.device(n) for n in (0, 3)] == [torch.device("cpu")] * 2
    assert [GPUS.device(n) for n in (0, 3)] == [torch.device("cuda", 0), torch.device("cuda", 3)]


@pytest.mark.parametrize(
    ("environment", "rank", "wanted"),
    [
        ({}, 5, 5),
        ({"LOCAL_RANK": "1"}, 5, 5),  # left over, of no launcher: ranks that we start are numbered by us
        ({"WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, 11, 3),
        ({"WORLD_SIZE": "16", "LOCAL_RANK": "6", "LOCAL_WORLD_SIZE": "8"}, 11, 6),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 11, 3),
        ({"WORLD_SIZE": "16", "LOCAL_RANK": "x"}, 11, 11),
    ],
)
def test_the_number_of_a_rank_on_its_machine(
    environment: dict[str, str], rank: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "WORLD_SIZE" in environment:
        started_by_torchrun(monkeypatch, rank, 16, 0, 0)
        monkeypatch.delenv("LOCAL_RANK")
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert local_rank(rank, 16) == wanted


# ------------------------------------------------------------------------------------------------------- by the machine


def test_enough_gpus_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for("4xh100", "tp=2 pp=2 mb=4")
    for count in (4, 8):
        found(monkeypatch, count)
        assert check_world(plan, None) == GPUS
    started_by_torchrun(monkeypatch, 12, 16, 4, 8)
    assert check_world(plan_for("2x8xh100", "tp=8 dp=2 mb=4"), (12, 16)) == GPUS


def test_a_cpu_plan_asks_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpus_here", lambda forks: pytest.fail("asked"))
    assert check_world(plan_for("4xcpu", "tp=4 mb=4"), None) == CPUS


@pytest.mark.parametrize(
    ("count", "remedy"),
    [
        (0, "without them ranks run on CPUs only, plan for such, as 8xcpu"),
        (4, "start it on 2 machines like it, each with torchrun --nnodes 2 --nproc-per-node 4 -m shardwise train"),
        (3, "plan for that many, or start 3 ranks on it at most"),
    ],
)
def test_too_few_gpus_are_named(count: int, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, count)
    with pytest.raises(WorldMismatchError) as caught:
        check_world(plan_for("8xh100", "tp=8 mb=4"), None)
    assert f"the plan is for 8xh100 and wants 8 GPUs on this machine, {count} found" in str(caught.value)
    assert remedy in str(caught.value)


def test_too_few_gpus_of_another_machine_are_told_once_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, the one that speaks, finds nothing wrong with its own machine."""
    plan = plan_for("2x8xh100", "tp=8 dp=2 mb=4")
    found(monkeypatch, 7)
    started_by_torchrun(monkeypatch, 8, 16, 0, 8)
    with pytest.raises(RankFailed, match=r"wants 8 GPUs on this machine, 7 found: .* 7 ranks") as caught:
        check_world(plan, (8, 16))
    assert (caught.value.rank, caught.value.kind) == (8, "input")
    for rank in (0, 9):
        started_by_torchrun(monkeypatch, rank, 16, rank % 8, 8)
        with pytest.raises(WorldMismatchError, match="7 found"):
            check_world(plan, (rank, 16))


def test_the_message_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(TINY.read_text().replace("4xcpu", "4xh100").replace('"fp32"', '"bf16"'))
    found(monkeypatch, 1)
    done = CliRunner().invoke(cli.app, ["train", str(path)])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "4 GPUs on this machine, 1 found" in done.stderr


# -------------------------------------------------------------------------------------------------- counting, by others


def test_another_process_counts_where_ranks_will_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may start the driver to count, and what is forked after that cannot use it."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", os.getpid)
    assert gpus_here(forks=True) not in (os.getpid(), 0)
    assert gpus_here(forks=False) == os.getpid()


def test_a_process_that_has_used_a_gpu_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(WorldMismatchError, match="has used a GPU"):
        gpus_here(forks=True)


@pytest.mark.parametrize("how", ["hangs", "raises"])
def test_a_driver_that_does_not_answer_is_named(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        if how == "hangs":
            time.sleep(100)
        raise RuntimeError("no driver")

    monkeypatch.setattr(device, "COUNT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", count)
    with pytest.raises(WorldMismatchError, match=r"could not be counted: .*(no driver|not done after 0.5 s)"):
        gpus_here(forks=True)


QUIET_PARENT = """
import sys, traceback, torch

def asked(*args, **kwargs):
    raise SystemExit("asked torch for GPUs: " + "".join(traceback.format_stack()))

for name in ("is_available", "device_count", "current_device", "get_device_properties", "get_device_capability",
             "_lazy_init", "init", "is_bf16_supported", "synchronize"):
    setattr(torch.cuda, name, asked)
from pathlib import Path
from shardwise.plan.plan import load_plan
from shardwise.train import device, loop
from shardwise.train.options import Options

device.gpus_here = lambda forks: 4
started = []
loop.launch = lambda world_size, target, args, on_word: started.append(args) or [[]]
loop.train(load_plan(Path(sys.argv[1])), options=Options(save=Path(sys.argv[2])))
print(started[0][0].target)
"""


@pytest.mark.slow
def test_the_process_that_forks_asks_for_no_gpu(tmp_path: Path) -> None:
    """Neither what it imports nor what it prepares: CUDA that is started before the fork is lost after it."""
    path = tmp_path / "plan.toml"
    path.write_text(TINY.read_text().replace("4xcpu", "4xh100").replace('"fp32"', '"bf16"'))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), *sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", QUIET_PARENT, str(path), str(tmp_path / "saved")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "nccl" in done.stdout


# ------------------------------------------------------------------------------------------------- what a rank is given


class _Joined(Exception):  # noqa: N818 - says what happened
    """Ends a rank where it would join the world."""


@pytest.mark.parametrize(
    ("cluster", "place", "wanted"),
    [
        ("4xcpu", None, ("gloo", "cpu")),
        ("4xh100", None, ("nccl", "cuda:3")),
        ("2x8xh100", (11, 16, 3, 8), ("nccl", "cuda:3")),
        ("2x8xmi300x", (11, 16, 5, 8), ("nccl", "cuda:5")),
    ],
)
def test_a_rank_joins_with_its_backend_and_its_device(
    cluster: str, place: tuple[int, ...] | None, wanted: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def open_world(backend: str, rank: int, *args: Any, device: torch.device, **kwargs: Any) -> None:
        given.append((backend, rank, str(device)))
        raise _Joined

    if place is not None:
        started_by_torchrun(monkeypatch, *place)
    monkeypatch.setattr(loop, "open_world", open_world)
    of = plan_for(cluster, "tp=4 mb=4")
    run = loop.Run(target_of(of.job.cluster), of, TrainSettings(), Options(), read_corpus("python-stdlib", 16, 0, 16))
    rank, world_size = (3, 4) if place is None else place[:2]
    with pytest.raises(_Joined):
        loop._run_rank(rank, world_size, None, run)
    assert given == [(wanted[0], rank, wanted[1])]


@pytest.mark.parametrize(("cluster", "kind"), [("4xcpu", "cpu"), ("4xh100", "cuda"), ("4xmi300x", "cuda")])
def test_the_opening_line_names_the_kernel_of_the_device_that_is_used(
    cluster: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwise.train import optim

    def train(plan: Plan, on_step: Any, on_start: Any, options: Any) -> list[Any]:
        on_start()
        return []

    monkeypatch.setattr(optim, "kernel_of", lambda spec, device: f"as on {device}")
    monkeypatch.setattr(loop, "train", train)
    path = tmp_path / "plan.toml"
    path.write_text(TINY.read_text().replace("4xcpu", cluster).replace('"fp32"', '"bf16"'))
    assert load_plan(path).job.cluster.name == cluster
    done = CliRunner().invoke(cli.app, ["train", str(path)])
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"AdamW (as on {kind})" in done.stdout
