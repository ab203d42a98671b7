"""How many layouts a second one core judges: rules, peak memory and closed-form time; and the whole search with walks.

    python benchmarks/plan_rate.py

CPU seconds of this process, every table made anew (nothing is remembered from a run before).
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import resource
import time
from pathlib import Path

from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model
from shardwise.plan.job import Job, batch_from_tokens
from shardwise.search.limits import Limits
from shardwise.search.solve import SearchResult, solve, survey
from shardwise.units import parse_tokens


def machine() -> str:
    """The CPU, as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def measure(job: Job) -> tuple[SearchResult, float, float]:
    """(what the search found, CPU seconds of all of it, CPU seconds of judging every layout)."""
    start = time.process_time()
    survey(job, Limits())
    judged = time.process_time() - start
    forget()
    start = time.process_time()
    return solve(job), time.process_time() - start, judged


def forget() -> None:
    """Empty the caches: nothing is remembered from a run before."""
    for found in gc.get_objects():
        if isinstance(found, functools._lru_cache_wrapper):
            found.cache_clear()


CASES = (
    ("llama-3.1-70b", "64x8xh100", 8192, "4M"),
    ("llama-3.1-405b", "2048x8xh100", 8192, "16M"),
    ("gpt-3-175b", "128x8xa100", 2048, "3M"),
    ("deepseek-v3", "256x8xh800", 4096, "60M"),
)


def main() -> None:
    """Print the table."""
    print(f"{machine()}\n")
    head = ("enumerated", "legal", "fit", "judged/s", "judging", "search")
    print(f"{'':34}" + "".join(f"{h:>12}" for h in head))
    for model, cluster, seq_len, tokens in CASES:
        job = Job(load_model(model), parse_cluster(cluster), seq_len, batch_from_tokens(parse_tokens(tokens), seq_len))
        forget()
        found, whole, judged = measure(job)
        numbers = (found.enumerated, found.legal, found.fitting, round(found.legal / judged))
        cells = [f"{n:,}" for n in numbers] + [f"{judged:.2f} s", f"{whole:.2f} s"]
        print(f"{model + ' on ' + cluster:34}" + "".join(f"{c:>12}" for c in cells), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\nCPU seconds on one core; peak memory of the process {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
