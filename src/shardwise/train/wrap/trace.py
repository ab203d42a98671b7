"""In which order units are needed: learnt from the step before, the same on every rank that runs the same program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.train.wrap.shards import Unit


@dataclass(slots=True)
class Trace:
    """Demands from the start of one forward to the start of the next, backward and recomputation included.

    None marks the end of a forward. While the demands repeat those before, the next one is foretold.
    """

    known: list[Unit | None] = field(default_factory=list[Unit | None])
    seen: list[Unit | None] = field(default_factory=list[Unit | None])
    following: bool = True

    @staticmethod
    def guess(units: Sequence[Unit]) -> Trace:
        """Before the first step: in the order of registration, then back. A wrong guess costs one gather."""
        return Trace([*units, None, *reversed(units)])

    def restart(self) -> None:
        """A forward begins. An evaluation, which is the first part of a step, does not replace the step."""
        if self.known[: len(self.seen)] != self.seen:
            self.known = self.seen
        self.seen, self.following = [], True

    def note(self, unit: Unit | None) -> Unit | None:
        """`unit` is needed now; the unit that will be needed next, or None if that is not known or a forward ends."""
        place = len(self.seen)
        self.seen.append(unit)
        self.following = self.following and place < len(self.known) and self.known[place] is unit
        return self.known[place + 1] if self.following and place + 1 < len(self.known) else None
