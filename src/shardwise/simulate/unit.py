"""Seconds of one unit for one micro-batch on one rank, by cause: its products, its kernels, its tp communication.

Communication over tp is fully exposed: every op waits for its gather, and the next op for its reduction.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shardwise.account.comm import issued, unit_traffic
from shardwise.account.compute import ATTENTION_BACKWARD, OpWork, unit_work
from shardwise.cluster.device import Cluster
from shardwise.model.spec import KINDS, Cut
from shardwise.plan.job import Job
from shardwise.plan.shards import block_named
from shardwise.schedule.table import Op
from shardwise.simulate.cost import Floats, Kernels, Links, collective_s, kernels, links

COMPUTE, RECOMPUTE, TP = "compute", "recompute", "tp communication"

UNIT_CAUSES = (COMPUTE, RECOMPUTE, TP)
OPS = ("F", "B", "W")
"""Rows of the arrays. An action BW takes B + W."""


@lru_cache(maxsize=16384)
def unit_seconds(job: Job, cut: Cut, recompute: bool, split: bool) -> Floats:
    """[cause, op, kind] seconds, in the orders of UNIT_CAUSES, OPS and KINDS.

    `recompute`: a layer's B runs its forward again, but for its last op. `split`: W is an action of its own, and what
    it could have shared with B is communicated again.
    """
    precision = job.precision
    device = kernels(job.cluster.device, precision.compute, precision.compute_bytes)
    group = _tp_links(job.cluster, cut.tp)
    acts = (Op.F, Op.B, Op.W) if split else (Op.F, Op.BW)
    seconds = np.zeros((len(UNIT_CAUSES), len(OPS), len(KINDS)))
    for k, kind in enumerate(KINDS):
        again = len(block_named(job.model, kind).recomputed) if recompute else 0
        work = unit_work(job.model, kind, cut, job.seq_len)
        per_op = np.array([_op_seconds(op, device) for op in work])  # [ops, F B W]
        seconds[0, :, k] = per_op.sum(axis=0)
        seconds[1, 1, k] = per_op[:again, 0].sum()
        for traffic in unit_traffic(job.model, kind, cut):
            for row, act in enumerate(acts):
                if issued(traffic, act, recompute, split):
                    seconds[2, row, k] += collective_s(traffic.kind, traffic.payload_bytes, group)
    seconds.flags.writeable = False
    return seconds


def _op_seconds(work: OpWork, device: Kernels) -> tuple[float, float, float]:
    """Seconds of F, B and W of one op."""
    products = sum(device.product_s(p) for p in work.products)
    f = products + device.moved_s(work.moved[0])
    b = products + device.moved_s(work.moved[1])
    if work.core_flops:
        f += work.core_flops / device.attention_f_flops_per_s + device.launch_s
        b += ATTENTION_BACKWARD * work.core_flops / device.attention_b_flops_per_s + device.launch_s
    return f, b, products + device.moved_s(work.moved[2])


@lru_cache(maxsize=256)
def _tp_links(cluster: Cluster, tp: int) -> Links:
    return links(cluster, (1, tp))
