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
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdigit() and int(text) else world_size


def is_reporter() -> bool:
    """Whether this process is the one that prints: rank 0, or the one that starts the ranks."""
    found = launched()
    return found is None or found[0] == 0
