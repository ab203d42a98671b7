"""What our own runtime runs today: a plan that breaks one of these rules is planned, but neither proved nor trained."""

from __future__ import annotations

import numpy as np

from shardwise import schedule as schedules
from shardwise.model.families.forms import planned_only
from shardwise.plan.batch import Bools, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rules import Explained, Rule, divisors_near, findings
from shardwise.plan.stack import SHARDWISE
from shardwise.results import Finding

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "gemma2", "gemma3_text", "gpt2")
PRECISIONS = ("bf16", "fp32", "fp64")
RECOMPUTE = ("none", "full")


def _all(batch: LayoutBatch, broken: bool) -> Bools:
    return np.full((1,) * batch.tp.ndim, broken)


def _model_broken(batch: LayoutBatch, job: Job) -> Bools:
    return _all(batch, job.model.family not in FAMILIES or job.model.loops > 1)


def _model(layout: Layout, job: Job) -> Explained:
    del layout
    return f"{job.model.name} is of the family {job.model.family}", f"families that run: {', '.join(FAMILIES)}"


def _stack(layout: Layout, job: Job) -> Explained:
    del layout
    return f"the plan is for {job.stack.title}", "leave --stack out"


def _precision(layout: Layout, job: Job) -> Explained:
    del layout
    return f"precision {job.precision.name} is planned only", f"use one of {', '.join(PRECISIONS)}"


def _copies_broken(batch: LayoutBatch, job: Job) -> Bools:
    """Of an odd number the two ranks that hold a stage end its gradients in different orders."""
    twice = [i for i, name in enumerate(batch.names) if schedules.copies(name) > 1]
    micro_batches = job.global_batch // np.maximum(1, batch.dp * batch.mb)
    return np.isin(batch.schedule, twice) & (micro_batches % 2 != 0)


def _copies(layout: Layout, job: Job) -> Explained:
    said = f"schedule={layout.schedule} with an odd number of micro-batches, {job.micro_batches(layout):,}"
    return (
        f"{said}, is planned only",
        "use another mb or batch, so that both copies of the weights take as many, or another schedule",
    )


def _recompute_broken(batch: LayoutBatch, job: Job) -> Bools:
    del job
    return np.isin(batch.recompute, [i for i, way in enumerate(batch.recomputes) if way not in RECOMPUTE])


RUNS: tuple[Rule, ...] = (
    Rule("runs-model", f"the model is of the family {' or '.join(FAMILIES)}", _model_broken, _model),
    Rule(
        "runs-form",
        "the config asks for no rotation or clipping that our forwards leave out",
        lambda b, j: _all(b, bool(planned_only(j.model))),
        lambda _, j: ("planned only: " + "; ".join(planned_only(j.model)), "use a model without it"),
    ),
    Rule(
        "runs-positions",
        "a sequence is no longer than the learned positions",
        lambda b, j: _all(b, j.seq_len > j.model.sizes.get("P", j.seq_len)),
        lambda _, j: (
            f"sequences of {j.seq_len:,} tokens, and {j.model.name} has {j.model.sizes['P']:,} learned positions",
            f"use seq_len={j.model.sizes['P']}",
        ),
    ),
    Rule("runs-stack", "the stack is our own", lambda b, j: _all(b, j.stack.name != SHARDWISE.name), _stack),
    Rule(
        "runs-precision",
        f"the precision is one of {', '.join(PRECISIONS)}",
        lambda b, j: _all(b, j.precision.name not in PRECISIONS),
        _precision,
    ),
    Rule(
        "runs-context",
        "no context parallelism",
        lambda b, _: b.cp > 1,
        lambda x, _: (f"cp={x.cp}: context parallelism is planned only", "use cp=1"),
    ),
    Rule("runs-copies", "copies of the weights take equally many micro-batches", _copies_broken, _copies),
    Rule(
        "runs-recompute",
        "nothing or whole layers are recomputed",
        _recompute_broken,
        lambda x, _: (f"recompute={x.recompute} is planned only", "use recompute=none or full"),
    ),
    Rule(
        "runs-kv-heads",
        "tp divides the kv heads",
        lambda b, j: j.model.kv_heads % b.tp != 0,
        lambda x, j: (
            f"tp={x.tp} copies {j.model.kv_heads} kv heads, which is planned only",
            f"use tp={divisors_near(j.model.kv_heads, x.tp)}",
        ),
    ),
    Rule(
        "runs-vocab",
        "tp divides the vocabulary",
        lambda b, j: j.model.vocab % b.tp != 0,
        lambda x, j: (
            f"tp={x.tp} pads {j.model.vocab:,} vocabulary rows, which is planned only",
            f"use tp={divisors_near(j.model.vocab, x.tp)}",
        ),
    ),
    Rule(
        "runs-order",
        "pipeline stages lie outermost",
        lambda b, _: b.order > 0,
        lambda x, _: (f"order={x.order} is planned only", "leave order out"),
    ),
)


def runs_here(layout: Layout, job: Job) -> list[Finding]:
    """Why a legal layout is planned only; nothing where `prove` and `train` take it."""
    return findings(layout, job, RUNS)
