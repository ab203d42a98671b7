"""A memory timeline as a picture: one SVG file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final, Protocol

from shardwise.units import format_bytes

WIDTH, HEIGHT = 1280, 640
LEFT, RIGHT, TOP, BOTTOM = 92, 262, 64, 56
COLORS: Final = ("#355c9a", "#7a9bd1", "#3f9c7f", "#c9ccd3", "#b7a1dc", "#f0a04b", "#e3c64a", "#d9695f", "#8b8f98")
"""From the bottom to the top, again from the start where there are more."""

INK, DIM, GRID = "#1f2430", "#5d6473", "#e4e7ec"


class PeakView(Protocol):
    @property
    def time_us(self) -> float: ...
    @property
    def bytes(self) -> Mapping[str, int]: ...
    @property
    def range(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...


class StepView(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def start_us(self) -> float: ...
    @property
    def end_us(self) -> float: ...


class TimelineView(Protocol):
    """What is drawn of a `train.timeline.Timeline`: that module lies above this one."""

    @property
    def times_us(self) -> Sequence[float]: ...
    @property
    def bytes_by_category(self) -> Mapping[str, Sequence[int]]: ...
    @property
    def peak(self) -> PeakView: ...
    @property
    def steps(self) -> Sequence[StepView]: ...


class _Plot:
    """Where a moment and a level lie in the picture."""

    def __init__(self, of: TimelineView) -> None:
        self.end_us = max(of.times_us[-1], of.steps[-1].end_us) or 1.0
        self.tick_bytes, self.ticks = _byte_ticks(of.peak.total_bytes)
        self.top_bytes = self.tick_bytes * self.ticks
        self.right, self.bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(self, time_us: float) -> float:
        return round(LEFT + time_us / self.end_us * (self.right - LEFT), 1)

    def y(self, n_bytes: float) -> float:
        return round(self.bottom - n_bytes / self.top_bytes * (self.bottom - TOP), 1)


def picture(of: TimelineView, title: str) -> str:
    """Bytes by category as areas on top of each other, over time; the peak is marked, and split up beside it."""
    plot = _Plot(of)
    shown = [name for name, values in of.bytes_by_category.items() if any(values)]
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(of.bytes_by_category)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 28, f"Memory by category: {title}", INK, size=17, weight="bold"),
        *_grid(plot),
        *_areas(of, plot, shown, colors),
        *_steps(of, plot),
        *_peak(of, plot),
        *_legend(of, plot, shown, colors),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(x: float, y: float, said: str, fill: str, *, anchor: str = "start", size: int = 13, weight: str = "") -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}"{place}{bold}>{escape(said)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}"{dashed}/>'


def _grid(plot: _Plot) -> list[str]:
    """Both axes, with their units."""
    parts: list[str] = []
    for i in range(plot.ticks + 1):
        y = plot.y(i * plot.tick_bytes)
        said = format_bytes(i * plot.tick_bytes) if i else "0"
        parts += [_line(LEFT, y, plot.right, y, GRID), _text(LEFT - 8, y + 4, said, DIM, anchor="end")]
    tick_us = _round_tick(plot.end_us / 8)
    unit, per_unit = ("s", 1e6) if plot.end_us >= 10e6 else ("ms", 1e3)
    for i in range(int(plot.end_us / tick_us) + 1):
        x = plot.x(i * tick_us)
        parts += [_line(x, plot.bottom, x, plot.bottom + 5, DIM)]
        parts += [_text(x, plot.bottom + 19, f"{i * tick_us / per_unit:g}", DIM, anchor="middle")]
    middle, said = (LEFT + plot.right) / 2, f"time since the first recorded step, {unit}"
    return [*parts, _text(middle, plot.bottom + 40, said, DIM, anchor="middle")]


def _round_tick(least: float) -> float:
    """The first of 1, 2 or 5 times a power of ten that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _byte_ticks(most_bytes: int) -> tuple[int, int]:
    """(bytes, number) of the ticks, round in a power of 1024; the last lies above the peak, with room for its name."""
    wanted = max(1.0, most_bytes * 1.12 / 6)
    power = 1024 ** int(math.log(wanted, 1024))
    tick = max(1, round(_round_tick(wanted / power) * power))
    return tick, math.ceil(most_bytes * 1.12 / tick) or 1


