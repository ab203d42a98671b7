"""A published run as a question for the planner: job and layout, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.plan.job import PRECISIONS, Job, Precision
from shardwise.plan.layout import Layout
from shardwise.plan.rules import findings
from shardwise.plan.stack import Stack, load_stack, under
from shardwise.score.clusters import cluster_of
from shardwise.score.facts import Source, source_of, words
from shardwise.score.layouts import layout_of
from shardwise.score.measured import Measured, measured_of
from shardwise.score.models import model_of
from shardwise.score.skip import SkipError
from shardwise.score.table import Published


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `measured` is None where it did not fit; `measured_GiB` where no memory was measured."""

    id: str
    source: Source
    job: Job
    layout: Layout
    measured: Measured | None
    measured_GiB: float | None
    out_of_memory: bool

    @property
    def device(self) -> str:
        return self.job.cluster.device.name


def case_of(row: Published) -> Case:
    """The question that a row answers. Raises SkipError where it is none."""
    for text, reason in words().excluded.items():
        if text in row.notes:
            raise SkipError("excluded", f"{reason} ({text})")
    if (source := source_of(row.source)) is None:
        raise SkipError("source", f"{row.source[:80]}: its software stack is not known")
    plain, cluster = model_of(row), cluster_of(row, source)
    stack, precision = _stack(row, source), _precision(row, source)
    layout = layout_of(row, source, plain, cluster)
    if row.seq_len is None or row.global_batch_seqs is None:
        raise SkipError("layout", f"{'seq_len' if row.seq_len is None else 'global_batch_seqs'} is not printed")
    job = Job(under(plain, stack), cluster, row.seq_len, row.global_batch_seqs, precision, stack)
    if precision.product_dtype not in cluster.device.peak_flops:
        raise SkipError("precision", f"{cluster.device.title} has no {precision.product_dtype} products")
    if broken := findings(layout, job):
        raise SkipError("rule", str(broken[0]))
    measured = measured_of(row, plain, job.tokens)
    memory = row.metric_peak_mem_GiB if source.memory else None
    return Case(row.id, source, job, layout, measured, memory, row.out_of_memory)


def _precision(row: Published, source: Source) -> Precision:
    name = words().precisions.get(row.precision) if row.precision else source.defaults.precision
    if name is None:
        raise SkipError("precision", f"{row.precision} is not planned" if row.precision else "not printed")
    return PRECISIONS["bf16-pure" if source.pure and source.pure in row.notes else name]


def _stack(row: Published, source: Source) -> Stack:
    """The source's stack, with what the row itself says of its kernels."""
    stack = load_stack(source.stack)
    if "compile" in row.notes:
        stack = replace(stack, fused=True)
    attention = {"yes": "flash", "no": "eager"}.get(row.flash_attention)
    return replace(stack, saves=replace(stack.saves, attention=attention)) if attention else stack
