"""The CUDA path on one GPU: kernels, layouts and whole runs against the same on a CPU.

Ranks as threads share the GPU, so that every layout's arithmetic runs on it without a second one. What needs several,
NCCL between them, is not tested here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.account.memory import memory_of
from shardwise.collective import Labels
from shardwise.plan.layout import parse
from shardwise.plan.plan import load_plan
from shardwise.train.attention import Scores, attention, kernel_of
from shardwise.train.comm import Comm
from shardwise.train.distributed import close_world, open_world
from shardwise.train.optim import OptimizerSettings
from shardwise.train.rank import Rank, build_rank, train_step
from shardwise.train.threads import run_threads
from tests.support import families
from tests.support.models import job, tiny
from tests.support.parity import batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch finds none"),
]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.toml"
FP64 = 1e-10
"""Largest difference of float64 results, relative to the largest value: as in tests/support/parity.py."""

# ------------------------------------------------------------------------------------------------------------ attention


def attended(device: torch.device, wide: torch.dtype, values: list[torch.Tensor], scores: Scores) -> list[torch.Tensor]:
    """(output, dq, dk, dv) in float64, of q, k, v and the output's gradient."""
    *inputs, gradient = (x.to(device, wide) for x in values)
    q, k, v = (x.requires_grad_() for x in inputs)
    o = attention(q * 1, k * 1, v * 1, None, scores)  # products: it writes into them
    return [x.detach().cpu().double() for x in (o, *torch.autograd.grad(o, (q, k, v), gradient))]


def drawn(tokens: int, heads: int, kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, n * head_dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "seq_len"),
    [(4, 4, 64, 128), (8, 2, 128, 256), (2, 1, 256, 64), (6, 2, 24, 96), (4, 4, 64, 1)],
)
def test_torchs_kernel_for_gpus_is_attention(
    heads: int, kv_heads: int, head_dim: int, seq_len: int, dtype: torch.dtype
) -> None:
    """Against float64 on a CPU, from the same rounded inputs.

    A value is rounded to the dtype about four times on its way (probabilities, output, ds, result), each time by half
    an eps: 4 eps of the tensor's norm are twice what four roundings of one sign would come to.
    """
    scores = Scores(seq_len, head_dim)
    assert kernel_of("cuda", dtype, scores) == "flash on a GPU"
    values = [x.to(dtype) for x in drawn(2 * seq_len, heads, kv_heads, head_dim)]
    found, wanted = attended(GPU, dtype, values, scores), attended(CPU, torch.float64, values, scores)
    for name, x, y in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        if seq_len == 1 and name in ("dq", "dk"):
            assert float(x.abs().max()) <= 4 * torch.finfo(dtype).eps * head_dim**0.5  # of one key: zero
            continue
        error = float((x - y).norm() / y.norm())
        assert error <= 4 * torch.finfo(dtype).eps, f"{name} differs by {error:.2e}"


@pytest.mark.parametrize(
    "scores", [Scores(24, 16), Scores(24, 16, window=5), Scores(24, 16, 0.2, cap=0.7)], ids=["plain", "window", "cap"]
)
def test_our_kernel_is_the_same_on_a_gpu(scores: Scores) -> None:
    values = drawn(48, 8, 4, 16)
    wide = [attended(device, torch.float64, values, scores) for device in (GPU, CPU)]
    for x, y in zip(*wide, strict=True):
        assert float((x - y).abs().max()) <= FP64 * float(y.abs().max())


# ---------------------------------------------------------------------------------------------------------- whole ranks


def flat(rank: Rank) -> dict[str, torch.Tensor]:
    """Gradients and masters of a rank."""
    return {
        f"{name} {what}": x.detach().cpu()
        for name, state in rank.states.items()
        for what, x in (("gradient", state.gradient_shard), ("master", state.master))
    }


