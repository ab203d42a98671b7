"""The memory timeline: torch's trace of one rank, read as bytes by category over time.

The trace has every allocation and every release with its address, and the ranges that `Labels` opened. A block belongs
to a category by the range in which it was made, and by what becomes of it: what is made in F and outlives it is an
activation, what is let go before is workspace. The categories are the account's parts, so the two can be held side by
side; workspace is what the account counts as activations of the action that runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.collective import Labels, Phase
from shardwise.results import ACTIVATIONS, BUFFERS, GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS, TABLES

WORKSPACE, OTHER = "workspace", "other"
CATEGORIES: Final = (
    *(PARAMETERS, OPTIMIZER, GRADIENTS, TABLES),
    *(GATHERED, ACTIVATIONS, BUFFERS, WORKSPACE, OTHER),
)
"""From the bottom of the picture to its top. Other: what lived before and is no part of the model's state."""

STEP: Final = "step"
BUCKETS: Final = 600
"""Of equal time, in a timeline that is written; of each the first, the highest and the lowest moment stay."""

_ALWAYS: Final = {
    Phase.UNSHARD: GATHERED,
    Phase.READY: GATHERED,
    Phase.GATHER: GATHERED,
    Phase.OPEN: GRADIENTS,
    Phase.REDUCE: GRADIENTS,
    Phase.TIE: GRADIENTS,
    Phase.TWIN: GRADIENTS,
}
"""Whatever is made in a range of the phase."""

_OUTLIVING: Final = {
    Phase.F: ACTIVATIONS,
    Phase.B: ACTIVATIONS,
    Phase.W: ACTIVATIONS,
    Phase.RECOMPUTE: ACTIVATIONS,
    Phase.DATA: TABLES,
    Phase.COUNT: TABLES,
    Phase.REPORT: TABLES,
}
"""What is made in it and lives on behind it."""

Held = Mapping[int, tuple[str, int]]
"""Address -> (category, bytes) of what lived before the trace began."""

CPU: Final = 0, -1
"""Device type and index in a trace."""

Event = Mapping[str, Any]
"""One of a Chrome trace: `ts` and `dur` in microseconds."""


class Meaning(NamedTuple):
    """What a range stands for."""

    phase: str
    module: str = ""
    micro_batch: int = -1

    @staticmethod
    def of(labels: Labels) -> Meaning:
        return Meaning(labels.phase, labels.module, labels.micro_batch)


def name_of(labels: Labels) -> str:
    """`F layers.3 #2`, `send stages.0 #2 to rank 1`, `B layers.3.mlp.out #2 over tp`."""
    words = [labels.phase, labels.module]
    if labels.micro_batch >= 0:
        words.append(f"#{labels.micro_batch}")
    if labels.axis:
        words.append(f"over {labels.axis}")
    if labels.peer >= 0:
        words.append(f"{'to' if labels.phase == Phase.SEND else 'from'} rank {labels.peer}")
    return " ".join(filter(None, words))


class Peak(NamedTuple):
    """The highest moment: its time since the trace began, bytes by category, and the range that ran."""

    time_us: float
    bytes: dict[str, int]
    range: str

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


