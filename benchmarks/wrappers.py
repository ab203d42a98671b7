"""What the wrappers cost beside torch's own, on two gloo ranks: CPU seconds a step, and peak memory.

    ddp     DistributedDataParallel
    fsdp    fully_shard, with the same units: every block, or every Linear
    zero1   ZeroRedundancyOptimizer, behind the same data parallel wrapper

Both models of a pair live in the same two processes, have the same weights and samples, and take a step one after the
other, in alternating order. A sample is the ratio of CPU seconds of both ranks together, collectives' threads included;
the interval is the 95 % one of the mean (Student's t). Peak memory is the greatest resident size over three steps in
two fresh processes, less what was resident before the model was built, of the larger rank.

    python benchmarks/wrappers.py [--pairs 21] [--hidden 256] [--only fsdp]
"""

from __future__ import annotations

import argparse
import platform
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside.interval import Cost, paired
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shardwise.train.distributed import close_world, open_world
from shardwise.train.launch import launch
from shardwise.train.wrap.ddp import ddp
from shardwise.train.wrap.fsdp import fsdp
from shardwise.train.wrap.zero1 import zero1

RANKS, LAYERS, BATCH, SEQ_LEN, VOCAB = 2, 4, 2, 128, 2048
MIB = 2**20

Step = Callable[[], None]


class Block(nn.Module):
    """A gated feed-forward block of h features: 3 matrices, 12 h^2 parameters."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(h)
        self.gate, self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, h)
        self.blocks = nn.ModuleList(Block(h) for _ in range(LAYERS))
        self.head = nn.Linear(h, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def a_step(model: nn.Module, optimizer: torch.optim.Optimizer, finish: Step) -> Step:
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        ids = torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=generator)
        optimizer.zero_grad()
        model(ids).backward()
        finish()
        optimizer.step()

    return step


def nothing() -> None:
    pass


def our_ddp(h: int) -> Step:
    model = ddp(Model(h))
    return a_step(model, adamw(model), model.finish_gradient_synchronization)


def their_ddp(h: int) -> Step:
    model = DistributedDataParallel(Model(h))
    return a_step(model, adamw(model), nothing)


def our_fsdp(h: int, kinds: tuple[type[nn.Module], ...]) -> Step:
    model: Any = fsdp(Model(h), None, kinds)
    return a_step(model, adamw(model), model.finish_gradient_synchronization)


def their_fsdp(h: int, kinds: tuple[type[nn.Module], ...]) -> Step:
    model = Model(h)
    for module in model.modules():
        if isinstance(module, kinds):
            fully_shard(module)
    fully_shard(model)
    return a_step(model, adamw(model), nothing)


def our_zero1(h: int) -> Step:
    model = ddp(Model(h))
    optimizer = zero1(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    return a_step(model, optimizer, model.finish_gradient_synchronization)


def their_zero1(h: int) -> Step:
    model = ddp(Model(h))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    return a_step(model, optimizer, model.finish_gradient_synchronization)


BLOCKS = (Block, nn.Embedding, nn.Linear)
LINEARS = (nn.Linear, nn.Embedding)
PAIRS: dict[str, tuple[Callable[[int], Step], Callable[[int], Step]]] = {
    "ddp": (our_ddp, their_ddp),
    "fsdp, a unit a block": (lambda h: our_fsdp(h, BLOCKS), lambda h: their_fsdp(h, (Block, nn.Embedding))),
    "fsdp, a unit a Linear": (lambda h: our_fsdp(h, LINEARS), lambda h: their_fsdp(h, LINEARS)),
    "zero1": (our_zero1, their_zero1),
}


def join(rank: int, world_size: int, init_method: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    open_world("gloo", rank, world_size, init_method, timeout_s=120)


def cpu_s(step: Step) -> float:
    """CPU seconds of both ranks, threads included."""
    dist.barrier()
    started = time.process_time()
    step()
    spent = torch.tensor(time.process_time() - started, dtype=torch.float64)
    dist.all_reduce(spent)
    return spent.item()


def compare(rank: int, world_size: int, init_method: str, name: str, hidden: int, pairs: int) -> Cost:
    """One rank of a row."""
    join(rank, world_size, init_method)
    ours, theirs = (make(hidden) for make in PAIRS[name])
    for step in (ours, theirs) * 3:
        step()
    cost = paired(partial(cpu_s, ours), partial(cpu_s, theirs), pairs)
    close_world()
    return cost


def peak(rank: int, world_size: int, init_method: str, name: str, hidden: int, side: int) -> int:
    """Bytes that one rank of one wrapper adds to its process."""
    join(rank, world_size, init_method)
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = PAIRS[name][side](hidden)
    for _ in range(3):
        step()
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    close_world()
    return found * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="The wrappers beside torch's, CPU seconds a step and peak memory.")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--only", default="", help="rows whose name begins with this")
    options = parser.parse_args()
    if options.pairs < 15:
        parser.error("at least 15 pairs")
    h = options.hidden
    count = LAYERS * (12 * h * h + 11 * h) + 2 * VOCAB * h
    print(
        f"{RANKS} gloo ranks, {LAYERS} blocks of {h}, {count / 1e6:.1f} M parameters, float32, {options.pairs} pairs;"
    )
    print(f"{platform.machine()}, torch {torch.__version__}")
    print(f"{'':<22} {'ours CPU s':>10} {'torch CPU s':>11} {'ratio':>6} {'95 %':>13} {'ours MiB':>9} {'torch MiB':>9}")
    for name in PAIRS:
        if name.startswith(options.only):
            row = launch(RANKS, compare, (name, h, options.pairs))[0]
            held = [max(launch(RANKS, peak, (name, h, side))) / MIB for side in (0, 1)]
            each, interval = (row.ours_s / RANKS, row.theirs_s / RANKS), f"{row.low:.3f}-{row.high:.3f}"
            print(
                f"{name:<22} {each[0]:>10.4f} {each[1]:>11.4f} {row.ratio:>6.3f} {interval:>13} "
                f"{held[0]:>9.1f} {held[1]:>9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
