"""Results as rich renderables, aligned at 80 columns and wider. Pure: values in, renderables out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.plan.job import Job
from shardwise.results import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS, MemoryBreakdown, StepTime
from shardwise.units import format_bytes, format_count, format_flops, format_seconds, gib
from shardwise.view import chart, words
from shardwise.view.review import AtLevel, Flops, Review, UnderStack, bubble_s, communication_s, ledger_rows

if TYPE_CHECKING:
    from shardwise.search.loss import TimeToLoss
    from shardwise.search.solve import Candidate

BAR = 30
"""Columns of the step's bars."""


def candidates(
    found: Sequence[Candidate], job: Job, width: int, recipe: Candidate | None = None, loss: Sequence[TimeToLoss] = ()
) -> Table:
    """Layouts, the fastest first, then the field's recipe; `loss` says how long a loss takes with each of `found`."""
    capacity = gib(job.cluster.device.usable_bytes)
    table = plain(2 if width >= 100 else 1)
    table.add_column("\n#", justify="right")
    table.add_column("\nlayout", ratio=1)
    heads = ["step\ntime", "tokens/s\n/device", "MFU\n%", f"peak GiB\nof {capacity:.1f}", "bubble\n%", "comm.\n%"]
    for head in [*heads, "loss\n/S_min"] if loss else heads:
        table.add_column(head, justify="right", no_wrap=True)
    rows = [*found, *([recipe] if recipe else [])]
    for i, one in enumerate(rows):
        step = one.step
        table.add_row(
            str(i + 1) if i < len(found) else "r",
            str(one.layout),
            format_seconds(step.total_s),
            f"{step.tokens_per_s_per_device:,.0f}",
            f"{100 * step.mfu:.1f}",
            f"{gib(one.peak_bytes):.1f}",
            f"{100 * bubble_s(step) / step.total_s:.1f}",
            f"{100 * communication_s(step) / step.total_s:.1f}",
            *([format_seconds(loss[i].relative_s)] if i < len(loss) else []),
        )
    return table