def steps(rank: Rank, config: Any, count: int = 2) -> dict[str, torch.Tensor]:
    """What a rank holds after some steps, with the losses and norms on the way. Every data-parallel rank reads the
    same: what is compared is devices."""
    found: dict[str, torch.Tensor] = {}
    m, tokens = rank.micro_batches, rank.job.cut(rank.layout).tokens
    every = batches(config.vocab, rank.job.seq_len, rank.job.global_batch, False)[:count]
    for n, (ids, targets) in enumerate(every):
        mine = [x.flatten()[: m * tokens].view(m, tokens).to(rank.device) for x in (ids, targets)]
        result = train_step(rank, mine[0] if rank.needs_ids else None, mine[1] if rank.needs_targets else None)
        found |= {f"loss {n}": result.loss.cpu(), f"norm {n}": result.norm.cpu()}
    return found | flat(rank)


SETTINGS = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, y in wanted.items():
        assert float((found[name] - y).abs().max()) <= FP64 * max(1.0, float(y.abs().max())), name


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[Comm]:
    try:
        yield open_world("nccl", 0, 1, f"file://{tmp_path / 'rendezvous'}", device=GPU)
    finally:
        close_world()


@pytest.mark.parametrize("recompute", ["none", "core", "norm,act", "full"])
def test_a_rank_under_nccl_is_one_on_a_cpu(recompute: str, world_of_one: Comm) -> None:
    work, layout = job(tiny(2), "1xcpu"), parse(f"mb=2 recompute={recompute}")
    on_gpu = build_rank(work, layout, world_of_one, Labels(), settings=SETTINGS, device=GPU)
    assert {x.device for s in on_gpu.states.values() for x in (s.master, s.gradient_shard)} == {GPU}

    def on_cpu(comm: Comm) -> dict[str, torch.Tensor]:
        return steps(build_rank(work, layout, comm, Labels(), settings=SETTINGS), work.model)

    same(steps(on_gpu, work.model), run_threads(1, on_cpu)[0])


def on(device: torch.device, work: Any, layout: Any) -> Callable[[Comm], dict[str, torch.Tensor]]:
    def one(comm: Comm) -> dict[str, torch.Tensor]:
        # torch runs all backwards of a GPU in one thread, where a rank that waits would keep the others from theirs.
        with torch.autograd.set_multithreading_enabled(False):
            return steps(build_rank(work, layout, comm, Labels(), settings=SETTINGS, device=device), work.model)

    return one


@pytest.mark.parametrize(
    "text",
    [
        "tp=2 mb=2",
        "tp=2 sp=0 mb=2",
        "dp=4 zero=1 mb=1",
        "dp=2 zero=3 mb=2",
        "dp_replicate=2 dp_shard=2 zero=2 mb=1",
        "pp=2 mb=2",
        "pp=2 schedule=zb-v mb=2",
        "tp=2 pp=2 dp=2 zero=3 schedule=interleaved:2 mb=1 recompute=core",
    ],
)
def test_ranks_of_every_kind_are_the_same_on_a_gpu(text: str) -> None:
    layout = parse(text)
    work = job(tiny(4), f"{layout.world_size}xcpu")
    found, wanted = (run_threads(layout.world_size, on(device, work, layout)) for device in (GPU, CPU))
    for x, y in zip(found, wanted, strict=True):
        same(x, y)


@pytest.mark.parametrize("name", families.named())
def test_every_family_is_the_same_on_a_gpu(name: str) -> None:
    layout = parse("tp=2 mb=2")
    work = families.job_of(families.CONFIGS[name], layout, "fp64")
    found, wanted = (run_threads(2, on(device, work, layout)) for device in (GPU, CPU))
    for x, y in zip(found, wanted, strict=True):
        same(x, y)


# ----------------------------------------------------------------------------------------------------------- whole runs


