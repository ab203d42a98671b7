"""Why not this layout? The rules that it breaks, the memory that it lacks, or how much slower it is and by what."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.rules import findings
from shardwise.results import Finding
from shardwise.search import phrases
from shardwise.search.fitting import Excess, excess, remedies
from shardwise.search.neighbours import Field
from shardwise.search.path import Step, path
from shardwise.search.solve import Candidate, SearchResult, evaluate, family

NAMED = 3
"""Remedies that are named."""

LEAST = 0.002
"""Share of a step from which on a cause is named."""


@dataclass(frozen=True, slots=True)
class WhyNot:
    """`text` answers in sentences; the rest is what they are made of, empty where it does not apply. `gap`: the share
    of the winner's step that this one takes longer. `causes`: seconds of a step more than the winner's, by cause, the
    largest difference first. `path`: from this layout to the winner."""

    layout: Layout
    text: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    candidate: Candidate | None = None
    excess: Excess | None = None
    gap: float | None = None
    causes: tuple[tuple[str, float], ...] = ()
    path: tuple[Step, ...] = ()
    remedies: tuple[Candidate, ...] = ()


def why_not(job: Job, layout: Layout, found: SearchResult) -> WhyNot:
    """Of any layout, legal or not, against the best one found."""
    if broken := tuple(findings(layout, job)):
        rules = "a rule" if len(broken) == 1 else f"{len(broken)} rules"
        said = (f"{layout} breaks {rules}.", *(f"{fault.message}: {fault.fix}." for fault in broken))
        return WhyNot(layout, said, findings=broken)
    asked = evaluate(job, layout)
    best = found.best[0] if found.best else None
    if not asked.fits:
        return _too_large(job, asked, best)
    if best is None:
        return WhyNot(layout, ("It fits, and nothing within the limits of the search does.",), candidate=asked)
    return _slower(job, asked, best)


def _too_large(job: Job, asked: Candidate, best: Candidate | None) -> WhyNot:
    over, ways = excess(job, asked.layout), tuple(remedies(job, asked.layout)[:NAMED])
    gap = None if best is None else _gap(asked, best)
    said = [f"{asked.layout} does not fit.", over.text]
    if gap is not None:
        said.append(f"If it did, its step would {phrases.slower(gap, 'the best one').replace('takes', 'take', 1)}.")
    named = [f"{phrases.difference(c.layout, asked.layout)} ({phrases.seconds(c.step.total_s)} a step)" for c in ways]
    said.append(f"It fits with {phrases.listed(named, 'or')}." if named else "No single change makes it fit.")
    return WhyNot(asked.layout, tuple(said), candidate=asked, excess=over, gap=gap, remedies=ways)


def _gap(asked: Candidate, best: Candidate) -> float:
    return asked.step.total_s / best.step.total_s - 1


def _slower(job: Job, asked: Candidate, best: Candidate) -> WhyNot:
    gap = _gap(asked, best)
    if family(asked.layout) == family(best.layout):
        same = "is the best one found" if asked.layout == best.layout else "is the best one found, its replicas apart"
        return WhyNot(asked.layout, (f"{asked.layout} {same}.",), candidate=asked, gap=gap)
    others = best.step.parts_s
    more = {cause: s - others.get(cause, 0.0) for cause, s in asked.step.parts_s.items()}
    causes = tuple(sorted(more.items(), key=lambda item: (-abs(item[1]), item[0])))
    times = f"{phrases.seconds(asked.step.total_s)} against {phrases.seconds(best.step.total_s)}"
    said = [f"{asked.layout} fits, and its step {phrases.slower(gap, 'the best one')}: {times}."]
    named = [_difference(cause, s) for cause, s in causes if abs(s) >= LEAST * best.step.total_s]
    if named:
        said.append(f"By cause: {phrases.listed(named)}.")
    steps = tuple(path(Field(job, best), asked.layout, best.layout))
    if steps:
        said.append(f"To the best one in {phrases.count(len(steps), 'change')}, by the closed forms:")
    said += [step.text for step in steps]
    return WhyNot(asked.layout, tuple(said), candidate=asked, gap=gap, causes=causes, path=steps)


def _difference(cause: str, seconds: float) -> str:
    return f"{phrases.seconds(abs(seconds))} {'more' if seconds > 0 else 'less'} for {phrases.CAUSES[cause]}"
