"""Orders and CSV form of the schedules against torch.distributed.pipelining's own generators (seen in 2.11 and 2.13).

Those run on mocked stages, without a process group. torch fills the slots in which it expects a rank to wait with
None; the order of the actions is what runs, so that is compared: action by action on each rank. torch has no ZB-H2
and no DualPipe of two copies, and we generate neither its looped breadth-first order nor its interleaved zero bubble
of several stages a rank: those are loaded.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from shardwise.schedule import build, dump, load

pytestmark = pytest.mark.oracle

Order = list[list[str]]
"""[rank] the cells that torch would write, without those that wait."""

SIZES = [(pp, m) for pp in (1, 2, 3, 4, 6, 8) for m in (1, 2, 3, 5, 8, 12, 16, 17, 24)]
SIZES += [(16, 16), (16, 32), (16, 40), (16, 64)]


def generator(name: str, pp: int, m: int, virtual: int) -> Any:
    """A torch schedule on rank 0."""
    stages: list[Any] = []
    for chunk in range(virtual):
        stage = MagicMock(spec=_PipelineStageBase)
        stage.group_size, stage.group_rank, stage.group, stage.submod = pp, 0, None, None
        stage.num_stages, stage.stage_index = pp * virtual, chunk * pp
        stage.is_first, stage.is_last, stage.has_backward = chunk == 0, False, True
        stages.append(stage)
    schedule = getattr(torch_schedules, name)
    return schedule(stages[0] if virtual == 1 and name in ("ScheduleGPipe", "Schedule1F1B") else stages, m)


def padded(name: str, pp: int, m: int, virtual: int) -> list[list[str]]:
    """torch's table with empty cells for ranks that wait; the reductions that it adds at the end are no compute."""
    schedule = generator(name, pp, m, virtual)
    order = schedule.pipeline_order if hasattr(schedule, "pipeline_order") else schedule._get_pipeline_order()
    cells = [["" if a is None else str(a) for a in order[rank]] for rank in range(pp)]
    return [[cell for cell in row if "REDUCE_GRAD" not in cell] for row in cells]


def torchs(name: str, pp: int, m: int, virtual: int) -> Order:
    return [[cell for cell in row if cell] for row in padded(name, pp, m, virtual)]


def ours(name: str, pp: int, m: int) -> Order:
    return [line.split(",") for line in dump(build(name, pp, m)).splitlines()]


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_gpipe(pp: int, m: int) -> None:
    assert ours("gpipe", pp, m) == torchs("ScheduleGPipe", pp, m, 1)


@pytest.mark.parametrize(("pp", "m"), [(pp, m) for pp, m in SIZES if m >= pp])
def test_1f1b(pp: int, m: int) -> None:
    """torch's table of the last rank counts its forwards from 1, since it has none before it alternates."""
    found, theirs = ours("1f1b", pp, m), torchs("Schedule1F1B", pp, m, 1)
    assert found[:-1] == theirs[:-1]
    last = pp - 1
    assert theirs[last] == [cell for i in range(m) for cell in (f"{last}F{i + 1}", f"{last}B{i}")]
    assert found[last] == [cell for i in range(m) for cell in (f"{last}F{i}", f"{last}B{i}")]


@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize(("pp", "m"), [(pp, m) for pp, m in SIZES if m % pp == 0])
def test_interleaved_of_whole_groups(pp: int, m: int, virtual: int) -> None:
    assert ours(f"interleaved:{virtual}", pp, m) == torchs("ScheduleInterleaved1F1B", pp, m, virtual)


@pytest.mark.parametrize(("pp", "m"), [(4, 3), (4, 10), (3, 5), (8, 12), (6, 14)])
def test_interleaved_of_other_counts(pp: int, m: int) -> None:
    """torch makes the groups larger, all alike, where m has such a divisor; we keep groups of p and a short last one,
    for any m. Each rank still runs the same actions, and each stage its micro-batches in order.
    """
    for one, other in zip(ours("interleaved:2", pp, m), torchs("ScheduleInterleaved1F1B", pp, m, 2), strict=True):
        assert Counter(one) == Counter(other)
        for stage in {cell.partition(kind)[0] for cell in one for kind in "FB" if kind in cell}:
            for kind in "FB":
                mine, theirs = ([c for c in row if c.startswith(f"{stage}{kind}")] for row in (one, other))
                assert mine == theirs


