"""Files that people hand us."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.files import FileError, read_small


def test_a_small_text_is_read_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbf\xc3\xa9 = 1\r\n")
    assert read_small(path, "a file", 11) == "é = 1\r\n"
    assert read_small(str(path), "a file", 100) == "é = 1\r\n"


def test_what_is_none_is_refused_with_one_reason_and_never_waited_for(tmp_path: Path) -> None:
    pipe, narrow, binary = tmp_path / "pipe", tmp_path / "narrow", tmp_path / "binary"
    os.mkfifo(pipe)
    narrow.write_bytes(b"12345")
    binary.write_bytes(b"1234\xff")
    for path, said in (
        (tmp_path, "a directory; wanted a plan"),
        (pipe, "not a regular file; wanted a plan"),
        (Path("/dev/zero"), "not a regular file; wanted a plan"),
        (narrow, "larger than 4 bytes; wanted a plan"),
    ):
        with pytest.raises(FileError) as caught:
            read_small(path, "a plan", 4)
        assert str(caught.value) == said
    with pytest.raises(FileError, match=r"^not UTF-8 at byte 4; wanted a plan$"):
        read_small(binary, "a plan", 5)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none", "a plan", 4)
