"""Results as plain dicts for programs: the same content as the tables, in SI base units, the unit in the key."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.cluster.survey import questions
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.runs import runs_here
from shardwise.results import Finding, MemoryBreakdown, StepTime
from shardwise.units import gib
from shardwise.view import words
from shardwise.view.review import (
    AtLevel,
    Others,
    Request,
    Review,
    Told,
    UnderStack,
    bubble_s,
    communication_s,
    hardware_flops,
    ledger_rows,
    logits_of,
)

if TYPE_CHECKING:
    from shardwise.search.explain import Explanation
    from shardwise.search.fitting import NothingFits
    from shardwise.search.solve import Candidate, SearchResult
    from shardwise.search.whynot import WhyNot


def show(asked: Request, of: Review, written: str | None = None, others: Others | None = None) -> dict[str, Any]:
    """`shardwise show`."""
    others = others or Others()
    compared = {
        "stacks": [under_stack(one) for one in others.stacks],
        "levels": [at_level(one) for one in others.levels],
    }
    return {**request(asked), **review(of), **{k: v for k, v in compared.items() if v}, "written": written}


def at_level(of: AtLevel) -> dict[str, Any]:
    """One layout at one ZeRO level."""
    return {
        "zero": of.layout.zero,
        "layout": str(of.layout),
        "fits": of.memory.total_bytes <= of.capacity_bytes,
        **_memory(of.memory),
        "step": step(of.step),
    }


def _memory(m: MemoryBreakdown) -> dict[str, Any]:
    return {
        "pipeline_rank": m.rank,
        "peak_action": m.action,
        "proved_bytes": dict(m.proved),
        "assumed_bytes": dict(m.assumed),
        "total_bytes": m.total_bytes,
    }


def under_stack(of: UnderStack) -> dict[str, Any]:
    """One layout under one software stack."""
    broken = [finding(f) for f in of.broken]
    found = None if of.found is None else candidate(of.found)
    return {"stack": of.stack.name, "title": of.stack.title, "found": found, "broken": broken}


def finding(of: Finding) -> dict[str, str]:
    return {"rule": of.rule, "message": of.message, "fix": of.fix}


def runs(job: Job, layout: Layout) -> dict[str, Any]:
    """Whether `prove` and `train` take it, and every rule that forbids it."""
    broken = runs_here(layout, job)
    return {"runs_here": not broken, "runs_broken": [finding(f) for f in broken]}


def fit(asked: Request, of: Review | None, found: SearchResult | None, told: Told | None = None) -> dict[str, Any]:
    """`shardwise fit`: of a given layout, or of the best that a search found, if any."""
    answer: dict[str, Any] = {"fits": False}
    if of is not None:
        answer = brief(of)
    elif found is not None:
        answer |= {"answer": words.no(found, told.nothing if told else None), **told_of(told or Told())}
    return {**request(asked), **answer, "search": None if found is None else search(found)}


def plan(asked: Request, found: SearchResult, written: str | None, told: Told | None = None) -> dict[str, Any]:
    """`shardwise plan`."""
    return {**request(asked), **search(found), **told_of(told or Told()), "written": written}


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
        "stack": of.stack.name,
        "stack_title": of.stack.title,
        "imbalance": of.imbalance,
        "allocator_margin": words.margin(of),
        "optimizer": of.optimizer.name,
        "optimizer_title": of.optimizer.title,
        "training": "full",
        "mfu_name": asked.mfu,
        "mfu_convention": words.mfu_convention(asked.mfu),
        "questions": questions(of.cluster),
        "constants": "uncalibrated priors",
        "assumed": list(asked.assumed),
    }


def brief(of: Review) -> dict[str, Any]:
    """Whether one layout fits, how fast it is, and why."""
    return {
        "layout": str(of.layout),
        "fits": of.fits,
        "verdict": words.verdict(of),
        "answer": words.yes_or_no(of),
        "capacity_bytes": of.capacity_bytes,
        "peak_bytes": of.fullest.total_bytes,
        "headroom_bytes": of.headroom_bytes,
        "fullest_pipeline_rank": of.fullest.rank,
        "memory": [_memory(m) for m in of.memory],
        "remedies": [candidate(c) for c in of.remedies],
        "flops_per_token": of.flops_per_token,
        "flops_per_step": of.flops_per_token * of.job.tokens,
        "hardware_flops_per_token": hardware_flops(of.job, of.layout)._asdict(),
        "logits": None if (logits := logits_of(of.job, of.layout)) is None else logits._asdict(),
        "step": step(of.step),
        **runs(of.job, of.layout),
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


def told_of(told: Told) -> dict[str, Any]:
    """What is said of a search beside its ranking."""
    found: dict[str, Any] = {
        "explanation": None if told.explanation is None else explanation(told.explanation),
        "nothing_fits": None if told.nothing is None else nothing_fits(told.nothing),
        "why_not": None if told.why_not is None else why_not(told.why_not),
    }
    if told.loss:
        found |= {
            "critical_batch_tokens": told.critical_batch_tokens,
            "time_to_loss": [asdict(one) for one in told.loss],
        }
    return found


def explanation(of: Explanation) -> dict[str, Any]:
    """Why the winner won; gaps are shares of its step."""
    recipe = of.recipe
    return {
        "limit": of.limit,
        "batch": of.batch,
        "recipe": recipe and {**candidate(recipe.candidate), "gap": recipe.gap, "text": recipe.text},
        "advice": [
            {
                "id": one.id,
                "rule": one.rule,
                "followed": one.followed,
                "text": one.text,
                "alternative": one.alternative and candidate(one.alternative),
            }
            for one in of.advice
        ],
        "rejected": [
            {
                "layout": str(one.layout),
                "gap": one.gap,
                "over_bytes": one.over_bytes,
                "findings": [finding(f) for f in one.findings],
                "text": one.text,
            }
            for one in of.rejected
        ],
        "runs_here": not of.runs,
        "runs_broken": [finding(f) for f in of.runs],
    }


def nothing_fits(of: NothingFits) -> dict[str, Any]:
    """What comes closest, and what fits instead."""
    ways = [{"text": way.text, "cluster": way.job.cluster.name, **candidate(way.candidate)} for way in of.ways]
    return {"text": of.text, "excess": of.excess and of.excess.text, "ways": ways}


def why_not(of: WhyNot) -> dict[str, Any]:
    """Rules, memory or time that speak against one layout."""
    return {
        "layout": str(of.layout),
        "text": list(of.text),
        "findings": [finding(f) for f in of.findings],
        "candidate": of.candidate and candidate(of.candidate),
        "over_bytes": of.excess and of.excess.over_bytes,
        "gap": of.gap,
        "causes_s": dict(of.causes),
        "path": [{"layout": str(s.layout), "step_s": s.seconds, "fits": s.fits, "text": s.text} for s in of.path],
        "remedies": [candidate(c) for c in of.remedies],
    }
