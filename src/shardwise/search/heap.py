"""What a search asks of the memory manager: it makes and drops big arrays, and many small tuples without cycles."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

# Of glibc's malloc.h; other systems have no `mallopt`, or ignore it.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


@contextmanager
def no_collection() -> Generator[None]:
    """Looking for cycles among hundreds of thousands of tuples would cost a third of a search, and three times 0.1 s
    after it: a command that ends soon keeps to this until then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_freed_memory() -> None:
    """For a process that does nothing else: what is freed stays for the next array. By default glibc gives large blocks
    back, and the system clears them page by page when they are asked for again, an eighth of a search."""
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
