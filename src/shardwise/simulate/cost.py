"""Seconds of one kernel: a roofline.

Every constant is a number of the device's file or the stack's. Overlapped work is not slowed by what it overlaps with,
and a product's efficiency depends on the alignment of its sizes alone: waves and tiles of a kernel are left to
calibration. Sizes may be columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.account.compute import Moved, OpWork, Product
from shardwise.account.units import most
from shardwise.cluster.device import Device
from shardwise.model.spec import Count
from shardwise.plan.job import Job, JobError

Floats = npt.NDArray[np.float64]

_UNFUSED = 2.5
"""Passes of elementwise chains run one operation at a time, against the one kernel that they can be fused into
(rope 3 to 4, SwiGLU 1.7, norms 2 to 3)."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a rank computes with: the peaks and efficiencies of one device in one dtype."""

    flops_per_s: float
    """Of a large, well-aligned product."""
    attention_f_flops_per_s: float
    attention_b_flops_per_s: float
    bytes_per_s: float
    launch_s: float
    element_bytes: int
    passes: float = 1.0
    """of elementwise chains"""

    def moved_s(self, moved: Moved) -> Count:
        """Memory-bound kernels."""
        return moved.bytes * self.passes / self.bytes_per_s + moved.kernels * self.launch_s

    def product_s(self, product: Product) -> Count:
        """One matrix product; forward, dgrad and wgrad read and write the same three matrices."""
        tokens, rows, columns, groups = product
        moved = (tokens * rows + groups * rows * columns + tokens * columns) * self.element_bytes
        rate = self.flops_per_s * _least(_alignment(rows), _alignment(columns))
        return most([product.flops / rate, moved / self.bytes_per_s]) + self.launch_s

    def op_s(self, work: OpWork) -> tuple[Count, Count, Count]:
        """F, B and W of one op."""
        products = sum(self.product_s(p) for p in work.products)
        f = products + self.moved_s(work.moved[0])
        b = products + self.moved_s(work.moved[1])
        if work.kind in ("attention", "scan", "conv"):
            f = f + work.core_flops / self.attention_f_flops_per_s + self.launch_s
            b = b + work.core_b_flops / self.attention_b_flops_per_s + self.launch_s
        return f, b, products + self.moved_s(work.moved[2])


def kernels(device: Device, dtype: str, element_bytes: int) -> Kernels:
    """The device's rates for products in `dtype`. Raises JobError where its file has no peak for it."""
    if dtype not in device.peak_flops:
        known = ", ".join(sorted(device.peak_flops))
        raise JobError([f"{device.name} has no peak for {dtype} products (known: {known}): choose another precision"])
    peak, efficiency = device.peak_flops[dtype], device.efficiency
    return Kernels(
        flops_per_s=peak * efficiency.matmul,
        attention_f_flops_per_s=peak * efficiency.attention_forward,
        attention_b_flops_per_s=peak * efficiency.attention_backward,
        bytes_per_s=device.memory_bytes_per_s * efficiency.memory,
        launch_s=efficiency.launch_s,
        element_bytes=element_bytes,
    )


def kernels_of(job: Job) -> Kernels:
    """The rates of a job: attention computes in the precision's own dtype, products may in another."""
    device, p = job.cluster.device, job.precision
    products, own = kernels(device, p.product_dtype, p.compute_bytes), kernels(device, p.compute, p.compute_bytes)
    stack = job.stack
    return Kernels(
        flops_per_s=products.flops_per_s * stack.efficiency,
        attention_f_flops_per_s=own.attention_f_flops_per_s * stack.efficiency,
        attention_b_flops_per_s=own.attention_b_flops_per_s * stack.efficiency,
        bytes_per_s=own.bytes_per_s,
        launch_s=own.launch_s,
        element_bytes=own.element_bytes,
        passes=1.0 if stack.fused else _UNFUSED,
    )


def _least(a: Count, b: Count) -> Count:
    return np.minimum(a, b)


def _alignment(size: Count) -> Count:
    """Share of a product's rate that a dim leaves: kernels want multiples of 64 (fitted to published throughputs)."""
    size = np.asarray(size)
    return np.where(size % 64 == 0, 1.0, np.where(size % 8 == 0, 0.75, 0.56))
