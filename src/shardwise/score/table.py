"""The table of published runs: a CSV file, read strictly.

A file may come from anywhere: its size, its rows and every number are bounded before anything is computed with them.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Final

from shardwise.files import FileError, read_small

MAX_FILE_BYTES: Final = 16 << 20
MAX_ROWS: Final = 20_000
MAX_TEXT: Final = 4096
MAX_COUNT: Final = 1 << 24
"""Larger than any dim, degree, batch or length of a real run."""

MAX_FAULTS: Final = 20

_COUNT: Final = re.compile(r"[0-9]{1,9}")
_NUMBER: Final = re.compile(r"[0-9]{1,15}(?:\.[0-9]{0,15})?(?:[eE][+-]?[0-9]{1,2})?")


class TableError(ValueError):
    """A table that cannot be read; `faults` says what is wrong with it, the first MAX_FAULTS of it."""

    def __init__(self, where: str, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"{where}: {fault}" for fault in faults))


@dataclass(frozen=True, slots=True)
class Published:
    """One published run, as its source printed it. A blank is None, or "" of a text.

    The fields are the columns of the file. Times are of a step; rates are means over all devices.
    """

    id: str
    model: str
    layers: int | None
    hidden: int | None
    ffn_hidden: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    experts: int | None
    topk: int | None
    accelerator: str
    devices: int | None
    tp: int | None
    sp: str
    pp: int | None
    vpp: int | None
    schedule: str
    cp: int | None
    ep: int | None
    etp: int | None
    dp: int | None
    zero_stage: int | None
    micro_batch: int | None
    global_batch_seqs: int | None
    seq_len: int | None
    precision: str
    recompute: str
    flash_attention: str
    metric_step_time_s: float | None
    metric_tokens_per_s_per_device: float | None
    metric_tflops_per_device: float | None
    tflops_convention: str
    metric_peak_mem_GiB: float | None
    source: str
    notes: str

    @property
    def out_of_memory(self) -> bool:
        """Whether the run is published as one that did not fit."""
        return "OUT OF MEMORY" in self.notes


COLUMNS: Final = tuple(f.name for f in fields(Published))
"""Columns that a table must have. It may have more."""

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {"sp": ("", "yes", "no")}


def own_table() -> Path:
    """The copy that comes with the package."""
    return Path(str(resources.files("shardwise.score") / "data" / "published-runs.csv"))


def read_table(path: Path) -> list[Published]:
    """The rows of a table. Raises TableError with the faults; OSError as the system."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    rows: list[Published] = []
    faults: list[str] = []
    nothing: list[str] = []
    try:
        header = next(reader, nothing)
        faults = _header_faults(header)
        for cells in () if faults else reader:
            if len(rows) >= MAX_ROWS:
                faults.append(f"more than {MAX_ROWS:,} rows; wanted a table of published runs")
                break
            if cells:
                rows.append(_row(f"line {reader.line_num}", header, cells, faults))
    except csv.Error as error:
        faults.append(f"line {reader.line_num}: not CSV: {error}")
    faults += _twice(rows)
    if not faults and not rows:
        faults.append("no rows below the header; wanted a published run on each line")
    if len(faults) > MAX_FAULTS:
        faults = [*faults[:MAX_FAULTS], f"and {len(faults) - MAX_FAULTS:,} more"]
    if faults:
        raise TableError(str(path), faults)
    return rows


def _text(path: Path) -> str:
    try:
        return read_small(path, "a CSV file of published runs", MAX_FILE_BYTES)
    except FileError as error:
        raise TableError(str(path), [str(error)]) from None


def _header_faults(header: list[str]) -> list[str]:
    if not header:
        return ["empty; wanted a header line and a published run on each line below it"]
    missing = [name for name in COLUMNS if name not in header]
    twice = sorted({_shown(name) for name in header if header.count(name) > 1}) if len(header) < 1000 else ["(many)"]
    faults = [f"line 1: missing the columns {', '.join(missing)}"] if missing else []
    return faults + ([f"line 1: the columns {', '.join(twice)} come more than once"] if twice else [])


def _row(where: str, header: list[str], cells: list[str], faults: list[str]) -> Published:
    """One line; what is wrong with it goes to `faults`."""
    if len(cells) != len(header):
        faults.append(f"{where}: found {len(cells):,} cells, wanted {len(header)}, one for each column")
    texts = dict(zip(header, cells, strict=False))
    values: dict[str, object] = {}
    for name in COLUMNS:
        text = texts.get(name, "").strip()
        try:
            values[name] = _KINDS[name](text)
        except ValueError as error:
            faults.append(f"{where}: {name}: found {_shown(text)}, wanted {error}")
            values[name] = "" if _KINDS[name] is _words else None
        if name in _CHOICES and values[name] not in _CHOICES[name]:
            faults.append(f"{where}: {name}: found {_shown(text)}, wanted yes, no or nothing")
    if not values["id"]:
        faults.append(f"{where}: id: found nothing, wanted a name of the row")
    return Published(**values)  # type: ignore[arg-type]


def _count(text: str) -> int | None:
    if not text:
        return None
    if not _COUNT.fullmatch(text) or not 0 <= int(text) <= MAX_COUNT:
        raise ValueError(f"a whole number up to {MAX_COUNT:,}, or nothing")
    return int(text)


def _positive(text: str) -> int | None:
    if (number := _count(text)) == 0:
        raise ValueError(f"a whole number from 1 to {MAX_COUNT:,}, or nothing")
    return number


def _measured(text: str) -> float | None:
    if not text:
        return None
    value = float(text) if _NUMBER.fullmatch(text) else float("nan")
    if not isfinite(value) or not 1e-9 <= value <= 1e12:
        raise ValueError("a positive number with a decimal point, from 1e-9 to 1e12, or nothing")
    return value


def _words(text: str) -> str:
    if len(text) > MAX_TEXT or not text.isprintable():
        raise ValueError(f"at most {MAX_TEXT:,} printable characters")
    return text


_BY_TYPE: Final[Mapping[str, Callable[[str], object]]] = {
    "str": _words,
    "int | None": _positive,
    "float | None": _measured,
}
_KINDS: Final[Mapping[str, Callable[[str], object]]] = {
    **{f.name: _BY_TYPE[str(f.type)] for f in fields(Published)},
    "zero_stage": _count,
}


def _twice(rows: list[Published]) -> Iterator[str]:
    """An id names one row."""
    seen: set[str] = set()
    for row in rows:
        if row.id in seen and row.id:
            yield f"id {_shown(row.id)} names more than one row"
        seen.add(row.id)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
