"""What an action adds to a rank's memory: the moments of its units that may set the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.account.static import SAME, Columns, Gathered, Opened
from shardwise.account.units import most
from shardwise.account.waiting import Profile, Running, reads
from shardwise.model.spec import Count
from shardwise.schedule.table import Op


class Moment(NamedTuple):
    """Activations that live at a moment, in bytes, and the parameters and gradients beside them."""

    activations: Count
    gathered: Gathered | None
    opened: Opened | None


class Actions:
    """Prices the actions of one group of layouts; equal questions are asked once."""

    def __init__(self, columns: Columns) -> None:
        self.c = columns
        self._known: dict[Running, list[Moment]] = {}
        self._sums: dict[object, Count] = {}

    def moments(self, running: Running) -> list[Moment]:
        """The moments inside an action: of those with equal parameters and gradients beside them, the largest."""
        if running not in self._known:
            op, profile, before, after = running
            largest: dict[tuple[Gathered | None, Opened | None], Count] = {}
            for p in _positions(profile):
                for moment in self._of_unit(op, profile, p, *self._around(op, profile, p, before, after)):
                    key = moment.gathered, moment.opened
                    largest[key] = most([largest.get(key, 0), moment.activations])
            self._known[running] = [Moment(activations, *key) for key, activations in largest.items()]
        return self._known[running]

    def stage(self, profile: Profile) -> tuple[Count, Count]:
        """(saved from F to B, queued from B to W) of a micro-batch of the whole stage."""
        return self._saved(profile), self._queued(profile)

    def _around(
        self, op: Op, profile: Profile, p: int, before: str | None, after: str | None
    ) -> tuple[str | None, str | None]:
        """Kinds of the units behind and ahead of unit `p` in the direction of the action, None where one reads no
        parameters; SAME where a looped layer has no other between two of its runs."""
        step, model = 1 if op is Op.F else -1, self.c.job.model

        def kind(place: int, beyond: str | None) -> str | None:
            if not 0 <= place < len(profile):
                return beyond
            other = profile[place]
            if other == profile[p] and model.count(other) == 1:
                return SAME
            return other if reads(model, op, other) else None

        return kind(p - step, before), kind(p + step, after)

    def _of_unit(self, op: Op, profile: Profile, p: int, behind: str | None, ahead: str | None) -> Iterator[Moment]:
        """Moments of unit `p`: its parameters become ready, it computes, its gradient is reduced."""
        kind = profile[p]
        unit = self.c.unit[kind]
        whole, gives = reads(self.c.job.model, op, kind), op in (Op.W, Op.BW)
        rest = self._saved(profile[:p])
        if op is Op.B:
            rest = rest + self._queued(profile[p + 1 :])
        elif op is Op.W:  # from the top: the units below still hold their queues, and nothing else
            rest = self._queued(profile[:p])
        if whole:
            held = unit.input if op is Op.F else unit.saved + unit.incoming
            yield Moment(rest + held, self._ready(kind, behind), None)
        peak = {Op.F: unit.f_peak, Op.BW: unit.bw_peak, Op.B: unit.b_peak, Op.W: unit.w_peak}[op]
        ahead = None if ahead == SAME else ahead
        running = Gathered(kind if whole else None, ahead) if whole or ahead else None
        yield Moment(rest + peak, running, Opened(kind, False) if gives else None)
        if gives:
            left = unit.input if op is Op.BW else 0
            yield Moment(rest + left, running, Opened(kind, True))

    def _ready(self, kind: str, behind: str | None) -> Gathered | None:
        """The gather of a unit becoming its parameters. The unit behind matters only where it held some of them."""
        if behind == SAME:
            return None
        held = behind if behind and behind != kind and set(self.c.uses(behind)) & set(self.c.uses(kind)) else None
        return Gathered(kind, None, True, held)

    def _saved(self, units: Profile) -> Count:
        return self._sum("saved", units)

    def _queued(self, units: Profile) -> Count:
        return self._sum("queued", units)

    def _sum(self, name: str, units: Profile) -> Count:
        counts = tuple(sorted(Counter(units).items()))
        if (name, counts) not in self._sums:
            self._sums[name, counts] = sum(n * getattr(self.c.unit[kind], name) for kind, n in counts)
        return self._sums[name, counts]


def _positions(profile: Profile) -> list[int]:
    """Units at which an action's memory can peak: in between, over units with equal neighbours, it only grows or only
    falls (unless a queue is larger than what was saved for some kinds of units and smaller for others)."""
    last = len(profile) - 1
    places: dict[tuple[str, str, str], list[int]] = {}
    for p, kind in enumerate(profile):
        key = (profile[p - 1] if p else "", kind, profile[p + 1] if p < last else "")
        places.setdefault(key, []).append(p)
    return sorted({p for found in places.values() for p in (found[0], found[-1])})
