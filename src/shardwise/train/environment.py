"""What a launcher such as torchrun tells its ranks. No torch here: a command asks before it loads torch."""

from __future__ import annotations

import os

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> tuple[int, int] | None:
    """(rank, world size), or None: all that joining the others takes has to be there, and numbers be numbers."""
    values = [os.environ.get(name, "") for name in _NAMES]
    if not all(values) or not all(v.isascii() and v.isdigit() for v in values[:2]):
        return None
    return int(values[0]), int(values[1])


def local_world_size(world_size: int) -> int:
    """Ranks that share this machine."""
    return _number("LOCAL_WORLD_SIZE") or world_size


def local_rank(rank: int, world_size: int) -> int:
    """The rank's number on this machine: that of its launcher, or, of one that gives none and of ranks that we start
    ourselves, its place among as many neighbours."""
    given = None if launched() is None else _number("LOCAL_RANK")
    return rank % local_world_size(world_size) if given is None else given


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def is_reporter() -> bool:
    """Whether this process is the one that prints: rank 0, or the one that starts the ranks."""
    found = launched()
    return found is None or found[0] == 0