class Step(NamedTuple):
    """A training step in the trace."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """`bytes_by_category[c][i]` are held from `times_us[i]` on, until the next one; times count from the first."""

    times_us: Sequence[float]
    bytes_by_category: Mapping[str, Sequence[int]]
    peak: Peak
    steps: tuple[Step, ...]

    def data(self) -> dict[str, Any]:
        """For programs."""
        peak = {"time_us": self.peak.time_us, "range": self.peak.range, "total_bytes": self.peak.total_bytes}
        return {
            "unit": "bytes",
            "categories": list(CATEGORIES),
            "peak": peak | {"bytes": self.peak.bytes},
            "steps": [step._asdict() for step in self.steps],
            "times_us": list(self.times_us),
            "bytes": {name: list(values) for name, values in self.bytes_by_category.items()},
        }

    def counters(self, start_us: float, pid: object) -> list[dict[str, Any]]:
        """The same as counter events of a Chrome trace that began at `start_us`."""
        return [
            {
                "ph": "C",
                "name": "memory, bytes",
                "pid": pid,
                "ts": start_us + time,
                "args": {category: values[i] for category, values in self.bytes_by_category.items()},
            }
            for i, time in enumerate(self.times_us)
        ]


@dataclass(slots=True)
class _Span:
    """A range of the trace. `own`: the range around it, or itself, that began the phase; `step`: the outermost."""

    name: str
    meaning: Meaning
    start_us: float
    end_us: float
    parent: _Span | None
    own: _Span = field(init=False)
    step: str = field(init=False)

    def __post_init__(self) -> None:
        goes_on = self.parent is not None and self.parent.meaning.phase == self.meaning.phase
        self.own = self.parent.own if self.parent is not None and goes_on else self
        self.step = self.parent.step if self.parent is not None else self.name


@dataclass(slots=True)
class _Block:
    """Memory from its allocation to its release, each with the range in which it happened."""

    size: int
    start_us: float
    made: _Span | None
    end_us: float = inf
    freed: _Span | None = None


def read(
    events: Iterable[Event],
    meanings: Mapping[str, Meaning],
    held: Held,
    device: tuple[int, int] = CPU,
    broken: bool = False,
) -> Timeline:
    """The timeline of a trace's events. `meanings`: what the ranges' names stand for; `device`: type and index as the
    trace has them; `broken`: the last step did not end. Raises ValueError where no step was recorded."""
    events = list(events)
    spans = _spans(events, meanings)
    steps = [span for span in spans if span.meaning.phase == STEP]
    if not steps:
        raise ValueError("the trace has no step")
    memory = _memory(events, device)
    start_us = steps[0].start_us
    changes = [(start_us, category, size) for category, size in held.values()]
    if unknown := _unknown(memory, held, device):
        changes.append((start_us, OTHER, unknown))
    blocks, ends = _blocks(memory, spans, held)
    changes += [(time, held[address][0], -held[address][1]) for address, time in ends.items()]
    _end_unseen(blocks, steps[: len(steps) - broken])
    arrivals = _arrivals(spans)
    for block in blocks:
        changes += _changes(block, arrivals)
    return _levels(changes, spans, tuple(Step(s.name, s.start_us - start_us, s.end_us - start_us) for s in steps))


def _spans(events: Iterable[Event], meanings: Mapping[str, Meaning]) -> list[_Span]:
    """The ranges by their start, each with the one around it; those of autograd's own threads among them."""
    found = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in meanings]
    spans: list[_Span] = []
    around: list[_Span] = []
    for event in sorted(found, key=lambda e: (e["ts"], -e["dur"])):
        while around and around[-1].end_us <= event["ts"]:
            around.pop()
        name, parent = event["name"], around[-1] if around else None
        spans.append(_Span(name, meanings[name], event["ts"], event["ts"] + event["dur"], parent))
        around.append(spans[-1])
    return spans


def _innermost(spans: Sequence[_Span], starts: Sequence[float], time_us: float) -> _Span | None:
    """The range that runs at a time."""
    place = bisect_right(starts, time_us) - 1
    span = spans[place] if place >= 0 else None
    while span is not None and span.end_us < time_us:
        span = span.parent
    return span


def _memory(events: Iterable[Event], device: tuple[int, int]) -> list[Event]:
    """Allocations and releases of the device, in their order."""
    found = [e for e in events if e.get("name") == "[memory]"]
    found = [e for e in found if (e["args"]["Device Type"], e["args"]["Device Id"]) == device]
    return sorted(found, key=lambda e: (e["ts"], e["args"].get("Ev Idx", 0)))


def _unknown(memory: Sequence[Event], held: Held, device: tuple[int, int]) -> int:
    """Bytes that lived before the trace beside what is `held`, where the allocator counts them (a CPU's does not)."""
    if not memory or device == CPU:
        return 0
    first = memory[0]["args"]
    return max(0, first["Total Allocated"] - first["Bytes"] - sum(size for _, size in held.values()))


def _blocks(memory: Iterable[Event], spans: Sequence[_Span], held: Held) -> tuple[list[_Block], dict[int, float]]:
    """Every block that was made, and when those went that were held before."""
    starts = [span.start_us for span in spans]
    blocks: list[_Block] = []
    alive: dict[int, _Block] = {}
    ends: dict[int, float] = {}
    for event in memory:
        time, address, size = event["ts"], event["args"]["Addr"], event["args"]["Bytes"]
        here = _innermost(spans, starts, time)
        if size > 0:
            blocks.append(_Block(size, time, here))
            alive[address] = blocks[-1]  # what was there has gone unseen
        elif address in alive:
            block = alive.pop(address)
            block.end_us, block.freed = time, here
        elif address in held:
            ends.setdefault(address, time)
    return blocks, ends


