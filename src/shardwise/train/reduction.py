"""Sums of gradients behind the backward: one unit's at a time is under way, while the unit below it computes.

A sum may take several collectives, over one axis after the other. What is under way is waited for, and the next one of
its sum starts, when the sum of another unit does, or when all must be over: places that are the same on every rank of a
group, which a clock would not be. So no more than one unit's memory is held for it, and the network is never idle for
want of a sum that could start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from shardwise.train.comm import Work

Start = Callable[[], Work | None]
"""Starts one collective of a sum, after the one before is over; None: there is nothing to wait for."""


class Reductions:
    """Of one step."""

    def __init__(self) -> None:
        self.under_way: list[tuple[Work, deque[Start]]] = []

    def add(self, sum_: Iterable[Start]) -> None:
        """Start one, after what is under way; of sums that are not over, the next collective."""
        self._go_on()
        self._start(deque(sum_))

    def finish(self) -> None:
        """Return when all are over."""
        while self.under_way:
            self._go_on()

    def _go_on(self) -> None:
        before, self.under_way = self.under_way, []
        for work, rest in before:
            work.wait()
            self._start(rest)

    def _start(self, rest: deque[Start]) -> None:
        while rest:
            work = rest.popleft()()
            if work is not None:
                self.under_way.append((work, rest))
                return
