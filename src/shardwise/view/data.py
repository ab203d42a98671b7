"""Results as plain dicts for programs: the same content as the tables, in SI base units, the unit in the key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.results import StepTime
from shardwise.units import gib
from shardwise.view import words
from shardwise.view.review import Request, Review, bubble_s, communication_s, ledger_rows

if TYPE_CHECKING:
    from shardwise.search.solve import Candidate, SearchResult


def show(asked: Request, of: Review, written: str | None = None) -> dict[str, Any]:
    """`shardwise show`."""
    return {**request(asked), **review(of), "written": written}


def fit(asked: Request, of: Review | None, found: SearchResult | None) -> dict[str, Any]:
    """`shardwise fit`: of a given layout, or of the best that a search found, if any."""
    answer: dict[str, Any] = {"fits": False} if of is None else brief(of)
    return {**request(asked), **answer, "search": None if found is None else search(found)}


def plan(asked: Request, found: SearchResult, written: str | None) -> dict[str, Any]:
    """`shardwise plan`."""
    return {**request(asked), **search(found), "written": written}


def plan_results(found: SearchResult) -> dict[str, Any]:
    """What a plan file keeps of the search that made it."""
    best = found.best[0]
    counts = {"enumerated": found.enumerated, "legal": found.legal, "fitting": found.fitting}
    return {**_results(best.step, best.peak_bytes, best.capacity_bytes), **counts}


def show_results(of: Review) -> dict[str, Any]:
    """What a plan file keeps of one layout's review."""
    return _results(of.step, of.fullest.total_bytes, of.capacity_bytes)


def _results(step: StepTime, peak_bytes: int, capacity_bytes: int) -> dict[str, Any]:
    return {
        "step_s": step.total_s,
        "tokens_per_s_per_device": step.tokens_per_s_per_device,
        "mfu": step.mfu,
        "mfu_convention": words.MFU_CONVENTION,
        "peak_GiB": round(gib(peak_bytes), 3),
        "capacity_GiB": round(gib(capacity_bytes), 3),
        "constants": "uncalibrated priors",
    }


def request(asked: Request) -> dict[str, Any]:
    """What was asked, and what was assumed where it was left open."""
    of = asked.job
    return {
        "model": of.model.name,
        "parameters": of.model.parameters,
        "cluster": of.cluster.name,
        "device": of.cluster.device.name,
        "devices": of.cluster.world_size,
        "seq_len": of.seq_len,
        "global_batch": of.global_batch,
        "tokens": of.tokens,
        "precision": of.precision.name,
        "optimizer": "AdamW",
        "mfu_convention": words.MFU_CONVENTION,
        "constants": "uncalibrated priors",
        "assumed": list(asked.assumed),
    }


def brief(of: Review) -> dict[str, Any]:
    """Whether one layout fits, how fast it is, and why."""
    return {
        "layout": str(of.layout),
        "fits": of.fits,
        "verdict": words.verdict(of),
        "capacity_bytes": of.capacity_bytes,
        "peak_bytes": of.fullest.total_bytes,
        "headroom_bytes": of.headroom_bytes,
        "fullest_pipeline_rank": of.fullest.rank,
        "memory": [
            {
                "pipeline_rank": m.rank,
                "peak_action": m.action,
                "proved_bytes": dict(m.proved),
                "assumed_bytes": dict(m.assumed),
                "total_bytes": m.total_bytes,
            }
            for m in of.memory
        ],
        "remedies": [candidate(c) for c in of.remedies],
        "flops_per_token": of.flops_per_token,
        "flops_per_step": of.flops_per_token * of.job.tokens,
        "step": step(of.step),
    }


def review(of: Review) -> dict[str, Any]:
    """Everything about one layout."""
    return {
        **brief(of),
        "ledger": {
            "rank": of.rank,
            "rows": [row._asdict() for row in ledger_rows(of.ledger, of.job.cluster)],
        },
        "pipeline": {
            "schedule": of.layout.schedule,
            "micro_batches": of.job.micro_batches(of.layout),
            "drawn_micro_batches": of.schedule.micro_batches,
            "span_s": of.timeline.span_s,
            "busy_s": list(of.timeline.busy_s),
        },
    }


def step(of: StepTime) -> dict[str, Any]:
    """A step's time by cause, and what follows from it."""
    return {
        "step_s": of.total_s,
        "parts_s": dict(of.parts_s),
        "bubble_share": bubble_s(of) / of.total_s,
        "exposed_communication_share": communication_s(of) / of.total_s,
        "tokens_per_s_per_device": of.tokens_per_s_per_device,
        "mfu": of.mfu,
        "micro_batches_walked": of.walked,
    }


def candidate(of: Candidate) -> dict[str, Any]:
    """One ranked layout."""
    return {
        "layout": str(of.layout),
        "fits": of.peak_bytes <= of.capacity_bytes,
        "peak_bytes": of.peak_bytes,
        "capacity_bytes": of.capacity_bytes,
        **step(of.step),
    }


def search(of: SearchResult) -> dict[str, Any]:
    """The ranked table and its counts."""
    return {
        "enumerated": of.enumerated,
        "legal": of.legal,
        "fitting": of.fitting,
        "walked": of.walked,
        "seconds": of.seconds,
        "best": [candidate(c) for c in of.best],
        "closest": None if of.closest is None else candidate(of.closest),
    }
