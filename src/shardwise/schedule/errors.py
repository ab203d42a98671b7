"""The one error of this package."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule, or its rows with communication, cannot run; the message says which rank, action or message."""
