"""From one layout to another, a key at a time: the order of the changes in which the step gets longer least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.search import phrases
from shardwise.search.neighbours import Change, Field, Near, resized

TOGETHER: tuple[tuple[str, ...], ...] = (
    ("tp", "sp"),
    ("cp", "cp_kind"),
    ("pp",),
    ("ep",),
    ("etp",),
    ("zero", "dp_replicate"),
    ("schedule", "split"),
    ("mb",),
    ("recompute",),
    ("order",),
)
"""Keys that one change sets together. Data parallelism follows from the other degrees."""

DETOUR = 0.05
"""Share of the first step's seconds that a change costs more in the choice of the order if it sets more than one of
TOGETHER, for each of them, or leads to a layout that does not fit."""

Set = frozenset[int]


@dataclass(frozen=True, slots=True)
class Step:
    """One change on the way, and the layout that it leads to with its seconds, by the closed form."""

    change: str
    layout: Layout
    seconds: float
    fits: bool
    text: str


def path(near: Field, start: Layout, end: Layout) -> Iterator[Step]:
    """The changes from one legal layout to another. What lies between is legal; it may not fit, and says so."""
    differ = [keys for keys in TOGETHER if any(getattr(start, key) != getattr(end, key) for key in keys)]
    whole = frozenset(range(len(differ)))
    between = {chosen: _between(near.job, start, end, [differ[i] for i in chosen]) for chosen in _subsets(len(differ))}
    between |= {frozenset[int](): start, whole: end}
    priced = {n.layout: n for n in near.screen(x for x in between.values() if x is not None)}
    states = {chosen: priced[x] for chosen, x in between.items() if x in priced}
    here = states[frozenset()]
    for chosen in _order(states, whole):
        there = states[chosen]
        if there.layout != here.layout:
            yield _step(here, there, near.scale)
            here = there


def _subsets(n: int) -> list[Set]:
    """By size."""
    return [frozenset(chosen) for size in range(n + 1) for chosen in combinations(range(n), size)]


def _between(job: Job, start: Layout, end: Layout, chosen: Sequence[tuple[str, ...]]) -> Layout | None:
    """`start` with these keys as in `end`, on all devices."""
    keys = [key for keys in chosen for key in keys]
    plain: Change = {key: getattr(end, key) for key in keys if key not in ("zero", "dp_replicate", "schedule", "split")}
    named = resized(job, start, plain)
    if named is None:
        return None
    if "schedule" in keys and named.pp > 1:
        named = replace(named, schedule=end.schedule, split=end.split if named.pp == end.pp else ())
    if "zero" not in keys:
        return named
    copies = end.dp_replicate if end.zero and named.dp % end.dp_replicate == 0 else 1 if end.zero else named.dp
    return replace(named, zero=end.zero, dp_replicate=copies, dp_shard=named.dp // copies)


def _order(states: dict[Set, Near], whole: Set) -> list[Set]:
    """The sets of changes on the cheapest way, the empty one left out: by dynamic programming over all of them."""
    detour = DETOUR * states[frozenset()].seconds
    best: dict[Set, tuple[float, list[Set]]] = {frozenset(): (0.0, [])}
    for there in sorted(states, key=lambda chosen: (len(chosen), sorted(chosen)))[1:]:
        near, ways = states[there], list[tuple[float, list[Set]]]()
        for here, (cost, way) in best.items():
            if here < there:
                cost += max(0.0, near.seconds - states[here].seconds) + detour * (len(there - here) - 1)
                ways.append((cost + detour * (not near.fits and there != whole), [*way, there]))
        best[there] = min(ways, key=lambda found: found[0])
    return best[whole][1]


def _step(here: Near, there: Near, scale: float) -> Step:
    change, gap = phrases.difference(there.layout, here.layout), there.seconds / here.seconds - 1
    lacks = "" if there.fits else f", but {phrases.size(there.over_bytes)} over the memory by itself"
    seconds = there.seconds * scale
    return Step(
        change,
        there.layout,
        seconds,
        there.fits,
        f"{change}: {phrases.seconds(seconds)}, {phrases.change(gap)}{lacks}.",
    )
