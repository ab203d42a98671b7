"""Job: what is asked. A model on a cluster, a sequence length, a global batch, a precision."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster.device import Cluster
from shardwise.model.spec import Count, Cut, Model
from shardwise.plan.batch import LayoutBatch
from shardwise.plan.layout import CP_KINDS, Layout
from shardwise.plan.optimizer import ADAMW, OptimizerSpec
from shardwise.plan.stack import SHARDWISE, Stack
from shardwise.units import DTYPE_BYTES, format_count


@dataclass(frozen=True, slots=True)
class Precision:
    """dtypes of weights and activations in the products, and of everything that is summed or stepped."""

    name: str
    compute: str
    accumulate: str
    product: str = ""
    """dtype of the products where it is not `compute`"""
    cached_bytes: int = 0
    """bytes of each weight's copies in the products' dtype"""

    @property
    def product_dtype(self) -> str:
        """What the device's peak is asked for."""
        return self.product or self.compute

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
    "fp16": Precision("fp16", "float16", "float32"),
    "fp8": Precision("fp8", "bfloat16", "float32", "float8_e4m3fn", 2),
    "bf16-pure": Precision("bf16-pure", "bfloat16", "bfloat16"),
}
"""bf16 and fp16 with fp32 master weights, gradients and optimizer state; fp8 as bf16, with products in fp8 and both
layouts of each weight kept in it; the others use one dtype throughout."""


class JobError(ValueError):
    """What is asked cannot be; `faults` says all that is wrong."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


@dataclass(frozen=True, slots=True)
class Job:
    """`seq_len` tokens a sequence, `global_batch` sequences a step, under a software stack. Full training.

    `imbalance`: routed copies on the fullest rank over the mean, 1 where the router is balanced.
    """

    model: Model
    cluster: Cluster
    seq_len: int
    global_batch: int
    precision: Precision = PRECISIONS["bf16"]
    stack: Stack = SHARDWISE
    imbalance: float = 1.0
    optimizer: OptimizerSpec = ADAMW

    @property
    def gradient_dtype(self) -> str:
        """Of gradient buffers and what is reduced of them."""
        p = self.precision
        return p.compute if self.stack.state.gradients == "compute" else p.accumulate

    @property
    def gradient_bytes(self) -> int:
        return DTYPE_BYTES[self.gradient_dtype]

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.seq_len * self.global_batch

    def micro_batches(self, layout: Layout) -> int:
        """Micro-batches a step and data-parallel rank: global batch / (dp x mb). The rules make it exact."""
        return self.global_batch // (layout.dp * layout.mb)

    def cut(self, layout: Layout) -> Cut:
        """How a micro-batch of this job is cut on one rank."""
        return self._cut(layout, CP_KINDS.index(layout.cp_kind))

    def cuts(self, batch: LayoutBatch) -> Cut:
        """The same of many layouts: a cut of columns."""
        return self._cut(batch, batch.cp_kind)

    def _cut(self, of: Layout | LayoutBatch, cp_kind: Count) -> Cut:
        precision = self.precision
        return Cut(
            tokens=of.mb * self.seq_len // of.cp,
            tp=of.tp,
            sp=of.sp,
            compute_bytes=precision.compute_bytes,
            accumulate_bytes=precision.accumulate_bytes,
            cp=of.cp,
            ep=of.ep,
            etp=of.etp,
            seq_len=self.seq_len,
            imbalance=self.imbalance,
            cp_kind=cp_kind,
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
