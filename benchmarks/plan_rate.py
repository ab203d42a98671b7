"""How many layouts a second one core judges: rules, exact memory, closed-form time; walks of schedules apart.

    python benchmarks/plan_rate.py [MODEL CLUSTER TOKENS]

CPU seconds of this process, every table and storage made anew (nothing is remembered from a run before).
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

from shardwise.account.memory import peak_bytes
from shardwise.cluster import parse_cluster
from shardwise.model.hf import load_model
from shardwise.plan.job import Job, batch_from_tokens
from shardwise.search.solve import legal_layouts
from shardwise.simulate.step import step_seconds, step_time
from shardwise.units import format_tokens, parse_tokens

SEQ_LEN = 8192
WALKS = 20


def machine() -> str:
    """The CPU, as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def measure(job: Job) -> list[tuple[str, int, float]]:
    """(what, layouts, CPU seconds) of each part."""
    marks = [time.process_time()]
    enumerated, batch = legal_layouts(job)
    marks.append(time.process_time())
    peaks = peak_bytes(job, batch)
    marks.append(time.process_time())
    times = step_seconds(job, batch)
    marks.append(time.process_time())
    fits = np.flatnonzero(peaks <= job.cluster.device.usable_bytes)
    fastest = fits[np.argsort(times[fits])][:WALKS].tolist()
    for i in fastest:
        step_time(job, batch.row(i))
    marks.append(time.process_time())
    spent = np.diff(marks).tolist()
    return [
        ("enumerate, rules", enumerated, spent[0]),
        ("exact peak memory", len(batch), spent[1]),
        ("closed-form step time", len(batch), spent[2]),
        ("memory and time", len(batch), spent[1] + spent[2]),
        ("walk of the fastest", len(fastest), spent[3]),
    ]


def main(model: str = "llama-3.1-70b", cluster: str = "64x8xh100", tokens: str = "4M") -> None:
    """Print the table."""
    count = parse_tokens(tokens)
    job = Job(load_model(model), parse_cluster(cluster), SEQ_LEN, batch_from_tokens(count, SEQ_LEN))
    print(f"{model} on {cluster}, {format_tokens(count)} tokens a step of {SEQ_LEN:,} a sequence\n{machine()}\n")
    print(f"{'':24}{'layouts':>10}{'CPU s':>9}{'layouts/s':>12}")
    for what, layouts, seconds in measure(job):
        print(f"{what:24}{layouts:>10,}{seconds:>9.3f}{layouts / seconds if seconds else 0:>12,.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
