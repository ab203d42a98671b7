"""Job: what is asked. A model on a cluster, a sequence length, a global batch, a precision."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster.device import Cluster
from shardwise.model.spec import Cut, Model
from shardwise.plan.layout import Layout
from shardwise.units import DTYPE_BYTES, format_count


@dataclass(frozen=True, slots=True)
class Precision:
    """dtypes of weights and activations in the products, and of everything that is summed or stepped."""

    name: str
    compute: str
    accumulate: str

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.compute]

    @property
    def accumulate_bytes(self) -> int:
        return DTYPE_BYTES[self.accumulate]


PRECISIONS = {
    "bf16": Precision("bf16", "bfloat16", "float32"),
    "fp32": Precision("fp32", "float32", "float32"),
    "fp64": Precision("fp64", "float64", "float64"),
}
"""bf16 with fp32 master weights, gradients and moments; the others use one dtype throughout."""


class JobError(ValueError):
    """What is asked cannot be; `faults` says all that is wrong."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


@dataclass(frozen=True, slots=True)
class Job:
    """`seq_len` tokens a sequence, `global_batch` sequences a step. AdamW, full training."""

    model: Model
    cluster: Cluster
    seq_len: int
    global_batch: int
    precision: Precision = PRECISIONS["bf16"]

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.seq_len * self.global_batch

    def micro_batches(self, layout: Layout) -> int:
        """Micro-batches a step and data-parallel rank: global batch / (dp x mb). The rules make it exact."""
        return self.global_batch // (layout.dp * layout.mb)

    def cut(self, layout: Layout) -> Cut:
        """How a micro-batch of this job is cut on one rank."""
        precision = self.precision
        return Cut(
            tokens=layout.mb * self.seq_len,
            tp=layout.tp,
            sp=layout.sp,
            compute_bytes=precision.compute_bytes,
            accumulate_bytes=precision.accumulate_bytes,
        )


def batch_from_tokens(tokens: int, seq_len: int) -> int:
    """Sequences of a batch given in tokens. Raises JobError with the nearest values where it does not divide."""
    if tokens % seq_len:
        below = tokens // seq_len * seq_len
        near = [n for n in (below, below + seq_len) if n]
        said = " or ".join(format_count(n) for n in near)
        raise JobError(
            [f"{format_count(tokens)} tokens are not whole sequences of {format_count(seq_len)}: try {said}"]
        )
    return tokens // seq_len