def _areas(of: TimelineView, plot: _Plot, shown: Sequence[str], colors: Mapping[str, str]) -> list[str]:
    """Every level stays until the next moment: the areas are stairs."""
    xs = [plot.x(time) for time in of.times_us]
    end = plot.x(plot.end_us)
    below = [0] * len(xs)
    parts: list[str] = []
    for name in shown:
        above = [a + b for a, b in zip(below, of.bytes_by_category[name], strict=True)]
        forth = _stairs(xs, [plot.y(v) for v in above], end)
        back = _stairs(xs, [plot.y(v) for v in below], end)[::-1]
        path = _path([*forth, *back])
        parts.append(f'<path d="{path}" fill="{colors[name]}"><title>{escape(name)}</title></path>')
        below = above
    return parts


def _stairs(xs: Sequence[float], ys: Sequence[float], end: float) -> list[tuple[float, float]]:
    """Corners of a line that keeps each level until the next one begins."""
    corners: list[tuple[float, float]] = []
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if corners and corners[-1][1] == y:
            continue
        if i:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return [*corners, (end, corners[-1][1])]


def _path(corners: Sequence[tuple[float, float]]) -> str:
    """Straight lines along the axes, each as short as SVG can say it."""
    (x, y), *rest = corners
    said = [f"M{x:g} {y:g}"]
    for to_x, to_y in rest:
        if to_x != x:
            said.append(f"H{to_x:g}")
        if to_y != y:
            said.append(f"V{to_y:g}")
        x, y = to_x, to_y
    return "".join(said) + "Z"


def _steps(of: TimelineView, plot: _Plot) -> list[str]:
    """Where the steps begin and end, with their names above."""
    parts: list[str] = []
    for step in of.steps:
        x = plot.x(step.start_us)
        parts.append(_line(x, TOP - 6, x, plot.bottom, DIM, "3 4"))
        middle = (x + plot.x(step.end_us)) / 2
        parts.append(_text(middle, TOP - 10, step.name, DIM, anchor="middle"))
    end = plot.x(of.steps[-1].end_us)
    return [*parts, _line(end, TOP - 6, end, plot.bottom, DIM, "3 4")]


def _peak(of: TimelineView, plot: _Plot) -> list[str]:
    """A line at the peak's height, a dot at its time, its value and the range that ran."""
    x, y = plot.x(of.peak.time_us), plot.y(of.peak.total_bytes)
    said = f"peak {format_bytes(of.peak.total_bytes)}" + (f" in {of.peak.range}" if of.peak.range else "")
    anchor = "end" if x > (LEFT + plot.right) / 2 else "start"
    return [
        _line(LEFT, y, plot.right, y, INK, "2 3"),
        f'<circle cx="{x:g}" cy="{y:g}" r="4.5" fill="{INK}" stroke="#ffffff" stroke-width="1.5"/>',
        _text(x, y - 10, said, INK, anchor=anchor, weight="bold"),
    ]


def _legend(of: TimelineView, plot: _Plot, shown: Sequence[str], colors: Mapping[str, str]) -> list[str]:
    """Colours from the top of the picture to its bottom, with the bytes at the peak."""
    left, right = plot.right + 24, WIDTH - 20
    parts = [_text(right, TOP + 12, "bytes at the peak", DIM, anchor="end")]
    for i, name in enumerate(reversed(shown)):
        y = TOP + 38 + 24 * i
        parts.append(f'<rect x="{left}" y="{y - 11}" width="13" height="13" rx="2" fill="{colors[name]}"/>')
        parts.append(_text(left + 20, y, name, INK))
        parts.append(_text(right, y, format_bytes(of.peak.bytes[name]), INK, anchor="end"))
    y = TOP + 38 + 24 * len(shown)
    parts += [_line(left, y - 12, right, y - 12, GRID), _text(left + 20, y + 6, "total", INK, weight="bold")]
    return [*parts, _text(right, y + 6, format_bytes(of.peak.total_bytes), INK, anchor="end", weight="bold")]
