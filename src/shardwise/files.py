"""Small files that people hand us: read whole, or refused with one reason."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class FileError(ValueError):
    """What is wrong with a file, without its name."""


def read_small(path: str | Path, wanted: str, max_bytes: int) -> str:
    """A regular UTF-8 file's text, without a byte order mark. `wanted`: what it should be, `a TOML file`.

    Raises FileError for what is no such file or larger than `max_bytes`, OSError where the system refuses to read.
    """
    if os.path.isdir(path):
        raise FileError(f"a directory; wanted {wanted}")
    # A pipe would block the opening, and a device may have no end.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileError(f"not a regular file; wanted {wanted}")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise FileError(f"larger than {max_bytes:,} bytes; wanted {wanted}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"not UTF-8 at byte {error.start:,}; wanted {wanted}") from None
