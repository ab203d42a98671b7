"""A small table scored from file to JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from shardwise.account.memory import memory_of, peak_bytes
from shardwise.plan.batch import LayoutBatch
from shardwise.score.cases import case_of
from shardwise.score.score import TABLE_HEADER, Score, score_file, table_rows, to_json
from shardwise.score.table import TableError, own_table, read_table
from shardwise.simulate.step import step_time
from shardwise.units import GIB

SAMPLE = (
    *("r0001", "r0557", "r0564", "r0341", "r0342", "r0602", "r0921", "r0662", "r0701", "r0715", "r0716", "r0718"),
    *("r0719", "r0725", "r3389", "r3001"),
)
"""Of every kind: skipped, with memory as tensors, reserved and as the driver tells it, out of memory, a sweep."""

SWEEP = ("r0662", "r0701", "r0715", "r0716", "r0718")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with own_table().open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    made = tmp_path_factory.mktemp("score") / "sample.csv"
    with made.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *(row for row in rows if row[0] in SAMPLE)])
    return made


@pytest.fixture(scope="module")
def score(path: Path) -> Score:
    return score_file(path)


def test_json_has_two_lists_of_plain_values(score: Score) -> None:
    found = json.loads(json.dumps(to_json(score), allow_nan=False))
    assert set(found) == {"sources", "rows"}
    for source in found["sources"]:
        assert list(source) == [
            *("source", "stack", "device", "precision", "rows", "median_abs_error", "mean_abs_error", "bias"),
            *("memory_median_abs_error", "kendall", "calibrated"),
        ]
        assert source["calibrated"] is False
        assert source["mean_abs_error"] >= abs(source["bias"])
    for row in found["rows"]:
        assert list(row) == ["id", "predicted_s", "measured_s", "predicted_GiB", "measured_GiB", "skipped"]


def test_every_row_is_predicted_or_says_why_not(score: Score) -> None:
    assert [row.id for row in score.rows] == [row.id for row in read_table(own_table()) if row.id in SAMPLE]
    skipped = {row.id: row.skipped for row in score.rows if row.skipped}
    assert set(skipped) == {"r0001", "r0725"}
    assert skipped["r0001"] == "precision: MXFP8 is not planned"
    for row in score.rows:
        numbers = (row.predicted_s, row.predicted_GiB)
        assert all(n is None for n in numbers) if row.skipped else all(n is not None and n > 0 for n in numbers)
    assert dict(score.skipped) == {"precision": 1, "excluded": 1}
    assert score.predicted == sum(source.rows for source in score.sources) == len(SAMPLE) - 2


def test_what_is_compared_is_what_the_source_measured(score: Score) -> None:
    """SimuMax prints bytes of tensors, torchtitan what the allocator holds, BLOOM what nvidia-smi shows."""
    published = {row.id: row for row in read_table(own_table())}
    told = {row.id: row for row in score.rows}
    for name, kind in (("r0557", "allocated"), ("r0602", "reserved"), ("r0662", "device")):
        case = case_of(published[name])
        ranks = memory_of(case.job, case.layout)
        total = int(peak_bytes(case.job, LayoutBatch.of([case.layout]))[0])
        wanted = {
            "allocated": max(rank.proved_bytes for rank in ranks),
            "reserved": max(rank.proved_bytes + rank.assumed["allocator margin"] for rank in ranks),
            "device": total,
        }
        assert case.source.memory == kind
        assert told[name].predicted_GiB == pytest.approx(wanted[kind] / GIB)
        assert told[name].measured_GiB == published[name].metric_peak_mem_GiB
        assert told[name].predicted_s == step_time(case.job, case.layout).total_s


def test_a_sweep_is_judged_by_its_order_and_a_run_that_did_not_fit_by_its_fit(score: Score) -> None:
    (bloom,) = (source for source in score.sources if source.source == "BLOOM")
    assert (bloom.rows, bloom.memory_rows, bloom.out_of_memory) == (len(SWEEP) + 1, len(SWEEP), 1)
    rows = {row.id: row for row in score.rows}
    out = rows["r0719"]
    assert (out.measured_s, out.skipped) == (None, None)
    pairs = [(rows[i].predicted_s or 0, rows[i].measured_s or 0) for i in SWEEP]
    agreeing = sum((a > c) == (b > d) for i, (a, b) in enumerate(pairs) for c, d in pairs[:i])
    assert bloom.kendall == pytest.approx((2 * agreeing - 10) / 10)


def test_the_rival_stands_beside_the_errors(score: Score) -> None:
    (bloom,) = (source for source in score.sources if source.source == "BLOOM")
    assert bloom.rival_mfu is not None
    assert 0.2 < bloom.rival_mfu < 0.6
    assert all(source.rival_mfu is None for source in score.sources if source.rows < 3)


def test_the_table_has_a_line_for_each_source_and_one_for_all(score: Score) -> None:
    rows = table_rows(score)
    assert len(rows) == len(score.sources) + 1
    assert {len(row) for row in rows} == {len(TABLE_HEADER)}
    assert rows[-1][0] == "all"
    assert all("nan" not in cell and "None" not in cell for row in rows for cell in row)


def test_progress_is_told_to_the_end(path: Path) -> None:
    told: list[tuple[int, int]] = []
    score_file(path, lambda _, done, total: told.append((done, total)))
    assert told[0][0] == 0
    assert told[-1] == (len(SAMPLE) - 2, len(SAMPLE) - 2)
    assert sorted(told) == told


def test_a_table_of_skipped_rows_alone_is_a_score_without_sources(tmp_path: Path, path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    made = tmp_path / "one.csv"
    made.write_text(lines[0] + next(line for line in lines if line.startswith("r0001,")), encoding="utf-8")
    found = score_file(made)
    assert (found.sources, found.total, found.predicted) == ((), None, 0)
    assert table_rows(found) == []


def test_a_table_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(TableError):
        score_file(tmp_path)
