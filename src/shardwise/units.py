"""Quantities in and out: token counts, bytes, seconds, FLOP/s.

Inside the program a quantity is a plain number in an SI base unit with the unit in its name (`_bytes`, `_s`, `_flops`).
GiB is 2**30 bytes and GB is 10**9: every text says which. K, M and G after a token count are powers of 1024.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Final

GIB: Final = 2**30
GB: Final = 10**9

DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)
"""Bytes of one element, by torch's name of the dtype."""

MAX_TOKENS: Final = 2**53
"""Largest token count accepted: totals are float64, which holds every integer only up to here."""

_TOKEN_SUFFIX: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_TOKENS: Final = re.compile(
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*)(?P<part>\.[0-9]+)?\s*(?P<suffix>[KMG]?)", re.IGNORECASE
)


def parse_tokens(text: str) -> int:
    """Read a token count: `4M` is 4,194,304 (K, M, G are powers of 1024); `4194304`, `4_194_304`, `4,194,304`, `1.5M`.

    Raises ValueError for anything else, for a count that is not whole (`1.3K`), below 1 or above 2**53.
    """
    match = _TOKENS.fullmatch(text.strip())
    if match is None or len(text) > 40:
        raise ValueError(
            f"{text[:40]!r} is not a token count: write a whole number (4194304 or 4,194,304) or one with "
            "K, M or G for a power of 1024 (4M is 4,194,304)"
        )
    number = match["whole"].replace(",", "").replace("_", "") + (match["part"] or "")
    count = Fraction(number) * _TOKEN_SUFFIX[match["suffix"].upper()]
    if count.denominator != 1:
        raise ValueError(
            f"{text.strip()!r} is {float(count):,.3f} tokens, not a whole number (K, M and G are powers of 1024): "
            f"write {round(count)} if that is meant"
        )
    if not 1 <= count <= MAX_TOKENS:
        raise ValueError(f"{text.strip()!r} is out of range: a token count is at least 1 and at most {MAX_TOKENS:,}")
    return int(count)


def format_count(count: int) -> str:
    """`1234567` -> `1,234,567`."""
    return f"{count:,}"


def format_tokens(count: int) -> str:
    """`4194304` -> `4,194,304`: the exact number, which `parse_tokens` reads back."""
    return format_count(count)


def gib(n_bytes: float) -> float:
    """Bytes in GiB (2**30 bytes)."""
    return n_bytes / GIB


def format_bytes(n_bytes: float) -> str:
    """Binary units: `512 B`, `345.6 MiB`, `12.3 GiB`. Negative values keep their sign (a missing headroom)."""
    return _scaled_bytes(n_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_bytes_decimal(n_bytes: float) -> str:
    """Decimal units: `512 B`, `345.6 MB`, `12.3 GB` (10**9 bytes)."""
    return _scaled_bytes(n_bytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_seconds(seconds: float) -> str:
    """Three significant digits in µs, ms or s: `4.20 µs`, `12.3 ms`, `1.23 s`, `1,234 s`."""
    if seconds == 0:
        return "0 s"
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if abs(seconds) / size < 999.5:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds)} s"


def format_flops(flops: float) -> str:
    """A number of floating-point operations: `2.52 TFLOP`, `42.3 EFLOP`."""
    names = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP")
    scale = 0
    while abs(flops) / 1000**scale >= 999.5 and scale < len(names) - 1:
        scale += 1
    return f"{_three_digits(flops / 1000**scale)} {names[scale]}"


def format_rate(flops_per_s: float) -> str:
    """A rate of computing, always in TFLOP/s so that two of them can be compared: `408.2 TFLOP/s`."""
    return f"{flops_per_s / 1e12:,.1f} TFLOP/s"


def _scaled_bytes(n_bytes: float, base: int, names: Sequence[str]) -> str:
    scale = 0
    while round(abs(n_bytes) / base**scale, 1 if scale else 0) >= base and scale < len(names) - 1:
        scale += 1
    return f"{n_bytes / base**scale:,.{1 if scale else 0}f} {names[scale]}"


def _three_digits(value: float) -> str:
    size = abs(value)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{digits}f}" if size >= 0.01 or size == 0 else f"{value:.2g}"
