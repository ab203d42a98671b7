from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.units import (
    DTYPE_BYTES,
    GB,
    GIB,
    MAX_TOKENS,
    format_bytes,
    format_bytes_decimal,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    format_tokens,
    gib,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4M", 4_194_304),
        ("4m", 4_194_304),
        ("16M", 16_777_216),
        ("8K", 8_192),
        ("1G", 1_073_741_824),
        ("1.5M", 1_572_864),
        ("0.5K", 512),
        ("8192", 8_192),
        ("4_194_304", 4_194_304),
        ("4,194,304", 4_194_304),
        (" 4 M ", 4_194_304),
        ("8192.0", 8_192),
    ],
)
def test_token_counts(text: str, count: int) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "M", "four", "-4M", "4MiB", "1e6", "1,5M", "4,19,4304", "4__0", "_4", "1..5K", ".5K", "0x1", "٤M"],
)
def test_what_is_not_a_token_count_is_refused_with_the_right_spelling(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a token count.*4M is 4,194,304"):
        parse_tokens(text)


def test_a_fraction_of_a_token_is_refused_with_the_number() -> None:
    with pytest.raises(ValueError, match=r"'1\.3K' is 1,331\.200 tokens, not a whole number.*write 1331 if"):
        parse_tokens("1.3K")


@pytest.mark.parametrize("text", ["0", "0K", "9007199254740993", "99999999G"])
def test_token_counts_out_of_range(text: str) -> None:
    with pytest.raises(ValueError, match="out of range"):
        parse_tokens(text)


def test_endless_digits_are_refused() -> None:
    with pytest.raises(ValueError, match="not a token count"):
        parse_tokens("9" * 10_000)


@given(st.integers(1, MAX_TOKENS))
def test_formatted_tokens_read_back(count: int) -> None:
    assert parse_tokens(format_tokens(count)) == count


@given(st.integers(1, 2**20), st.sampled_from([("K", 10), ("M", 20), ("G", 30)]))
def test_suffixes_are_powers_of_1024(number: int, suffix: tuple[str, int]) -> None:
    letter, power = suffix
    assert parse_tokens(f"{number}{letter}") == number << power
    assert parse_tokens(f"{number / 4}{letter}") == number << (power - 2)


def test_gib_is_not_gb() -> None:
    assert GIB == 1_073_741_824
    assert GB == 1_000_000_000
    assert gib(80 * GB) == pytest.approx(74.506, abs=1e-3)


@pytest.mark.parametrize(
    ("n_bytes", "binary", "decimal"),
    [
        (0, "0 B", "0 B"),
        (512, "512 B", "512 B"),
        (1023, "1,023 B", "1.0 kB"),
        (1024, "1.0 KiB", "1.0 kB"),
        (1024**2 - 1, "1.0 MiB", "1.0 MB"),
        (345.6 * 2**20, "345.6 MiB", "362.4 MB"),
        (12.3 * 2**30, "12.3 GiB", "13.2 GB"),
        (-2 * 2**30, "-2.0 GiB", "-2.1 GB"),
        (5000 * 2**50, "5,000.0 PiB", "5,629.5 PB"),
    ],
)
def test_bytes(n_bytes: float, binary: str, decimal: str) -> None:
    assert format_bytes(n_bytes) == binary
    assert format_bytes_decimal(n_bytes) == decimal


@given(st.integers(0, 2**62))
def test_bytes_are_within_half_of_the_last_digit(n_bytes: int) -> None:
    number, unit = format_bytes(n_bytes).replace(",", "").split()
    size = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    assert abs(float(number) * size - n_bytes) <= (0.0501 * size if size > 1 else 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.2e-6, "4.20 µs"),
        (999.6e-6, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (1.234, "1.23 s"),
        (99.96, "100 s"),
        (1234.4, "1,234 s"),
        (-0.002, "-2.00 ms"),
        (3e-9, "0.003 µs"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_flops_and_rates() -> None:
    assert format_flops(2.524e12) == "2.52 TFLOP"  # Llama 3 405B, one token at 8,192
    assert format_flops(2.524e12 * 16_777_216) == "42.3 EFLOP"
    assert format_flops(3.79e25) == "37.9 YFLOP"
    assert format_flops(12) == "12.0 FLOP"
    assert format_rate(408.23e12) == "408.2 TFLOP/s"
    assert format_rate(989e12 * 16_384) == "16,203,776.0 TFLOP/s"


def test_counts() -> None:
    assert format_count(405_853_388_800) == "405,853,388,800"


def test_dtype_sizes_cannot_be_changed() -> None:
    assert DTYPE_BYTES["bfloat16"] == 2
    assert DTYPE_BYTES["float32"] == 4
    assert not hasattr(DTYPE_BYTES, "__setitem__")