def stacks(found: Sequence[UnderStack], zero: int, width: int) -> Group:
    """One layout, of that ZeRO level, under every software stack, or why it does not exist there."""
    table = plain(2 if width >= 100 else 1)
    table.add_column("stack", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for head in ("peak GiB", "free GiB", "step", "MFU %"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    for of in found:
        one = of.found
        if one is None:
            table.add_row(of.stack.name, "-", "-", "-", "-", "-", "; ".join(f.message for f in of.broken))
            continue
        sizes = f"{gib(one.peak_bytes):,.1f}", f"{gib(one.capacity_bytes - one.peak_bytes):,.1f}"
        speed = format_seconds(one.step.total_s), f"{100 * one.step.mfu:.1f}"
        level = "" if one.layout.zero == zero else f", with zero={one.layout.zero}"
        table.add_row(of.stack.name, "yes" if one.fits else "no", *sizes, *speed, of.stack.title + level)
    return Group(table, Text(STACKS, "dim"))


def levels(found: Sequence[AtLevel], width: int) -> Group:
    """One layout at every ZeRO level, with the parts of its fullest rank that differ."""
    table = plain(2 if width >= 100 else 1)
    table.add_column("zero", no_wrap=True)
    for head in ("fits", "peak GiB", *LEVEL_PARTS.values(), "step", "MFU %"):
        table.add_column(head, justify="right", no_wrap=True)
    for of in found:
        total = of.memory.total_bytes
        parts = (_gib(of.memory.proved.get(part, 0)) for part in LEVEL_PARTS)
        fits = "yes" if total <= of.capacity_bytes else "no"
        speed = format_seconds(of.step.total_s), f"{100 * of.step.mfu:.1f}"
        table.add_row(str(of.layout.zero), fits, f"{gib(total):,.1f}", *parts, *speed)
    return Group(table, *(Text(line) for line in words.levels(found)))


LEVEL_PARTS = {
    PARAMETERS: "params",
    GRADIENTS: "grads",
    OPTIMIZER: "optimizer",
    GATHERED: "gathered",
    ACTIVATIONS: "activat.",
}
"""Parts of the memory that a ZeRO level changes, and their heads."""

STACKS = "what operations keep for the backward, gradient dtype, overlap and allocator margin are each stack's own"


def flops(of: Flops, tokens_per_device: float) -> Table:
    """Hardware FLOPs of F, B and W, a token and a step of one device."""
    table = plain()
    for head in ("hardware FLOPs", "a token", "a step and device", "%"):
        table.add_column(head, justify="left" if head == "hardware FLOPs" else "right", no_wrap=True)
    names = ("F forward", "B input gradients", "W weight gradients", "recomputed")
    for name, value in zip(names, of, strict=True):
        if value:
            share = f"{100 * value / of.total:.1f}"
            table.add_row(name, format_flops(value), format_flops(value * tokens_per_device), share)
    table.add_row("=", format_flops(of.total), format_flops(of.total * tokens_per_device), "100.0", style="bold")
    return table


def memory(of: Review, width: int) -> Group:
    """Parts by pipeline rank. Ranks are chosen to fit the width, the fullest always among them."""
    shown = _ranks(of.memory, 4 if width < 100 else 8)
    table = plain()
    table.add_column("part", no_wrap=True)
    for m in shown:
        table.add_column(f"rank {m.rank}", justify="right", no_wrap=True)
    for assumed in (False, True):
        for part in dict.fromkeys(name for m in of.memory for name in (m.assumed if assumed else m.proved)):
            sizes = [(m.assumed if assumed else m.proved).get(part, 0) for m in shown]
            table.add_row(f"{part} (assumed)" if assumed else part, *map(_gib, sizes))
        if not assumed:
            table.add_row("= tensors, provable", *(_gib(m.proved_bytes) for m in shown), style="bold")
    table.add_row("= total", *(_gib(m.total_bytes) for m in shown), style="bold")
    table.add_row(f"free of {gib(of.capacity_bytes):,.1f}", *(_gib(of.capacity_bytes - m.total_bytes) for m in shown))
    table.add_row("peaks in the", *(m.action.replace(" of stage ", " of ") for m in shown))
    letters = {m.action.partition(" of ")[0] for m in shown}
    notes = [f"{', '.join(f'{x} {said}' for x, said in words.ACTIONS.items() if x in letters)}, of a stage"]
    notes += filter(None, [words.logits(of)])
    if len(shown) < len(of.memory):
        notes.append(f"{len(shown)} of {len(of.memory)} pipeline ranks shown, the fullest among them")
    return Group(table, Text("\n".join(notes), "dim"))


def _ranks(of: Sequence[MemoryBreakdown], most: int) -> list[MemoryBreakdown]:
    fullest = max(of, key=lambda m: m.total_bytes).rank
    chosen = set(chart.pick(len(of), most)) if len(of) <= most else {*chart.pick(len(of), most - 1), fullest}
    return [of[i] for i in sorted(chosen)]


def _gib(n_bytes: int) -> str:
    """Two digits; a dash for nothing, so that the eye finds what is there."""
    return f"{gib(n_bytes):,.2f}" if n_bytes else "-"


def step_parts(step: StepTime) -> Table:
    """The step's seconds by cause; the bars add up to the whole step."""
    parts = [(name, seconds) for name, seconds in step.parts_s.items() if seconds > 0]
    table = plain()
    table.add_column("part")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("%", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=BAR)
    for (name, seconds), bar in zip(parts, chart.waterfall([s for _, s in parts], BAR), strict=True):
        table.add_row(name, format_seconds(seconds), f"{100 * seconds / step.total_s:.1f}", Text(bar, "cyan"))
    table.add_row("= step", format_seconds(step.total_s), "100.0", "", style="bold")
    return table


def ledger(of: Review) -> RenderableType:
    """The predicted collectives by axis and phase."""
    rows = ledger_rows(of.ledger, of.job.cluster)
    if not rows:
        return Text("none: every group has one rank")
    table = plain(1)
    table.add_column("axis", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("what travels", min_width=15)
    table.add_column("over", overflow="fold")
    for head in ("ranks", "count", "payload", "alone"):
        table.add_column(head, justify="right", no_wrap=True)
    degrees = dict(of.layout.mesh.degrees)
    for row in rows:
        # An axis of one rank moves nothing. Where the others are long together, they stand one below the other.
        axis = "+".join(a for a in row.axis.split("+") if degrees.get(a, 2) > 1)
        axis = axis if len(axis) <= len("dp_replicate") else axis.replace("+", "+\n")
        what = f"{row.kind}:\n{row.travels}"
        size = format_bytes(row.payload_bytes)
        numbers = format_count(row.ranks), format_count(row.issued), size, format_seconds(row.alone_s)
        table.add_row(axis, row.phase, what, row.link, *numbers)
    return Group(table, Text(f"{PAYLOAD}\n{words.exposed(of.step)}", "dim"))


PAYLOAD = (
    "payload: the whole tensors, summed over the step; what a rank sends of one is the algorithm's matter\n"
    "alone: their time if nothing hid it"
)


def plain(gap: int = 2) -> Table:
    """Columns without lines between them."""
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")


def hanging(mark: str, text: str) -> Table:
    """A text beside its mark: what wraps stays beside it."""
    line = plain(1)
    line.show_header = False
    line.add_column(width=1)
    line.add_column(ratio=1)
    line.add_row(mark, text)
    return line


def listed(sentences: Sequence[str]) -> Group:
    """One below the other, each behind a dash."""
    return Group(*(hanging("-", sentence) for sentence in sentences))


def section(title: str, body: RenderableType) -> Group:
    """A body under its title, an empty line above."""
    return Group(Text(), Text(title, "bold"), body)
