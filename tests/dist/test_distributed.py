"""torch.distributed on gloo (the values of the thread backend) and under the fake group (what a recorder sees)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.collective import Labels
from shardwise.train.comm import Comm, Message
from shardwise.train.distributed import DistributedComm, close_world, open_world
from shardwise.train.launch import RankFailed
from shardwise.train.threads import run_threads
from tests.dist.pool import run_gloo
from tests.dist.test_threads import DTYPES, every_operation

pytestmark = pytest.mark.dist


# Run by gloo ranks ----------------------------------------------------------------------------------------------------


def all_dtypes_and_degrees(comm: Comm) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    return {(dtype, degree): every_operation(comm, degree, dtype) for dtype in DTYPES for degree in (2, 4)}


def everyone(comm: Comm) -> Any:
    return comm.group(("tp",), tuple(range(comm.world_size)))


def one_raises(comm: Comm) -> None:
    group = everyone(comm)
    if comm.rank == 2:
        error = ValueError("boom")
        error.step = 7  # type: ignore[attr-defined]
        raise error
    comm.all_reduce(torch.ones(3), group).wait()


def one_is_killed(comm: Comm) -> None:
    group = everyone(comm)
    if comm.rank == 2:
        os.kill(os.getpid(), 9)
    comm.all_reduce(torch.ones(3), group).wait()


def shapes_differ(comm: Comm) -> None:
    comm.all_reduce(torch.ones(4 if comm.rank == 1 else 3), everyone(comm)).wait()


def nobody_sends(comm: Comm) -> None:
    assert isinstance(comm, DistributedComm)
    comm.point_to_point_group((0, 1))
    if comm.rank == 1:
        comm.post([Message(False, torch.ones(2), 0, "act")])[0].wait()
    time.sleep(20)


def groups_differ(comm: Comm) -> None:
    if comm.rank == 0:
        comm.group(("tp",), (0,))
    comm.group(("dp",), (0, 1))


# On gloo --------------------------------------------------------------------------------------------------------------


ROUNDING = {"float64": 1e-15, "float32": 1e-6, "bfloat16": 2e-2, "int64": 0.0}


def test_gloo_equals_threads() -> None:
    on_gloo = run_gloo(4, "tests.dist.test_distributed:all_dtypes_and_degrees")
    on_threads = run_threads(4, all_dtypes_and_degrees)
    for rank, (found, wanted) in enumerate(zip(on_gloo, on_threads, strict=True)):
        for (dtype, degree), operations in wanted.items():
            for name, value in operations.items():
                # gloo's all-reduce sums in an order of its own; all else must agree bit for bit
                error = ROUNDING[dtype] if name == "sum" else 0.0
                case = f"rank {rank}, {dtype}, group of {degree}: {name}"
                torch.testing.assert_close(found[dtype, degree][name], value, rtol=error, atol=16 * error, msg=case)


def test_a_failing_rank_ends_all_with_its_name_and_step() -> None:
    with pytest.raises(RankFailed, match="rank 2, step 7: ValueError: boom") as caught:
        run_gloo(4, "tests.dist.test_distributed:one_raises")
    assert caught.value.rank == 2
    assert "in one_raises" in caught.value.trace


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 2: killed by SIGKILL"):
        run_gloo(4, "tests.dist.test_distributed:one_is_killed")


def test_a_mismatch_names_the_operation() -> None:
    with pytest.raises(RankFailed, match=r"all_reduce sum float32\[\d\] on tp \(ranks 0, 1, 2, 3\) failed"):
        run_gloo(4, "tests.dist.test_distributed:shapes_differ")


def test_a_group_that_only_some_make_has_an_end() -> None:
    with pytest.raises(RankFailed, match=r"group dp of ranks \(0, 1\) failed \(do all members make it, after equally"):
        run_gloo(2, "tests.dist.test_distributed:groups_differ", timeout_s=3.0)


def test_a_wait_has_an_end() -> None:
    before = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1: recv 'act' float32\[2\] from rank 0 on pp \(ranks 0, 1\) failed"):
        run_gloo(2, "tests.dist.test_distributed:nobody_sends", timeout_s=3.0)
    assert time.monotonic() - before < 15


# Under the fake process group -----------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Notes label, operation and global ranks of each collective, from the dispatcher alone."""

    def __init__(self, labels: Labels):
        super().__init__()
        self.labels = labels
        self.calls: list[tuple[str, str, str, tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
            tensors = args[0] if isinstance(args[0], list) else list(args[:2])
            size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            ranks = tuple(dist.get_process_group_ranks(group))
            self.calls.append(
                (self.labels.module, self.labels.axis, func.overloadpacket._qualified_op_name, ranks, size)
            )
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_world() -> Iterator[DistributedComm]:
    yield open_world("fake", 5, 16_384, labels=Labels())
    close_world()


@pytest.mark.parametrize("fake_tensors", [False, True])
def test_a_recorder_sees_the_logical_operations(fake_world: DistributedComm, fake_tensors: bool) -> None:
    comm, tp, pp = fake_world, tuple(range(8)), (5, 1029, 2053)
    group = comm.group(("tp",), tp)
    assert comm.group(("tp",), tp) is group
    comm.group(("dp_shard",), tuple(range(5, 16_384, 8)))
    comm.point_to_point_group(pp)
    with Seen(comm.labels) as seen, comm.labels.at(module="layers.0"):
        if fake_tensors:
            with FakeTensorMode():
                issue_each(comm, group)
        else:
            issue_each(comm, group)
    assert seen.calls == [
        ("layers.0", "tp", "c10d::allreduce_", tp, 64),
        ("layers.0", "tp", "c10d::_allgather_base_", tp, 512),
        ("layers.0", "tp", "c10d::_reduce_scatter_base_", tp, 64),
        ("layers.0", "tp", "c10d::alltoall_base_", tp, 64),
        ("stages.1", "pp", "c10d::send", pp, 64),
        ("stages.0", "pp", "c10d::recv_", pp, 64),
    ]


def issue_each(comm: Comm, group: Any) -> None:
    x = torch.ones(32, dtype=torch.bfloat16)
    comm.all_reduce(x, group).wait()
    comm.all_gather(torch.empty(256, dtype=torch.bfloat16), x, group).wait()
    comm.reduce_scatter(x[20:24], x, group).wait()
    comm.all_to_all(torch.empty_like(x), x, group)
    y = torch.empty_like(x)
    for work in comm.post([Message(True, x, 1029, "a", "stages.1"), Message(False, y, 2053, "b", "stages.0")]):
        work.wait()


def test_no_deprecated_name_is_called(fake_world: DistributedComm) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        issue_each(fake_world, fake_world.group(("tp",), tuple(range(8))))
    assert [str(w.message) for w in caught] == []


def test_nccl_fuses_a_batch_within_its_group(fake_world: DistributedComm) -> None:
    """As far as a machine without a GPU can tell: NCCL's way to post, over the fake group."""
    fake_world.backend = "nccl"
    x = torch.ones(4)
    batch = [Message(True, x, 1029, "a"), Message(False, x, 2053, "b"), Message(True, x, 4, "c")]
    with pytest.raises(ValueError, match="rank 5 has no point-to-point group with rank 1029"):
        fake_world.post(batch)
    fake_world.point_to_point_group((5, 1029, 2053))
    fake_world.point_to_point_group((4, 5), ("tied",))
    with Seen(fake_world.labels) as seen:
        works = fake_world.post(batch)
    assert [work.wait() for work in works] == [None] * 3
    assert [(axis, ranks) for _, axis, _, ranks, _ in seen.calls] == [("pp", (5, 1029, 2053))] * 2 + [("tied", (4, 5))]


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="'mpi' is none of nccl, gloo, fake"):
        open_world("mpi", 0, 1)


# Launching, from an interpreter that has run nothing of torch ---------------------------------------------------------

SCRIPT = """
import os, sys, time
from shardwise.train.launch import launch

def target(rank, world_size, init_method, what):
    os.write(1, f"line of {rank} {os.getpid()}\\n".encode())  # whole lines, whatever Python buffers
    if what == "sleep":
        time.sleep(60)
    return rank * 10

if __name__ == "__main__":
    print(launch(3, target, (sys.argv[1],), timeout_s=float(sys.argv[2])))
"""


def start_script(what: str, timeout_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, what, str(timeout_s)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline().split()[-1]) for _ in range(3)]


def test_launch_returns_results_and_inherits_output() -> None:
    out, err = start_script("", 20).communicate(timeout=30)
    assert sorted(line.rsplit(" ", 1)[0] for line in out.splitlines()[:3]) == ["line of 0", "line of 1", "line of 2"]
    assert out.splitlines()[3] == "[0, 10, 20]"
    assert err == ""


def test_launch_ends_late_ranks() -> None:
    process = start_script("sleep", 0.5)
    pids = child_pids(process)
    _, err = process.communicate(timeout=30)
    assert "RankFailed: rank 0: not done after 0.5 s, like all of [0, 1, 2]" in err
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [2, 9], ids=["interrupted", "killed"])
@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is signalled on Linux only")
def test_ranks_do_not_outlive_their_parent(number: int) -> None:
    process = start_script("sleep", 60)
    pids = child_pids(process)
    os.killpg(process.pid, number) if number == 2 else process.kill()
    _, err = process.communicate(timeout=30)
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids)
    assert err.count("Traceback") == (1 if number == 2 else 0)  # of the parent alone
