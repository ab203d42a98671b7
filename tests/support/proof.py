"""The dry run of a small layout, held to the byte."""

from __future__ import annotations

from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.prove.dryrun import prove_rank


def assert_exact(job: Job, layout: Layout, rank: int) -> None:
    """Collectives equal, and the peak but for the step's scalars: the prediction counts all losses, the scale and a
    gradient of one, and some of them come after the peak."""
    scalars = job.precision.accumulate_bytes * (job.micro_batches(layout) + 2)
    proof = prove_rank(job, layout, rank, tensors="real", full=True)
    assert not proof.differences()
    assert 0 <= proof.predicted_peak_bytes - proof.measured_peak_bytes <= scalars, f"rank {rank}: {proof.peak_at}"
