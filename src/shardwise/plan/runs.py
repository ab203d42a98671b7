"""What our own runtime runs today: a plan that breaks one of these rules is planned, but neither proved nor trained."""

from __future__ import annotations

import numpy as np

from shardwise.model.families.forms import planned_only
from shardwise.plan.batch import Bools, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rules import Explained, Rule, findings
from shardwise.plan.stack import SHARDWISE
from shardwise.results import Finding

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "gemma2", "gemma3_text", "gpt2")
PRECISIONS = ("bf16", "fp32", "fp64")


def _all(batch: LayoutBatch, broken: bool) -> Bools:
    return np.full((1,) * batch.tp.ndim, broken)


def _model_broken(batch: LayoutBatch, job: Job) -> Bools:
    return _all(batch, job.model.family not in FAMILIES)


def _model(layout: Layout, job: Job) -> Explained:
    del layout
    return f"{job.model.name} is of the family {job.model.family}", f"families that run: {', '.join(FAMILIES)}"


def _stack(layout: Layout, job: Job) -> Explained:
    del layout
    return f"the plan is for {job.stack.title}", "leave --stack out"


def _precision(layout: Layout, job: Job) -> Explained:
    del layout
    return f"precision {job.precision.name} is planned only", f"use one of {', '.join(PRECISIONS)}"


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
