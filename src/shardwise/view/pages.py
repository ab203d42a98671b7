"""What each command prints: sentences and tables, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardwise.view import chart, tables, words
from shardwise.view.review import Request, Review, families

if TYPE_CHECKING:
    from shardwise.search.solve import SearchResult


def show(asked: Request, of: Review, width: int, written: str | None = None) -> Group:
    """Everything about one layout."""
    parts = [
        *_opening(asked, of),
        section("Memory by part and pipeline rank, GiB", tables.memory(of, width)),
        section("FLOPs", Text(words.flops(of))),
        section(f"Step time: {words.speed(of.step)}", tables.step_parts(of.step)),
        section(f"Communication of rank {of.rank} in one step", tables.ledger(of)),
    ]
    if of.layout.pp > 1:
        whole, drawn = of.job.micro_batches(of.layout), of.schedule.micro_batches
        less = f", drawn as if there were {drawn:,}" if drawn < whole else ""
        title = f"Pipeline: {of.layout.schedule}, {whole:,} micro-batches{less}"
        parts.append(section(title, chart.pipeline(of.timeline, width)))
    return Group(*parts, *_remedies(of, width), *_written(written), *_closing(asked))


def fit(asked: Request, of: Review | None, found: SearchResult | None, width: int) -> Group:
    """Does it fit: `of` is the given layout, or the best that `found` has, if any."""
    if of is None:
        assert found is not None
        return _nothing(asked, found)
    parts = [*_opening(asked, of), Text(words.speed(of.step))]
    if found is not None:
        parts += [Text(f"the fastest of all layouts: {words.counts(found)}")]
        if words.thin(of.fullest.total_bytes, of.capacity_bytes):
            parts += [Text(f"`shardwise plan ... --batch {of.job.global_batch}` ranks layouts that leave more")]
    memory = section("Memory by part and pipeline rank, GiB", tables.memory(of, width))
    return Group(*parts, memory, *_remedies(of, width), *_closing(asked))


def plan(asked: Request, found: SearchResult, written: str | None, width: int) -> Group:
    """The ranked table, its verdict, and what it rests on."""
    if not found.best:
        return _nothing(asked, found)
    kept = families(found.best)
    notes = [COLUMNS, *filter(None, [words.folded(kept)])]
    return Group(
        Text(words.what(asked.job)),
        Text(words.batch(asked.job)),
        Text(),
        tables.candidates([one for one, _ in kept], asked.job, width),
        Text("\n".join(notes), "dim"),
        Text(),
        *_best(found),
        Text(words.counts(found)),
        *_written(written),
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


def _written(path: str | None) -> list[RenderableType]:
    if path is None:
        return []
    return [Text(f"Written to {path}; next: shardwise show, prove --rank 0, train", "bold")]


def section(title: str, body: RenderableType) -> Group:
    """A body under its title, an empty line above."""
    return Group(Text(), Text(title, "bold"), body)


def _opening(asked: Request, of: Review) -> list[RenderableType]:
    return [
        Text(words.what(asked.job)),
        Text(words.batch(asked.job)),
        Text(f"layout: {of.layout}", "bold"),
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
    return [Text(), Text(words.assumptions(asked.job, asked.assumed), "dim")]


def _nothing(asked: Request, found: SearchResult) -> Group:
    return Group(
        Text(words.what(asked.job)),
        Text(words.batch(asked.job)),
        Text(words.nothing_fits(found), "bold red"),
        Text(words.counts(found)),
        *_closing(asked),
    )