@pytest.mark.parametrize(("pp", "m"), [(pp, m) for pp, m in SIZES if m % max(1, m // pp) == 0])
def test_zb_h1(pp: int, m: int) -> None:
    """torch's interleaved zero bubble with one stage a rank. It refuses counts that make no equal groups."""
    assert ours("zb-h1", pp, m) == torchs("ScheduleInterleavedZeroBubble", pp, m, 1)


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_zb_v(pp: int, m: int) -> None:
    assert ours("zb-v", pp, m) == torchs("ScheduleZBVZeroBubble", pp, m, 2)


@pytest.mark.parametrize(("pp", "m"), [(pp, m) for pp, m in SIZES if m >= 2 * pp])
def test_dualpipe_v(pp: int, m: int) -> None:
    """Its pairs too. torch refuses fewer than 2p micro-batches; we leave the absent ones out."""
    assert ours("dualpipe-v", pp, m) == torchs("ScheduleDualPipeV", pp, m, 2)


@pytest.mark.golden
def test_slots_of_torchs_tables() -> None:
    """W270, W271 and W273 of the worked examples: slots and idle slots of each rank."""
    for name, pp, m, slots, idle in (
        ("ScheduleInterleaved1F1B", 4, 8, [46, 44, 42, 40], [14, 12, 10, 8]),
        ("ScheduleInterleavedZeroBubble", 2, 8, [49, 49], [1, 1]),
        ("ScheduleDualPipeV", 4, 10, [38, 36, 34, 33], [0, 0, 0, 0]),
    ):
        table = padded(name, pp, m, 2)
        assert [len(row) for row in table] == slots
        assert [row.count("") for row in table] == idle


def written(name: str, pp: int, m: int, virtual: int) -> str:
    """What torch's `_dump_csv` writes."""
    out = io.StringIO()
    csv.writer(out).writerows(padded(name, pp, m, virtual))
    return out.getvalue()


@pytest.mark.golden
def test_torchs_zb1p_table_loads() -> None:
    """W268: 386 characters; a schedule that we don't generate."""
    text = written("ScheduleInterleavedZeroBubble", 2, 8, 2).replace("\r\n", "\n")
    first, second = text.splitlines()
    assert len(text) == 386
    assert first.startswith("0F0,0F1,2F0,,2F1,2I0,2W0")
    assert second.startswith(",1F0,1F1,3F0,3I0,3F1,3I1,3W0")
    schedule = load(text, 2)
    assert (schedule.placement, schedule.micro_batches) == (((0, 1, 0, 1),), 8)


@pytest.mark.parametrize(
    ("name", "theirs", "virtual"),
    [
        ("interleaved:3", "ScheduleInterleaved1F1B", 3),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
        ("dualpipe-v", "ScheduleDualPipeV", 2),
    ],
)
def test_what_torch_writes_is_loaded(name: str, theirs: str, virtual: int) -> None:
    found, expected = load(written(theirs, 4, 12, virtual), 4), build(name, 4, 12)
    assert (found.rows, found.placement, found.overlaps) == (expected.rows, expected.placement, expected.overlaps)


@pytest.mark.parametrize("name", ["ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"])
def test_what_we_do_not_generate_is_loaded_in_torchs_order(name: str) -> None:
    schedule = load(written(name, 4, 12, 3), 4)
    assert [line.split(",") for line in dump(schedule).splitlines()] == torchs(name, 4, 12, 3)


@pytest.mark.parametrize("name", ["interleaved:2", "zb-v", "dualpipe-v"])
def test_torch_reads_what_is_written(name: str, tmp_path: Any) -> None:
    """By torch's own loader, which also checks the order and finds the stages' ranks."""
    path = tmp_path / "schedule.csv"
    path.write_text(dump(build(name, 4, 12)))
    schedule = generator("ScheduleInterleaved1F1B", 4, 12, 2)
    torch_schedules.PipelineScheduleMulti._load_csv(schedule, str(path))
    assert [[str(a) for a in schedule.pipeline_order[rank]] for rank in range(4)] == ours(name, 4, 12)
    assert schedule.stage_index_to_group_rank == dict(enumerate(build(name, 4, 12).placement[0]))