def _end_unseen(blocks: Iterable[_Block], steps: Sequence[_Span]) -> None:
    """Nothing that a step's own ranges make outlives it: what was not seen to go went in a thread of the backend, as
    its last holder. That is soon after the innermost range that made it."""
    whole = {step.name for step in steps}
    for block in blocks:
        if block.end_us == inf and block.made is not None and block.made.step in whole:
            block.end_us = block.made.end_us


def _arrivals(spans: Iterable[_Span]) -> dict[tuple[str, int], list[float]]:
    """When the messages to a stage for a micro-batch were taken."""
    found: dict[tuple[str, int], list[float]] = {}
    for span in spans:
        if span.meaning.phase == Phase.ARRIVE:
            found.setdefault(span.meaning[1:], []).append(span.start_us)
    return found


def _changes(block: _Block, arrivals: Mapping[tuple[str, int], list[float]]) -> list[tuple[float, str, int]]:
    """(time, category, bytes) of what a block adds and takes away, in its one or two categories."""
    parts = _parts(block, arrivals)
    times = [*(time for time, _ in parts[1:]), block.end_us]
    changes: list[tuple[float, str, int]] = []
    for (start, category), end in zip(parts, times, strict=True):
        changes.append((start, category, block.size))
        if end < inf:
            changes.append((end, category, -block.size))
    return changes


def _parts(block: _Block, arrivals: Mapping[tuple[str, int], list[float]]) -> list[tuple[float, str]]:
    """The categories of a block, each with its begin: a message is a buffer until it is taken, a result that is sent
    from the end of its action on."""
    start = block.start_us
    if block.made is None:
        return [(start, WORKSPACE)]
    own = block.made.own
    phase = own.meaning.phase
    if phase == Phase.RECV:
        taken = [time for time in arrivals.get(own.meaning[1:], ()) if start < time < block.end_us]
        return [(start, BUFFERS), *((time, ACTIVATIONS) for time in taken[:1])]
    if phase in _ALWAYS:
        return [(start, _ALWAYS[Phase(phase)])]
    if block.end_us <= own.end_us or phase not in _OUTLIVING:
        return [(start, WORKSPACE)]
    sent = block.freed is not None and block.freed.meaning.phase == Phase.SETTLE
    return [(start, _OUTLIVING[Phase(phase)]), *([(own.end_us, BUFFERS)] if sent else [])]


def _levels(changes: list[tuple[float, str, int]], spans: Sequence[_Span], steps: tuple[Step, ...]) -> Timeline:
    """Sum the changes up, find the peak, and leave out what a reader would not see."""
    start_us = min(time for time, *_ in changes)
    changes.sort(key=lambda change: change[0])
    deltas = np.zeros((len(changes), len(CATEGORIES)), dtype=np.int64)
    deltas[range(len(changes)), [CATEGORIES.index(category) for _, category, _ in changes]] = [c[2] for c in changes]
    times, first = np.unique([time for time, *_ in changes], return_index=True)
    levels = np.add.reduceat(deltas, first, axis=0).cumsum(axis=0)
    totals = levels.sum(axis=1)
    highest = int(totals.argmax())
    span = _innermost(spans, [s.start_us for s in spans], float(times[highest]))
    name = "" if span is None else span.own.name
    by_category = dict(zip(CATEGORIES, levels[highest].tolist(), strict=True))
    peak = Peak(round(float(times[highest]) - start_us, 3), by_category, name)
    kept = _thinned(times, totals)
    columns = {c: levels[kept, i].tolist() for i, c in enumerate(CATEGORIES)}
    return Timeline([round(float(t) - start_us, 3) for t in times[kept]], columns, peak, steps)


def _thinned(times: npt.NDArray[np.float64], totals: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Places of the moments to keep: of each bucket of time the first, the highest and the lowest, and the last."""
    if len(times) <= 3 * BUCKETS:
        return np.arange(len(times))
    bucket = ((times - times[0]) / (times[-1] - times[0]) * BUCKETS).astype(np.int64)
    kept = {0, len(times) - 1}
    for places in np.split(np.arange(len(times)), np.flatnonzero(np.diff(bucket)) + 1):
        here = totals[places]
        kept |= {int(places[0]), int(places[here.argmax()]), int(places[here.argmin()])}
    return np.asarray(sorted(kept))
