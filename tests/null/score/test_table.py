"""The table of published runs, from files that someone else wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.score.table import COLUMNS, MAX_FILE_BYTES, MAX_ROWS, TableError, own_table, read_table


def table(path: Path, *rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    lines = [",".join(columns), *(",".join(row.get(name, "") for name in columns) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def faults(path: Path) -> list[str]:
    with pytest.raises(TableError) as caught:
        read_table(path)
    return caught.value.faults


def test_blanks_and_numbers(tmp_path: Path) -> None:
    row = {"id": "a", "tp": "8", "zero_stage": "0", "metric_step_time_s": "1.5e1", "notes": "x"}
    (found,) = read_table(table(tmp_path / "t.csv", row))
    assert (found.tp, found.pp, found.zero_stage, found.metric_step_time_s, found.notes) == (8, None, 0, 15.0, "x")


def test_further_columns_and_a_byte_order_mark_are_no_fault(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", {"id": "a"}, columns=("year", *COLUMNS))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [row.id for row in read_table(path)] == ["a"]


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "1e400", "0x10", "1_0", "١", "1,5", "9" * 5000])
def test_what_is_no_number_is_refused(tmp_path: Path, text: str) -> None:
    for column in ("tp", "metric_step_time_s"):
        (fault,) = faults(table(tmp_path / "t.csv", {"id": "a", column: f'"{text}"'}))
        assert fault.startswith(f"line 2: {column}: found ")
        assert "wanted" in fault
        assert len(fault) < 200


@pytest.mark.parametrize("column", ["tp", "layers", "devices", "global_batch_seqs", "zero_stage"])
def test_counts_are_bounded(tmp_path: Path, column: str) -> None:
    (fault,) = faults(table(tmp_path / "t.csv", {"id": "a", column: "16777217"}))
    assert "16,777,216" in fault


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    bad = {"id": "", "tp": "x", "sp": "maybe", "metric_step_time_s": "soon"}
    found = faults(table(tmp_path / "t.csv", {"id": "a"}, bad, {"id": "a"}))
    assert [fault.split(":")[0] for fault in found] == ["line 3"] * 4 + ["id 'a' names more than one row"]
    assert {fault.split(":")[1].strip() for fault in found[:4]} == {"id", "tp", "sp", "metric_step_time_s"}


def test_many_faults_are_counted(tmp_path: Path) -> None:
    found = faults(table(tmp_path / "t.csv", *({"id": f"r{i}", "tp": "x"} for i in range(500))))
    assert len(found) == 21
    assert found[-1] == "and 480 more"


def test_missing_and_repeated_columns(tmp_path: Path) -> None:
    columns = (*(name for name in COLUMNS if name not in ("tp", "notes")), "pp")
    found = faults(table(tmp_path / "t.csv", {"id": "a"}, columns=columns))
    assert found == ["line 1: missing the columns tp, notes", "line 1: the columns 'pp' come more than once"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"\xff\xfe\x00", "not UTF-8 at byte 0"),
        (b"\x00" * 100, "missing the columns"),
        (b'{"rows": []}', "missing the columns"),
        (",".join(COLUMNS).encode(), "no rows"),
        (",".join(COLUMNS).encode() + b'\n"a' + b"x" * 200_000, "not CSV"),
        (",".join(COLUMNS).encode() + b'\n"a"b,', "not CSV"),
        (",".join(COLUMNS).encode() + b"\na,b\n", "found 2 cells"),
        (",".join(COLUMNS).encode() + b"\n" + b"a," * 100_000 + b"\n", "cells, wanted"),
        (",".join(COLUMNS).encode() + b"\n" + b'"\x1b[2J"' + b"," * (len(COLUMNS) - 1), "printable"),
    ],
)
def test_files_that_are_no_table(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    assert any(said in fault for fault in faults(path))


def test_a_directory_a_pipe_and_a_large_file_are_refused_at_once(tmp_path: Path) -> None:
    assert "a directory" in faults(tmp_path)[0]
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in faults(tmp_path / "pipe")[0]
    large = tmp_path / "large.csv"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert "larger than" in faults(large)[0]
    with pytest.raises(FileNotFoundError):
        read_table(tmp_path / "none.csv")


def test_the_number_of_rows_is_bounded(tmp_path: Path) -> None:
    found = faults(table(tmp_path / "t.csv", *({"id": f"r{i}"} for i in range(MAX_ROWS + 2))))
    assert found == [f"more than {MAX_ROWS:,} rows; wanted a table of published runs"]


def test_our_own_table_reads_and_names_a_source_in_each_row() -> None:
    rows = read_table(own_table())
    assert len(rows) > 1000
    assert all(row.source and row.model and row.accelerator for row in rows)
