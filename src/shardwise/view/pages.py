"""What each command prints: sentences and tables, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardwise.cluster.survey import questions
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.runs import runs_here
from shardwise.view import chart, tables, why, words
from shardwise.view.review import Others, Request, Review, Told, families, hardware_flops
from shardwise.view.tables import section

if TYPE_CHECKING:
    from shardwise.search.solve import SearchResult


def show(asked: Request, of: Review, width: int, written: str | None = None, others: Others | None = None) -> Group:
    """Everything about one layout, and what it takes elsewhere."""
    others = others or Others()
    parts = [
        *_opening(asked, of),
        section("Memory by part and pipeline rank, GiB", tables.memory(of, width)),
        section("FLOPs", Group(Text(words.flops(of)), _hardware(of))),
        section(f"Step time: {words.speed(of.step)}", tables.step_parts(of.step)),
        section(f"Communication of rank {of.rank} in one step", tables.ledger(of)),
    ]
    if of.layout.pp > 1:
        whole, drawn = of.job.micro_batches(of.layout), of.schedule.micro_batches
        less = f", drawn as if there were {drawn:,}" if drawn < whole else ""
        title = f"Pipeline: {of.layout.schedule}, {whole:,} micro-batches{less}"
        parts.append(section(title, chart.pipeline(of.timeline, width)))
    if others.levels:
        parts.append(section("The same layout at every ZeRO level", tables.levels(others.levels, width)))
    if others.stacks:
        compared = tables.stacks(others.stacks, of.layout.zero, width)
        parts.append(section("The same layout under other software", compared))
    return Group(
        *parts,
        *_remedies(of, width),
        why.runs(of.job, of.layout),
        *_written(written, of.job, of.layout),
        *_closing(asked),
    )


def _hardware(of: Review) -> RenderableType:
    return tables.flops(hardware_flops(of.job, of.layout), of.job.tokens / of.job.cluster.world_size)


def fit(asked: Request, of: Review | None, found: SearchResult | None, width: int, told: Told | None = None) -> Group:
    """Does it fit: `of` is the given layout, or the best that `found` has, if any. The answer is the first line."""
    if of is None:
        assert found is not None
        return _nothing(asked, found, told or Told())
    parts = [Text(words.yes_or_no(of), "green" if of.fits else "bold red"), Text()]
    parts += [*_opening(asked, of)[:-1], Text(words.fullest(of)), Text(words.speed(of.step))]
    if found is not None:
        parts += [Text(f"the fastest of all layouts: {words.counts(found)}")]
        if words.thin(of.fullest.total_bytes, of.capacity_bytes):
            parts += [Text(f"`shardwise plan ... --batch {of.job.global_batch}` ranks layouts that leave more")]
    memory = section("Memory by part and pipeline rank, GiB", tables.memory(of, width))
    return Group(*parts, memory, *_remedies(of, width), *_closing(asked))


def plan(asked: Request, found: SearchResult, written: str | None, width: int, told: Told | None = None) -> Group:
    """The ranked table, its verdict, why it came out so, and what it rests on."""
    told = told or Told()
    if not found.best:
        return _nothing(asked, found, told)
    kept = families(found.best)
    recipe = told.explanation.recipe if told.explanation else None
    loss = [told.loss[found.best.index(one)] for one, _ in kept] if told.loss else []
    notes = [COLUMNS, *filter(None, [words.folded(kept), words.recipe(recipe), words.loss(told)])]
    ranked = [one for one, _ in kept]
    return Group(
        Text(words.what(asked.job)),
        Text(words.batch(asked.job)),
        Text(),
        tables.candidates(ranked, asked.job, width, recipe.candidate if recipe else None, loss),
        Text("\n".join(notes), "dim"),
        Text(),
        *_best(found),
        Text(words.counts(found)),
        *why.sections(asked.job, found, told),
        *_written(written, asked.job, found.best[0].layout),
        *_keep_roomy(found, written),
        *_closing(asked),
    )


COLUMNS = "bubble, comm.: shares of the step in which the busiest rank waits for other stages, for the network"


def _best(found: SearchResult) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for title, said in words.best(found):
        parts.append(Text(title, "green"))
        if said:
            parts.append(Padding(Text(said, "green"), (0, 0, 0, 2)))
    return parts


def _keep_roomy(found: SearchResult, written: str | None) -> list[RenderableType]:
    """How to have the layout with room as a plan, where the fastest that was written is thin."""
    roomy = words.roomy(found)
    if written is None or roomy in (None, found.best[0]):
        return []
    return [Text(f'To write the one with room: shardwise show {written} --layout "{roomy.layout}" -o {written}')]


def _written(path: str | None, job: Job, layout: Layout) -> list[RenderableType]:
    """Where the plan is, and what can be done with it."""
    if path is None:
        return []
    following = "show" if runs_here(layout, job) else "show, prove --rank 0, train"
    return [Text(f"Written to {path}; next: shardwise {following}", "bold")]


def _opening(asked: Request, of: Review) -> list[RenderableType]:
    return [
        Text(words.what(asked.job)),
        Text(words.batch(asked.job)),
        Text(f"layout: {of.layout}, under {words.stack(asked.job)}", "bold"),
        Text(words.verdict(of).replace("; fullest", ";\nfullest"), "green" if of.fits else "bold red"),
    ]


def _remedies(of: Review, width: int) -> list[RenderableType]:
    """What to change where it does not fit."""
    if of.fits:
        return []
    if not of.remedies:
        return [Text(), Text("No single change tried makes it fit; `shardwise plan` looks at all layouts.")]
    title = "One change makes it fit (`shardwise plan` looks at all layouts)"
    return [section(title, tables.candidates(of.remedies, of.job, width))]


def _closing(asked: Request) -> list[RenderableType]:
    asked_about = [Text(f"warning: {one}", "yellow") for one in questions(asked.job.cluster)]
    return [Text(), *asked_about, Text(words.assumptions(asked.job, asked.assumed, asked.mfu), "dim")]


def _nothing(asked: Request, found: SearchResult, told: Told) -> Group:
    return Group(
        Text(words.no(found, told.nothing), "bold red"),
        Text(),
        Text(words.what(asked.job)),
        Text(words.batch(asked.job)),
        Text(words.nothing_fits(found)),
        Text(words.counts(found)),
        *why.sections(asked.job, found, told),
        *_closing(asked),
    )
