"""Legality: what a layout must keep to be planned. A rule is a mask and an explanation.

`broken` is the mask of layouts that break it, over a whole batch; `explain` says of one layout what is wrong with the
numbers and the smallest change that mends it. What our own runtime cannot run yet is in `plan/runs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardwise import schedule as schedules
from shardwise.model.spec import OP_RECOMPUTE
from shardwise.plan.batch import Bools, LayoutBatch
from shardwise.plan.job import Job
from shardwise.plan.layout import CP_KINDS, DEFAULT_SCHEDULE, Layout
from shardwise.results import Finding

RING, ULYSSES, GATHER = range(len(CP_KINDS))

Explained = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Rule:
    """`explain` returns (what is wrong, the fix) of a layout that breaks the rule."""

    id: str
    summary: str
    broken: Callable[[LayoutBatch, Job], Bools]
    explain: Callable[[Layout, Job], Explained]


def divisors_near(n: int, wanted: int) -> str:
    """The divisors of n on either side of `wanted`, as text."""
    divisors = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, below + above))


def _never(batch: LayoutBatch) -> Bools:
    return np.zeros((1,) * batch.tp.ndim, dtype=np.bool_)


# ------------------------------------------------------------------------------------------------ devices and batch


def _world(layout: Layout, job: Job) -> Explained:
    have, want = job.cluster.world_size, layout.world_size
    rest = layout.tp * layout.cp * layout.pp
    fix = f"use dp={have // rest}" if have % rest == 0 else f"choose tp x cp x pp that divides {have}"
    cp = f" x cp {layout.cp}" if layout.cp > 1 else ""
    said = f"tp {layout.tp}{cp} x pp {layout.pp} x dp {layout.dp} = {want:,} ranks, the cluster has {have:,} devices"
    return said, fix


def _batch(layout: Layout, job: Job) -> Explained:
    unit, batch = layout.dp * layout.mb, job.global_batch
    near = [n for n in (batch // unit * unit, (batch // unit + 1) * unit) if n]
    said = f"{batch:,} sequences are not whole micro-batches of dp {layout.dp} x mb {layout.mb}"
    return said, f"use a batch of {' or '.join(f'{n:,}' for n in near)} sequences"


def _zero(layout: Layout, job: Job) -> Explained:
    offered = ", ".join(map(str, job.stack.zero))
    return f"zero={layout.zero} is not what {job.stack.title} offers ({offered})", f"use zero={offered}"


# ------------------------------------------------------------------------------------------------- tensor parallelism


def _divides(
    what: str, size: Callable[[Job], int]
) -> tuple[Callable[[LayoutBatch, Job], Bools], Callable[..., Explained]]:
    """tp divides a number of things, where the model has any."""

    def broken(batch: LayoutBatch, job: Job) -> Bools:
        return size(job) % batch.tp != 0

    def explain(layout: Layout, job: Job) -> Explained:
        n = size(job)
        return f"tp={layout.tp} does not divide {n:,} {what}", f"use tp={divisors_near(n, layout.tp)}"

    return broken, explain


def _kv_broken(batch: LayoutBatch, job: Job) -> Bools:
    k = job.model.kv_heads
    return (k % batch.tp != 0) & (batch.tp % k != 0)


def _kv(layout: Layout, job: Job) -> Explained:
    k = job.model.kv_heads
    said = f"tp={layout.tp} neither divides {k} kv heads nor is a multiple of them"
    return said, f"use tp={divisors_near(k, layout.tp)}"


def _ssm_broken(batch: LayoutBatch, job: Job) -> Bools:
    groups = job.model.ssm_groups
    return (groups % batch.tp != 0) if groups else _never(batch)


def _tokens_broken(batch: LayoutBatch, job: Job) -> Bools:
    return (batch.sp > 0) & (batch.mb * job.seq_len % (batch.cp * batch.tp) != 0)


def _tokens(layout: Layout, job: Job) -> Explained:
    n = layout.mb * job.seq_len // layout.cp
    said = f"sp=1 cuts {n:,} tokens of a micro-batch into tp={layout.tp} parts unevenly"
    return said, "use sp=0, or another mb or tp"


# ------------------------------------------------------------------------------------------------ context parallelism


def _parts(kind: int) -> int:
    """Parts of a sequence for each rank: two where causal work is balanced by halves."""
    return 1 if kind == ULYSSES else 2


def _context_broken(batch: LayoutBatch, job: Job) -> Bools:
    parts = np.where(batch.cp_kind == ULYSSES, 1, 2) * batch.cp
    return (batch.cp > 1) & (job.seq_len % parts != 0)


def _context(layout: Layout, job: Job) -> Explained:
    parts = _parts(CP_KINDS.index(layout.cp_kind)) * layout.cp
    said = f"cp={layout.cp} cuts a sequence of {job.seq_len:,} tokens into {parts} parts unevenly"
    return said, f"use a sequence of {max(1, job.seq_len // parts) * parts:,} tokens, or another cp"


def _exchanged_broken(batch: LayoutBatch, job: Job) -> Bools:
    parts = batch.tp * batch.cp
    uneven = (job.model.heads % parts != 0) | ((job.model.kv_heads % parts != 0) & (parts % job.model.kv_heads != 0))
    return (batch.cp > 1) & (batch.cp_kind == ULYSSES) & uneven


def _exchanged(layout: Layout, job: Job) -> Explained:
    said = f"cp_kind=ulysses cuts {job.model.heads} heads into tp {layout.tp} x cp {layout.cp} parts unevenly"
    return said, "use cp_kind=ring or gather, or a cp that divides the heads of a rank"


def _recurrent(job: Job) -> bool:
    return any(OP_RECOMPUTE.get(op.kind) == "core" and op.kind != "attention" for b in job.model.blocks for op in b.ops)


def _scanned_broken(batch: LayoutBatch, job: Job) -> Bools:
    return (batch.cp > 1) if _recurrent(job) else _never(batch)


def _scanned(layout: Layout, job: Job) -> Explained:
    del job
    said = f"cp={layout.cp}: a state-space layer's scan over a cut sequence is not modelled yet"
    return said, "use cp=1, with tp or a smaller mb for memory"


# ------------------------------------------------------------------------------------------------- expert parallelism


def _dense_broken(batch: LayoutBatch, job: Job) -> Bools:
    return (batch.ep * batch.etp > 1) if not job.model.experts else _never(batch)


def _dense(layout: Layout, job: Job) -> Explained:
    said = f"ep={layout.ep} etp={layout.etp}: {job.model.name} has no routed experts"
    return said, "leave ep and etp out"


def _experts_broken(batch: LayoutBatch, job: Job) -> Bools:
    return (job.model.experts % batch.ep != 0) if job.model.experts else _never(batch)


def _experts(layout: Layout, job: Job) -> Explained:
    n = job.model.experts
    return f"ep={layout.ep} does not divide {n} experts", f"use ep={divisors_near(n, layout.ep)}"


def _expert_tp_broken(batch: LayoutBatch, job: Job) -> Bools:
    return (job.model.sizes["x"] % batch.etp != 0) if job.model.experts else _never(batch)


def _expert_tp(layout: Layout, job: Job) -> Explained:
    n = job.model.sizes["x"]
    return f"etp={layout.etp} does not divide an expert's {n:,} rows", f"use etp={divisors_near(n, layout.etp)}"


def _folded_broken(batch: LayoutBatch, job: Job) -> Bools:
    data = np.where(batch.zero > 0, batch.dp_shard, np.where(batch.order > 0, 1, batch.dp))
    ranks = data * batch.cp * batch.tp
    return (ranks % (batch.ep * batch.etp) != 0) if job.model.experts else _never(batch)


def _folded(layout: Layout, job: Job) -> Explained:
    del job
    axis, data = ("dp_shard", layout.dp_shard) if layout.zero else ("dp", layout.dp)
    if not layout.zero and layout.order == "dp":
        axis, data = "replicas apart", 1
    ranks = data * layout.cp * layout.tp
    said = (
        f"ep {layout.ep} x etp {layout.etp} does not divide {axis} {data} x cp {layout.cp} x tp {layout.tp} = {ranks}"
    )
    return said, f"use ep x etp of {divisors_near(ranks, layout.ep * layout.etp)}"


def _routed_broken(batch: LayoutBatch, job: Job) -> Bools:
    return ((batch.tp > 1) & (batch.sp == 0)) if job.model.experts else _never(batch)


def _routed(layout: Layout, job: Job) -> Explained:
    del job
    return f"tp={layout.tp} sp=0: every rank would route all tokens", "use sp=1: each routes its own"


# ----------------------------------------------------------------------------------------------------------- pipeline


def _units(job: Job) -> int:
    """Units that can open a stage of their own: the layers, the embedding, and the head with the tail."""
    return job.model.layers + 2


def _stages(layout: Layout, job: Job) -> Explained:
    said = f"{layout.stages} stages for {job.model.layers} layers leave a stage empty"
    return said, f"use at most {_units(job)} stages"


def _split_broken(batch: LayoutBatch, job: Job) -> Bools:
    """Few distinct splits: each is checked once against every stage count."""
    stages = batch.pp * batch.virtual
    broken = _never(batch)
    for i, split in enumerate(batch.splits):
        if split:
            wrong = sum(split) != job.model.layers or 0 in split[1:-1]
            broken = broken | ((batch.split == i) & (wrong | (stages != len(split))))
    return broken


def _split(layout: Layout, job: Job) -> Explained:
    said = f"split= names {len(layout.split)} stages with {sum(layout.split)} layers in all"
    return said, f"name {layout.stages} stages with {job.model.layers} layers in all, only the ends may have none"


def _schedule_broken(batch: LayoutBatch, job: Job) -> Bools:
    del job
    default = batch.names.index(DEFAULT_SCHEDULE) if DEFAULT_SCHEDULE in batch.names else -1
    return (batch.pp == 1) & (batch.schedule != default)


def _schedule(layout: Layout, job: Job) -> Explained:
    del job
    return f"schedule={layout.schedule} with pp=1 has nothing to overlap", "leave schedule out, or use pp=2 or more"


def _rows_broken(batch: LayoutBatch, job: Job) -> Bools:
    micro_batches = np.maximum(1, job.global_batch // np.maximum(1, batch.dp * batch.mb))
    schedule, stages = np.broadcast_arrays(batch.schedule, batch.pp)
    broken = _never(batch)
    pairs = {(int(i), int(pp)) for i, pp in zip(schedule.flat, stages.flat, strict=True)}
    for i, pp in sorted(pairs):
        mine = (batch.schedule == i) & (batch.pp == pp)
        if pp > 1:
            broken = broken | (mine & ~schedules.possible(batch.names[i], pp, micro_batches))
    return broken


def _rows(layout: Layout, job: Job) -> Explained:
    found = schedules.fault(layout.schedule, layout.pp, max(1, job.micro_batches(layout)))
    return found or ("", "")


def _loops_broken(batch: LayoutBatch, job: Job) -> Bools:
    return (batch.pp > 1) if job.model.loops > 1 else _never(batch)


def _loops(layout: Layout, job: Job) -> Explained:
    said = f"pp={layout.pp}: the {job.model.loops} runs of a layer would lie on different ranks"
    return said, "use pp=1"


_HEADS, _FFN = _divides("heads", lambda j: j.model.heads), _divides("feed-forward rows", lambda j: j.model.ffn)
_SHARED = _divides("rows of the shared experts", lambda j: j.model.sizes.get("s", 0))
_SSM = _divides("state-space heads", lambda j: j.model.ssm_heads)

RULES: tuple[Rule, ...] = (
    Rule("world", "the degrees multiply to the devices", lambda b, j: b.world_size != j.cluster.world_size, _world),
    Rule("batch", "dp x mb divides the global batch", lambda b, j: j.global_batch % (b.dp * b.mb) != 0, _batch),
    Rule("zero", "the software stack offers the ZeRO level", lambda b, j: ~np.isin(b.zero, (0, *j.stack.zero)), _zero),
    Rule("heads", "tp divides the heads", *_HEADS),
    Rule("kv-heads", "tp divides the kv heads, or copies each of them equally often", _kv_broken, _kv),
    Rule("ffn", "tp divides the feed-forward size", *_FFN),
    Rule("shared-experts", "tp divides the shared experts' feed-forward size", *_SHARED),
    Rule("ssm-heads", "tp divides the state-space heads", *_SSM),
    Rule(
        "ssm-groups",
        "tp divides the state-space groups",
        _ssm_broken,
        _divides("state-space groups", lambda j: j.model.ssm_groups)[1],
    ),
    Rule("sequence", "sequence parallelism cuts a micro-batch's tokens evenly", _tokens_broken, _tokens),
    Rule("context", "context parallelism cuts a sequence evenly, causal work balanced", _context_broken, _context),
    Rule("ulysses", "tp x cp cuts the heads where they are exchanged for tokens", _exchanged_broken, _exchanged),
    Rule("scan", "no scan runs over a cut sequence", _scanned_broken, _scanned),
    Rule("dense", "only routed experts have expert parallelism", _dense_broken, _dense),
    Rule("experts", "ep divides the experts", _experts_broken, _experts),
    Rule("expert-ffn", "etp divides an expert's feed-forward size", _expert_tp_broken, _expert_tp),
    Rule("folding", "ep x etp divides the ranks of a stage that share the experts", _folded_broken, _folded),
    Rule("routing", "with tp, tokens are routed from a cut sequence", _routed_broken, _routed),
    Rule("stages", "no stage is empty", lambda b, j: (b.split == 0) & (b.pp * b.virtual > _units(j)), _stages),
    Rule("split", "split= places every layer once", _split_broken, _split),
    Rule("schedule", "a schedule needs a pipeline", _schedule_broken, _schedule),
    Rule("rows", "the schedule exists for these stages and micro-batches", _rows_broken, _rows),
    Rule("loops", "all runs of a looped layer lie on one rank", _loops_broken, _loops),
)


def legal(batch: LayoutBatch, job: Job, rules: tuple[Rule, ...] = RULES) -> Bools:
    """Mask of the layouts that break no rule, of the batch's shape."""
    ok = np.ones(batch.shape, dtype=np.bool_)
    for rule in rules:
        broken = rule.broken(batch, job)
        if np.any(broken):
            ok &= ~broken
    return ok


def findings(layout: Layout, job: Job, rules: tuple[Rule, ...] = RULES) -> list[Finding]:
    """Every rule that the layout breaks, explained."""
    batch = LayoutBatch.of([layout])
    return [Finding(r.id, *r.explain(layout, job)) for r in rules if bool(np.all(r.broken(batch, job)))]
