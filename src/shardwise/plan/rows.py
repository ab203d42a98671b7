"""The lowered row of a pipeline rank: what the executor runs, the ledger predicts from and the memory model walks."""

from __future__ import annotations

from functools import lru_cache

from shardwise import schedule as schedules
from shardwise.model.spec import Model
from shardwise.plan.buckets import bucket_names, buckets_of
from shardwise.plan.layout import Layout
from shardwise.plan.shards import RankUnits, rank_units
from shardwise.schedule.lowering import Holdings, Lowered, lower


def holdings(units: RankUnits, layout: Layout) -> Holdings:
    """What the lowering pass must know of a rank."""
    ordered = [u.name for s in sorted(units.stages, key=lambda s: s.index) for u in s.units]
    bucket = bucket_names(buckets_of(units, layout))
    return Holdings(
        units={s.index: [u.name for u in s.units] for s in units.stages},
        uses=units.uses,
        resharded=layout.zero == 3,
        scattered=layout.zero >= 2,
        forward_only=[u.name for u in units.units if not u.block.backward_reads],
        buckets=bucket,
        twins=list(dict.fromkeys(bucket[s] for u in ordered for s in units.uses[u] if units.storages[s].twins)),
        tied=[name for name, storage in units.storages.items() if storage.tied is not None],
    )


@lru_cache(maxsize=256)
def lowered_row(model: Model, layout: Layout, micro_batches: int, pp_rank: int) -> Lowered:
    """The instructions of one pipeline rank for a step of so many micro-batches."""
    row = schedules.rows(layout.schedule, layout.pp, micro_batches)[pp_rank]
    return lower(row, holdings(rank_units(model, layout, pp_rank), layout))
