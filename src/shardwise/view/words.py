"""Sentences: what was asked, what was assumed, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.plan.job import Job
from shardwise.results import StepTime
from shardwise.units import format_bytes, format_count, format_flops, format_rate, format_seconds, gib
from shardwise.view.review import THIN, Review

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.search.solve import Candidate, SearchResult

MFU_CONVENTION = "model FLOPs of causal attention counted exactly, no recompute, over the data sheet's dense peak"


def what(job: Job) -> str:
    """`llama-3.1-8b, 8.03 B parameters, on 8xh100, 8 devices`."""
    cluster = job.cluster
    parameters, devices = format_parameters(job.model.parameters), format_count(cluster.world_size)
    return f"{job.model.name}, {parameters} parameters, on {cluster.name}, {devices} devices"


def batch(job: Job) -> str:
    """`4,194,304 tokens = 512 sequences of 8,192 a step`."""
    plural = "" if job.global_batch == 1 else "s"
    count, each = format_count(job.global_batch), format_count(job.seq_len)
    return f"{format_count(job.tokens)} tokens = {count} sequence{plural} of {each} a step"


def assumptions(job: Job, extra: tuple[str, ...] = ()) -> str:
    """What every figure rests on; `extra` are values that the user left open."""
    p = job.precision
    dtypes = p.compute if p.compute == p.accumulate else f"{p.compute} with {p.accumulate} master weights and gradients"
    length = [] if any(e.startswith("--seq") for e in extra) else [f"sequence length {format_count(job.seq_len)}"]
    words = [
        f"{p.name} ({dtypes})",
        "AdamW",
        "full training",
        *length,
        "no dropout",
        f"MFU: {MFU_CONVENTION}",
        f"times and assumed memory: uncalibrated priors of {job.cluster.device.title}",
    ]
    return "Assumed: " + "; ".join([*extra, *words]) + "."


def verdict(review: Review) -> str:
    """Whether the fullest rank fits, by how much, and where it peaks."""
    at = review.fullest
    margin = fit(at.total_bytes, review.capacity_bytes)
    return f"{margin}; fullest is pipeline rank {at.rank}, in the {action(at.action)}"


ACTIONS = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "backward"}


def action(said: str) -> str:
    """`BW of stage 3` in words."""
    letters, of, rest = said.partition(" of ")
    return f"{ACTIONS.get(letters, letters)}{of}{rest}"


def fit(peak_bytes: int, capacity_bytes: int) -> str:
    """`fits with 5.1 GiB (6 %) of 79.2 GiB to spare` or `does not fit: 12.3 GiB over 79.2 GiB`."""
    spare, capacity = capacity_bytes - peak_bytes, f"{gib(capacity_bytes):,.1f} GiB"
    if spare < 0:
        return f"does not fit: {over(-spare)} over {capacity}"
    share = spare / capacity_bytes
    thin = ", which is thin: the assumed parts are as uncertain" if share < THIN else ""
    return f"fits with {over(spare)} ({percent(share)}) of {capacity} to spare{thin}"


def percent(share: float) -> str:
    """`45 %`, and `0.2 %` where whole ones would say too little."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def over(n_bytes: int) -> str:
    """At least 0.1 GiB is said in GiB, less in smaller units, so that it never reads as nothing."""
    return f"{gib(n_bytes):,.1f} GiB" if gib(n_bytes) >= 0.1 else format_bytes(n_bytes)


def speed(step: StepTime) -> str:
    """`12.3 s a step, 812 tokens/s/device, 45.6 % MFU`."""
    rate = f"{step.tokens_per_s_per_device:,.0f} tokens/s/device"
    return f"{format_seconds(step.total_s)} a step, {rate}, {100 * step.mfu:.1f} % MFU"


def flops(review: Review) -> str:
    """Model FLOPs a token, a step and a device, and the rate that the step time makes of them."""
    job, step = review.job, review.step
    total = review.flops_per_token * job.tokens
    rate = total / job.cluster.world_size / step.total_s
    return (
        f"model FLOPs, forward and backward: {format_flops(review.flops_per_token)} a token, "
        f"{format_flops(total)} a step;\n"
        f"{format_rate(rate)} of {format_rate(step.peak_flops_per_s)} a device"
    )


def counts(found: SearchResult) -> str:
    """How many layouts were looked at."""
    numbers = (found.enumerated, found.legal, found.fitting)
    said = "{} layouts enumerated, {} legal, {} fit".format(*map(format_count, numbers))
    return f"{said}; {format_count(found.walked)} walked action by action, in {format_seconds(found.seconds)}"


def folded(families: Sequence[tuple[Candidate, int]]) -> str:
    """What the ranked table leaves out: `folded, as they ...: 1 like #2, 3 like #4`."""
    said = [f"{others} like #{place}" for place, (_, others) in enumerate(families, 1) if others]
    if not said:
        return ""
    return f"folded, as they differ in dp_replicate x dp_shard alone: {', '.join(said)} (--json has them)"


def best(found: SearchResult) -> list[tuple[str, str]]:
    """Titles and verdicts of the winner of a search and, where its headroom is thin, of the fastest that has more."""
    first, other = found.best[0], roomy(found)
    if other is first:
        return [_ranked("Fastest", first)]
    if other is None:
        return [
            _ranked("Fastest", first),
            (f"None of the {len(found.best)} fastest has {100 * THIN:.0f} % to spare", ""),
        ]
    return [_ranked("Fastest", first), _ranked(f"Fastest with {100 * THIN:.0f} % to spare", other)]


def roomy(found: SearchResult) -> Candidate | None:
    """The fastest of those ranked whose headroom is not thin."""
    return next((c for c in found.best if not thin(c.peak_bytes, c.capacity_bytes)), None)


def thin(peak_bytes: int, capacity_bytes: int) -> bool:
    """Whether a layout leaves less than the assumed parts of memory are uncertain by."""
    return capacity_bytes - peak_bytes < THIN * capacity_bytes


def _ranked(title: str, found: Candidate) -> tuple[str, str]:
    return f"{title}: {found.layout}", f"{speed(found.step)};\n{fit(found.peak_bytes, found.capacity_bytes)}"


def nothing_fits(found: SearchResult) -> str:
    """Why a search came back empty, and how far off the closest layout is."""
    if found.closest is None:
        return "no layout is legal for this model, cluster and batch"
    short = found.closest.peak_bytes - found.closest.capacity_bytes
    capacity = f"{gib(found.closest.capacity_bytes):,.1f} GiB"
    return f"nothing fits: the closest is {over(short)} over {capacity}\n  {found.closest.layout}"


def format_parameters(count: int) -> str:
    """`8.03 B`, `405.9 B`, `820,480`: B is 10**9, M is 10**6."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            value = count / size
            return f"{value:,.2f} {unit}" if value < 10 else f"{value:,.1f} {unit}"
    return format_count(count)
