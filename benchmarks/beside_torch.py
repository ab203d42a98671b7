"""Our runtime beside torch's own ways to the same layouts, on gloo: CPU seconds a step, and peak memory.

    DistributedDataParallel    fully_shard    DTensor TP + SP    pipelining: 1F1B, interleaved, zero bubble, ZBV

Both sides of a row live in the same processes, start from the same weights and take the same tokens; their losses must
agree. They take steps in turn, in alternating order: a sample is the ratio of CPU seconds of all ranks together,
collectives' threads included, and the interval is the 95 % one of the mean (Student's t). Every step clips by one norm
and ends with fused AdamW. Memory is the peak of torch's CPU allocator over a step, of the largest rank, each side in
processes of its own. Rows that move much and rows that compute little: two sizes of model.

    python benchmarks/beside_torch.py [--pairs 21] [--only fully_shard] [--sizes 256 128]
"""

from __future__ import annotations

import argparse
import platform

import torch
from beside.measure import compare, peak
from beside.models import Size
from beside.sides import ROWS

from shardwise.plan.layout import parse
from shardwise.train.launch import launch

MIB = 2**20
SIZES = {256: Size(256, 2048, 128, 8), 128: Size(128, 1024, 64, 8)}
TIMEOUT_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description="Our runtime beside torch's own, on gloo.")
    parser.add_argument("--pairs", type=int, default=21, help="pairs of steps, at least 15")
    parser.add_argument("--only", default="", help="rows whose peer has this in its name")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=list(SIZES), metavar="H")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, gloo, one thread a rank")
    print("CPU seconds a step of all ranks together; MiB of the largest rank; ratio: ours over theirs")
    cpu = f"{'ours':>8} {'theirs':>8} {'ratio':>6} {'95 %':>13}"
    print(f"{'':>4} {'peer':<29} {'layout':<31} {cpu} {'ours':>8} {'theirs':>8} {'ratio':>6}")
    for hidden in options.sizes:
        for index, row in enumerate(ROWS):
            if options.only in row.peer:
                line(index, SIZES[hidden], options.pairs)


def line(index: int, size: Size, pairs: int) -> None:
    """Measure and print one row."""
    row = ROWS[index]
    ranks = parse(row.layout).world_size
    cost = launch(ranks, compare, (index, size, pairs), timeout_s=TIMEOUT_S)[0]
    ours, theirs = (max(launch(ranks, peak, (index, size, side), timeout_s=TIMEOUT_S)) / MIB for side in (0, 1))
    interval = f"{cost.low:.3f}..{cost.high:.3f}"
    cpu = f"{cost.ours_s:>8.4f} {cost.theirs_s:>8.4f} {cost.ratio:>6.3f} {interval:>13}"
    memory = f"{ours:>8.1f} {theirs:>8.1f} {ours / theirs:>6.3f}"
    print(f"{size.hidden:>4} {row.peer:<29} {row.layout:<31} {cpu} {memory}", flush=True)


if __name__ == "__main__":
    main()
