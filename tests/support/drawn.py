"""Random legal layouts of the whole field, over models of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from shardwise.cluster import parse_cluster
from shardwise.model.hf import from_config, load_model, to_config
from shardwise.model.spec import Model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import CP_KINDS, ORDERS, ZERO, Layout, LayoutError
from shardwise.plan.rules import legal
from shardwise.search.space import divisors

SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "interleaved:3", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")
RECOMPUTE = ("none", "act", "norm,act", "core", "norm,act,core", "full")

LOOPED = "looped"
MODELS = (
    *("llama-3.1-8b", "deepseek-v3", "gemma-2-9b", "nemotron-3-nano", "gpt-oss-120b", "qwen3-30b-a3b", "olmo-7b"),
    LOOPED,
)
"""Dense and routed, latent and windowed attention, scans, tied ends, a tail, and layers that run more than once."""

Wanted = Callable[[Layout], bool]


@lru_cache(maxsize=32)
def model_named(name: str) -> Model:
    """One of MODELS, or of the catalog."""
    if name != LOOPED:
        return load_model(name)
    return from_config({**to_config(load_model("llama-3.1-8b")), "num_hidden_layers": 8, "num_loops": 4}, LOOPED)


def job_of(name: str, cluster: str = "8x8xh100", seq_len: int = 4096, batch: int = 192) -> Job:
    """A job whose batch takes micro-batches of 1, 2 and 3."""
    return Job(model_named(name), parse_cluster(cluster), seq_len, batch)


def drawn(job: Job, count: int, seed: int, wanted: Wanted | None = None) -> list[Layout]:
    """Distinct legal layouts of the job, equal for equal seeds; `wanted` keeps some."""
    rng, found = random.Random(seed), dict[Layout, None]()
    for _ in range(400):
        tried = [x for x in attempts(job, 200, rng) if wanted is None or wanted(x)]
        if tried:
            mask = legal(LayoutBatch.of(tried), job).tolist()
            found |= {x: None for x, ok in zip(tried, mask, strict=True) if ok}
        if len(found) >= count:
            return list(found)[:count]
    raise AssertionError(f"{len(found)} of {count} layouts of {job.model.name} found")


def attempts(job: Job, count: int, rng: random.Random) -> list[Layout]:
    """Up to `count` layouts, legal or not."""
    return [x for x in (_one(job, rng) for _ in range(count)) if x is not None]


def _one(job: Job, rng: random.Random) -> Layout | None:
    """Any layout of so many ranks, legal or not; None where the degrees make none."""
    left = job.cluster.world_size

    def part(most: int) -> int:
        nonlocal left
        taken = rng.choice([d for d in divisors(left) if d <= most])
        left //= taken
        return taken

    pp = part(8) if job.model.loops == 1 and rng.random() < 0.8 else 1
    tp, cp, replicate = part(8), part(8) if rng.random() < 0.5 else 1, part(64)
    zero = rng.choice(ZERO)
    experts = job.model.experts
    ranks = (left if zero else left * replicate) * cp * tp
    etp = rng.choice([1, 1, tp]) if experts else 1
    try:
        return Layout(
            tp=tp,
            sp=bool(experts) or rng.random() < 0.6,
            cp=cp,
            cp_kind=rng.choice(CP_KINDS),
            pp=pp,
            ep=rng.choice([d for d in divisors(experts) if ranks % (d * etp) == 0]) if experts else 1,
            etp=etp,
            dp_replicate=replicate if zero else replicate * left,
            dp_shard=left if zero else 1,
            zero=zero,
            schedule=rng.choice(SCHEDULES) if pp > 1 else "1f1b",
            mb=rng.choice([1, 1, 2, 3]),
            recompute=rng.choice(RECOMPUTE),
            order=rng.choice(ORDERS),
        )
    except (LayoutError, IndexError):
        return None


def spoilt(layouts: list[Layout], rng: random.Random) -> list[Layout]:
    """The same with one or two fields of each set to something else, which most models and jobs refuse."""
    values: dict[str, tuple[object, ...]] = {
        "tp": (3, 5, 16, 48),
        "sp": (False, True),
        "cp": (3, 5, 64),
        "cp_kind": CP_KINDS,
        "pp": (2, 3, 5, 64),
        "ep": (2, 3, 7, 256),
        "etp": (2, 3, 7),
        "dp_replicate": (1, 3, 7),
        "schedule": (*SCHEDULES, "interleaved:16"),
        "split": ((), (1, 1), (0, 3, 3, 0), (16, 16)),
        "mb": (5, 7),
    }
    keys = list(values)
    found: list[Layout] = []
    for layout in layouts:
        picked = {key: rng.choice(values[key]) for key in rng.sample(keys, rng.choice([1, 2]))}
        found.append(replace(layout, **picked))
    return found
