"""The picture says what the walk found, in 80 columns."""

from __future__ import annotations

import pytest

from shardwise.schedule import build
from shardwise.schedule.drawing import GOES_ON, IDLE, grid, render
from shardwise.schedule.table import Op


def test_grid_of_1f1b() -> None:
    assert grid(build("1f1b", 2, 2)) == [
        ["F0", "F1", IDLE, IDLE, "B0", GOES_ON, IDLE, "B1", GOES_ON],
        [IDLE, "F0", "B0", GOES_ON, "F1", "B1", GOES_ON, IDLE, IDLE],
    ]


def test_durations_stretch_the_cells() -> None:
    row = grid(build("1f1b", 1, 1), {(Op.F, 0): 2.0, (Op.BW, 0): 4.0}, cell_s=1.0)[0]
    assert row == ["F0", GOES_ON, "B0", GOES_ON, GOES_ON, GOES_ON]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved:4", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"])
@pytest.mark.parametrize("columns", [60, 80])
def test_stays_within_the_columns(name: str, columns: int) -> None:
    for pp, m in ((2, 1), (4, 8), (16, 120)):
        text = render(build(name, pp, m), columns=columns)
        assert max(map(len, text.splitlines())) <= columns
        assert ("time units shown" in text) == ("…" in text)


def test_second_chunk_in_small_letters() -> None:
    assert grid(build("zb-v", 1, 1)) == [["F0", "f0", "b0", "w0", "B0", "W0"]]
    assert "small letters: second copy of the weights" in render(build("dualpipe", 2, 2))
    assert "a, b, .. chunk" in render(build("interleaved:3", 2, 2))


def test_bands_hold_the_whole_row() -> None:
    text = render(build("zb-v", 3, 5))
    cells = grid(build("zb-v", 3, 5))[1]
    assert [cell for line in text.splitlines() if line.startswith("rank 1") for cell in line.split()[2:]] == cells


def test_says_what_it_leaves_out() -> None:
    assert "… " in render(build("gpipe", 4, 20))
    assert "…" not in render(build("zb-h1", 4, 6))
