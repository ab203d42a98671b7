"""Sentences: what was asked, what was assumed, and the verdict."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from shardwise.plan.job import Job
from shardwise.results import StepTime
from shardwise.units import format_bytes, format_count, format_flops, format_rate, format_seconds, gib
from shardwise.view.review import THIN, Review

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.plan.layout import Layout
    from shardwise.search.explain import Comparison
    from shardwise.search.fitting import NothingFits
    from shardwise.search.solve import Candidate, SearchResult
    from shardwise.view.review import AtLevel, Told

MFU_CONVENTION = "model FLOPs of causal attention counted exactly, no recompute, over the data sheet's dense peak"


def mfu_convention(name: str) -> str:
    """How the model FLOPs were counted, and what they are held against."""
    from shardwise.account.compute import CONVENTIONS

    return MFU_CONVENTION if name == "exact" else f"{CONVENTIONS[name]}, over the data sheet's dense peak"


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


def assumptions(job: Job, extra: tuple[str, ...] = (), mfu: str = "exact") -> str:
    """What every figure rests on; `extra` are values that the user left open."""
    p, device = job.precision, job.cluster.device
    dtypes = f"{p.compute}{_wider(job)}{f', products in {p.product}' if p.product else ''}"
    length = [] if any(e.startswith("--seq") for e in extra) else [f"sequence length {format_count(job.seq_len)}"]
    words = [
        f"{p.name} ({dtypes})",
        job.optimizer.title,
        "full training",
        *length,
        "dropout" if job.stack.saves.dropout else "no dropout",
        *([f"routing imbalance {job.imbalance:g}"] if job.model.experts else []),
        f"software stack: {stack(job)}",
        f"allocator margin {percent(margin(job))}",
        f"MFU: {mfu_convention(mfu)}",
        f"times and assumed memory: uncalibrated priors of {device.title}",
    ]
    units = f"GiB is 2^30 bytes, GB 10^9: {device.name} has {gib(device.usable_bytes):,.1f} usable GiB"
    return "Assumed: " + "; ".join([*extra, *words]) + f". {units}."


def _wider(job: Job) -> str:
    """What is kept in another dtype than the weights."""
    p, state = job.precision, job.stack.state
    if state.optimizer_bytes_per_parameter:
        each = f"{state.optimizer_bytes_per_parameter:g} bytes a parameter of optimizer state"
        return f" with {job.gradient_dtype} gradients, {each}"
    if p.compute == p.accumulate:
        return ""
    if job.gradient_dtype == p.accumulate:
        return f" with {p.accumulate} master weights and gradients"
    return f" with {p.accumulate} master weights, {job.gradient_dtype} gradients"


def stack(job: Job) -> str:
    """`megatron (Megatron-LM core 0.12)`; under our own name, what that is."""
    return f"{job.stack.name} ({job.stack.title})" if job.stack.title != job.stack.name else job.stack.name


def margin(job: Job) -> float:
    """Share of the tensors that the allocator is assumed to hold beside them."""
    own = job.stack.allocator_margin
    return job.cluster.device.assumed_memory.allocator_margin if own is None else own


def verdict(review: Review) -> str:
    """Whether the fullest rank fits, by how much, and where it peaks."""
    return f"{fit(review.fullest.total_bytes, review.capacity_bytes)}; {fullest(review)}"


def fullest(review: Review) -> str:
    """The pipeline rank that needs most, and when."""
    return f"fullest is pipeline rank {review.fullest.rank}, in the {action(review.fullest.action)}"


def yes_or_no(review: Review) -> str:
    """The answer of `fit` in one line: by how much, and if not, the nearest thing tried that fits."""
    margin = fit(review.fullest.total_bytes, review.capacity_bytes)
    if review.fits:
        return f"yes: {margin}"
    if not review.remedies:
        return f"no: {margin}; no single change tried makes it fit"
    nearest = review.remedies[0]
    return f"no: {margin}; with {nearest.layout} it {fit(nearest.peak_bytes, nearest.capacity_bytes)}"


def no(found: SearchResult, nothing: NothingFits | None) -> str:
    """The answer of `fit` and `plan` where nothing fits: by how much, and the nearest thing that does."""
    ways = nothing.ways if nothing else ()
    nearest = f"; {ways[0].text}" if ways else ""
    if found.closest is None:
        return f"no: no layout is legal for this model, cluster and batch{nearest}"
    short = over(found.closest.peak_bytes - found.closest.capacity_bytes)
    capacity = f"{gib(found.closest.capacity_bytes):,.1f} GiB"
    return f"no: {short} over {capacity} with the layout that comes closest{nearest}"


def recipe(found: Comparison | None) -> str:
    """What the last row of the ranking is."""
    return f"r: the field's recipe, {100 * found.gap:+.1f} % of the step" if found else ""


def loss(told: Told) -> str:
    """What the column of the critical batch means."""
    if not told.loss or told.critical_batch_tokens is None:
        return ""
    first, critical = told.loss[0], format_count(told.critical_batch_tokens)
    return (
        f"loss/S_min: seconds to a loss over the steps of an endless batch, at a critical batch of {critical} tokens: "
        f"this batch takes {first.steps_factor:.2f} times those steps, and {first.tokens_factor:.2f} times the tokens "
        "of a small batch (McCandlish et al. 1812.06162)"
    )


def levels(found: Sequence[AtLevel]) -> list[str]:
    """Where a higher ZeRO level needs more memory than the one below, which parts outweigh what it cuts."""
    said: list[str] = []
    for low, high in pairwise(found):
        more = high.memory.total_bytes - low.memory.total_bytes
        if more <= 0:
            continue
        before, after = low.memory.proved | low.memory.assumed, high.memory.proved | high.memory.assumed
        change = {part: after.get(part, 0) - before.get(part, 0) for part in {**before, **after}}
        grown = ", ".join(f"{part} +{over(n)}" for part, n in change.items() if n > more / 20)
        shrunk = ", ".join(f"{part} -{over(-n)}" for part, n in change.items() if -n > more / 20)
        why = f"{grown} against {shrunk or 'nothing that it cuts'}"
        said.append(f"zero={high.layout.zero} needs {over(more)} more than zero={low.layout.zero}: {why}")
    return said


def runs(job: Job, layout: Layout) -> list[str]:
    """`runs here: yes`, or every rule that forbids it and how to get a plan that runs."""
    from shardwise.plan.runs import runs_here

    broken = runs_here(layout, job)
    if not broken:
        return ["runs here: yes, `prove` and `train` take it"]
    rules = ", ".join(f.rule for f in broken)
    return [f"runs here: no, planned only ({rules})", *map(str, broken), RUNNABLE]


RUNNABLE = "a plan that runs: `shardwise plan ... --runnable`"

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


def logits(review: Review) -> str:
    """What the vocabulary costs where the head is; nothing for a model without one."""
    from shardwise.view.review import logits_of

    found = logits_of(review.job, review.layout)
    if found is None:
        return ""
    own, whole = over(found.own_bytes), over(found.at_loss_bytes)
    vocab = f"a vocabulary of {format_count(review.job.model.vocab)}"
    return (
        f"of the activations, on the last stage: logits {own} a micro-batch, {whole} while the loss is made ({vocab})"
    )


def exposed(step: StepTime) -> str:
    """The communication that nothing hides, by cause, on the busiest rank."""
    from shardwise.view.review import NO_COMMUNICATION

    parts = [(name, s) for name, s in step.parts_s.items() if s > 0 and name not in NO_COMMUNICATION]
    said = ", ".join(f"{name} {format_seconds(s)}" for name, s in parts)
    return f"exposed in the step of the busiest rank: {said or 'nothing'}"


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
    total = step.model_flops
    rate = total / job.cluster.world_size / step.total_s
    return (
        f"model FLOPs, forward and backward: {format_flops(total / job.tokens)} a token, "
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
