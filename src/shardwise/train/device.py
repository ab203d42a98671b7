"""What ranks run on: kind of device and backend by the plan's device, and whether this machine has as many."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from shardwise.cluster.device import Cluster
from shardwise.plan.plan import Plan
from shardwise.train.environment import local_rank, local_world_size
from shardwise.train.launch import Failure, RankFailed, launch

GPU_MAKERS = ("NVIDIA", "AMD")
"""Whose accelerators torch drives as `cuda`, by CUDA or by ROCm: the first word of a device's title."""

COUNT_TIMEOUT_S = 60.0
"""Longest wait for the driver's answer."""

Place = tuple[int, int]
"""(rank, world size), as of `environment.launched`."""


class WorldMismatchError(ValueError):
    """The processes or devices at hand are not those that the plan wants; found before any rank talks to another."""


@dataclass(frozen=True, slots=True)
class Target:
    """The kind of device that ranks run on, as torch names it, and the backend that joins them."""

    kind: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]

    def device(self, number: int) -> torch.device:
        """Of the rank of that number on its machine."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, number)


CPUS, GPUS = Target("cpu", "gloo"), Target("cuda", "nccl")


def target_of(cluster: Cluster) -> Target:
    """What the ranks of a plan run on. Raises WorldMismatchError for a device that torch does not drive here."""
    device = cluster.device
    if device.name == "cpu":
        return CPUS
    if device.title.partition(" ")[0] in GPU_MAKERS:
        return GPUS
    raise WorldMismatchError(
        f"the plan is for {cluster.name}, {device.title}: ranks run on CPUs and on GPUs of {' and '.join(GPU_MAKERS)} "
        f"only, plan for such, as {cluster.world_size}xcpu"
    )


def check_world(plan: Plan, place: Place | None) -> Target:
    """What the ranks run on; they are a launcher's, or (None) ours to start, on this machine.

    Raises WorldMismatchError where there are too few or too many processes, or too few GPUs; for GPUs that are missing
    on another machine than rank 0's RankFailed, once a machine: nobody else would tell of them.
    """
    layout, cluster = plan.layout, plan.job.cluster
    target = target_of(cluster)
    if place is None and cluster.nodes > 1:
        raise WorldMismatchError(
            f"the plan is for {cluster.name}, this is one machine: start it on each node, with "
            f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} -m shardwise train PLAN"
        )
    if place is not None and place[1] != layout.world_size:
        raise WorldMismatchError(
            f"the layout {layout} wants {layout.world_size:,} ranks (tp {layout.tp} x pp {layout.pp} x "
            f"dp {layout.dp}), the launcher started {place[1]:,}"
        )
    if target is GPUS:
        _check_gpus(cluster, place)
    return target


def _check_gpus(cluster: Cluster, place: Place | None) -> None:
    wanted = cluster.world_size if place is None else local_world_size(place[1])
    found = gpus_here(forks=place is None)
    if found >= wanted:
        return
    said = f"the plan is for {cluster.name} and wants {wanted:,} GPUs on this machine, {found:,} found"
    if found == 0:
        built = "" if torch.backends.cuda.is_built() else f" by torch {torch.__version__}, which is built for CPUs"
        said += f"{built}: without them ranks run on CPUs only, plan for such, as {cluster.world_size}xcpu"
    elif place is None and wanted % found == 0:
        said += (
            f": start it on {wanted // found} machines like it, each with torchrun --nnodes {wanted // found} "
            f"--nproc-per-node {found} -m shardwise train PLAN"
        )
    else:
        said += f": plan for that many, or start {found:,} ranks on it at most"
    if place is not None and place[0] > 0 and local_rank(*place) == 0:
        raise RankFailed(place[0], Failure(said, kind="input"))
    raise WorldMismatchError(said)


def gpus_here(forks: bool) -> int:
    """GPUs that this process may use. Where it `forks` ranks, it must not have started the driver itself, which torch
    does to count them where NVML does not answer: another process counts. Raises WorldMismatchError where none can."""
    if not forks or not torch.backends.cuda.is_built():
        return torch.cuda.device_count()
    if torch.cuda.is_initialized():
        raise WorldMismatchError(
            "this process has used a GPU, so that ranks forked from it could not: call train before, or use torchrun"
        )
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # what torch asks by itself must not start it either
    try:
        return launch(1, _count, timeout_s=COUNT_TIMEOUT_S)[0]
    except RankFailed as error:
        raise WorldMismatchError(f"the GPUs of this machine could not be counted: {error.cause}") from error


def _count(rank: int, world_size: int, rendezvous: str) -> int:
    del rank, world_size, rendezvous
    return torch.cuda.device_count()
