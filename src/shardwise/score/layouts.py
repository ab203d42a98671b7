"""The layout of a published run: its columns, with what a blank means in its source."""

from __future__ import annotations

import re

from shardwise.cluster import Cluster
from shardwise.model.spec import Model
from shardwise.plan.layout import Layout, LayoutError
from shardwise.score.facts import Source, words
from shardwise.score.skip import SkipError
from shardwise.score.table import Published

MAX_STAGES = 128
"""Stages to walk at the most: as many as any published run has."""


def layout_of(row: Published, source: Source, model: Model, cluster: Cluster) -> Layout:
    """How a row's training was cut. Raises SkipError; the rules of `plan/rules.py` are not asked here."""
    tp, pp, cp = (_printed(row, name) for name in ("tp", "pp", "cp"))
    dp = _dp(row, tp * pp * cp)
    zero, shards = _zero(row, source, dp, cluster)
    schedule = _schedule(row, source, pp)
    sp = row.sp == "yes" if row.sp else source.defaults.sp
    try:
        layout = Layout(
            tp=tp,
            sp=sp,
            cp=cp,
            cp_kind=source.defaults.cp_kind,
            pp=pp,
            ep=row.ep or (shards if source.defaults.ep_is_shards and model.experts else 1),
            etp=row.etp or (tp if source.defaults.etp_is_tp and model.experts else 1),
            dp_replicate=dp // shards,
            dp_shard=shards,
            zero=zero,
            schedule=schedule,
            split=_split(row, pp) if schedule == "1f1b" else (),
            mb=_micro_batch(row, source, dp),
            recompute=_recompute(row, source),
        )
    except LayoutError as error:
        raise SkipError("layout", error.faults[0]) from None
    if layout.stages > MAX_STAGES:
        raise SkipError("layout", f"{layout.stages:,} stages; at most {MAX_STAGES:,} are walked")
    return layout


def _printed(row: Published, column: str) -> int:
    value: int | None = getattr(row, column)
    if value is None:
        raise SkipError("layout", f"{column} is not printed")
    return value


def _dp(row: Published, rest: int) -> int:
    """Printed, or what the devices leave."""
    devices = row.devices or 0
    if row.dp is not None and "dp column is wrong" not in row.notes:
        return row.dp
    if devices % rest:
        raise SkipError("layout", f"tp x pp x cp of {rest} does not divide {devices:,} devices")
    return devices // rest


def _zero(row: Published, source: Source, dp: int, cluster: Cluster) -> tuple[int, int]:
    """(level, ranks that the state is sharded over)."""
    zero = row.zero_stage if row.zero_stage is not None else source.defaults.zero
    if zero is None:
        raise SkipError("layout", "the ZeRO level is not printed")
    named = re.search(source.shards, row.notes) if source.shards else None
    shards = int(named[1]) if named else dp
    if "HSDP" in row.notes:  # sharded within a node, replicated between nodes
        shards = cluster.devices_per_node
    if zero == 0:
        return 0, 1
    if not 0 < shards <= dp or dp % shards:
        raise SkipError("layout", f"shards over {shards} of {dp} data-parallel ranks")
    return zero, shards


def _schedule(row: Published, source: Source, pp: int) -> str:
    if pp == 1:
        return "1f1b"
    text = row.schedule or source.defaults.schedule
    name = words().schedules.get(text)
    if name is None:
        raise SkipError("layout", f"schedule {text!r} is not planned" if text else "the schedule is not printed")
    if "V" not in name:
        return name
    virtual = row.vpp or source.defaults.vpp
    if virtual is None:
        raise SkipError("layout", "vpp, the stages of a rank, is not printed")
    return name.replace("V", str(virtual)) if virtual > 1 else "1f1b"


def _split(row: Published, pp: int) -> tuple[int, ...]:
    """DeepSpeed fills stages from the first one on, where the notes say that the last one is uneven."""
    if "uneven last stage" not in row.notes or row.layers is None:
        return ()
    each = -(-row.layers // pp)
    last = row.layers - each * (pp - 1)
    return (each,) * (pp - 1) + (last,) if last >= 0 else ()


def _micro_batch(row: Published, source: Source, dp: int) -> int:
    if row.micro_batch is not None:
        return row.micro_batch
    if row.global_batch_seqs == dp:
        return 1
    if source.defaults.micro_batch is None:
        raise SkipError("layout", "the micro-batch is not printed")
    return source.defaults.micro_batch


def _recompute(row: Published, source: Source) -> str:
    known = words().recomputes | ({"selective": source.selective} if source.selective else {})
    found = known.get(row.recompute) if row.recompute else source.defaults.recompute
    if found is None:
        raise SkipError("recompute", f"{row.recompute} is not planned" if row.recompute else "not printed")
    return found