def plan_file(folder: Path, cluster: str = "1xh200", precision: str = "bf16", **changes: str) -> Path:
    """The example on one device, with other values of some keys."""
    text = TINY.read_text()
    known = {"text": '"mb=4"', "cluster": f'"{cluster}"', "precision": f'"{precision}"', "steps": "3", **changes}
    for key, value in known.items():
        text, n = re.subn(rf"^{key} = [^#\n]*", f"{key} = {value} ", text, flags=re.MULTILINE)
        assert n == 1
    path = folder / f"{cluster}-{precision}.toml"
    path.write_text(text)
    return path


def train(*arguments: object, launcher: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The steps of a run, in a process of its own: this one has used the GPU."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), *filter(None, sys.path)))
    command = [sys.executable, *launcher, "-m", "shardwise", "train", *map(str, arguments), "--json"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def losses(reports: list[dict[str, Any]]) -> list[float]:
    return [report["loss"] for report in reports]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["own ranks", "torchrun"])
def test_a_run_on_a_gpu_has_the_losses_of_one_on_a_cpu(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """In float32, whose eps is 1.2e-7: three steps of 4 layers multiply it by no more than a thousand."""
    on_cpu = train(plan_file(tmp_path, "1xcpu", "fp32"))
    on_gpu = train(plan_file(tmp_path, "1xh200", "fp32"), launcher=launcher)
    assert len(on_gpu) == 3
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=1e-4)


@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_a_run_goes_on_from_what_it_saved(precision: str, rel: float, tmp_path: Path) -> None:
    """Nearly: torch's backward for GPUs adds in any order, and bfloat16 has two digits."""
    plan, saved = plan_file(tmp_path, precision=precision), tmp_path / "saved"
    straight = train(plan, "--steps", 5)
    first = train(plan, "--save", saved)
    assert [path.name for path in saved.glob("step-*")] == ["step-000000003"]
    rest = train(plan, "--steps", 5, "--resume", saved)
    assert [report["step"] for report in rest] == [4, 5]
    assert losses(first + rest) == pytest.approx(losses(straight), rel=rel)


def test_what_a_gpu_saved_goes_on_on_a_cpu_and_back(tmp_path: Path) -> None:
    on_gpu, on_cpu = plan_file(tmp_path, precision="fp32"), plan_file(tmp_path, "1xcpu", "fp32")
    straight = train(on_cpu, "--steps", 5)
    saved = tmp_path / "saved"
    found = train(on_gpu, "--save", saved)
    found += train(on_cpu, "--steps", 4, "--resume", saved, "--save", saved)
    found += train(on_gpu, "--steps", 5, "--resume", saved)
    assert losses(found) == pytest.approx(losses(straight), rel=1e-4)


def test_two_gpus_are_not_had(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has several")
    path = plan_file(tmp_path, "2xh200", text='"dp=2 mb=4"')
    with pytest.raises(AssertionError, match="wants 2 GPUs on this machine, 1 found: start it on 2 machines"):
        train(path)


@pytest.mark.slow
def test_the_peak_of_a_real_model_beside_its_plans(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Recorded and not judged: the libraries' workspaces and a kernel's scratch are no tensors of the plan."""
    plan = tmp_path / "plan.toml"
    shown = (
        "show",
        "qwen3-0.6b",
        "--on",
        "1xh200",
        "--seq",
        "2048",
        "--batch",
        "8",
        "--layout",
        "mb=2",
        "-o",
        str(plan),
    )
    path = os.pathsep.join((str(ROOT / "src"), *filter(None, sys.path)))
    subprocess.run(
        [sys.executable, "-m", "shardwise", *shown], env=os.environ | {"PYTHONPATH": path}, check=True, timeout=60
    )
    last = train(plan, "--steps", 4)[-1]
    of = load_plan(plan)
    planned = memory_of(of.job, of.layout)[0].proved_bytes
    record_property("peak / plan", last["memory_bytes"] / planned)
    record_property("mfu", last["mfu"])
    print(
        f"peak {last['memory_bytes']:,} bytes, plan {planned:,}; MFU {last['mfu']:.1%}; {last['seconds']:.3f} s a step"
    )
    assert last["memory_bytes"] < of.job.cluster.device.usable_bytes
