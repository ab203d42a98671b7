"""Why a search came out as it did, in sentences: the explanation, why not another layout, the ways to make it fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.view import words
from shardwise.view.review import Told
from shardwise.view.tables import hanging, listed, section

if TYPE_CHECKING:
    from shardwise.search.explain import Explanation
    from shardwise.search.fitting import NothingFits
    from shardwise.search.solve import SearchResult


def sections(job: Job, found: SearchResult, told: Told) -> list[RenderableType]:
    """All that is told, each part under its title."""
    parts: list[RenderableType] = []
    if told.explanation is not None:
        parts += _explained(told.explanation)
        parts.append(runs(job, found.best[0].layout))
    if told.nothing is not None:
        parts += _nothing(told.nothing)
    if told.why_not is not None:
        parts.append(section(f"Why not {told.why_not.layout}", listed(told.why_not.text)))
    return parts


def runs(job: Job, layout: Layout) -> Group:
    """Whether `prove` and `train` take the layout, and if not, why."""
    answer, *why = words.runs(job, layout)
    return Group(Text(), Text(answer), listed(why))


def _explained(of: Explanation) -> list[RenderableType]:
    why = [of.limit, of.batch, of.recipe.text if of.recipe else NO_RECIPE]
    parts: list[RenderableType] = [section("Why", listed(why))]
    if of.advice:
        parts.append(section("Rules of thumb: + followed, - broken", _advice(of)))
    if of.rejected:
        parts.append(section("What the nearest layouts lack", listed([one.text for one in of.rejected])))
    return parts


def _advice(of: Explanation) -> Group:
    said = [("+" if one.followed else "-", f"{one.rule} {one.text}") for one in of.advice]
    return Group(*(hanging(mark, text) for mark, text in said))


NO_RECIPE = "No step of the field's recipe comes to a layout that is legal and fits."


def _nothing(of: NothingFits) -> list[RenderableType]:
    parts: list[RenderableType] = [Padding(Text(of.excess.text if of.excess else of.text), (1, 0, 0, 0))]
    if of.ways:
        parts.append(section("What fits, each tried", listed([way.text for way in of.ways])))
    return parts
