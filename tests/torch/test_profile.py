"""`--profile` on one rank: named ranges, and every byte of the allocator in its category."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from shardwise.account.memory import memory_of
from shardwise.collective import Labels
from shardwise.plan.job import Job
from shardwise.plan.layout import parse
from shardwise.train import timeline
from shardwise.train.distributed import close_world, open_world
from shardwise.train.profile import ProfileFailed, open_folder, profiled
from shardwise.train.rank import Rank, build_rank, train_step
from shardwise.train.timeline import CATEGORIES, CPU, Meaning
from shardwise.view import memory as view
from tests.support.models import job, tiny

torch.set_num_threads(1)

SCALARS = 256
"""Bytes of scalars, such as each micro-batch's loss, that the account has in other parts than the timeline."""


def small(precision: str = "fp32") -> Job:
    return job(tiny(3, hidden=128, ffn=352, vocab=512), "1xcpu", seq_len=128, batch=4, precision=precision)


@contextmanager
def one_rank(text: str, precision: str = "fp32") -> Iterator[Rank]:
    labels = Labels()
    comm = open_world("fake", 0, 1, labels=labels)
    try:
        yield build_rank(small(precision), parse(text), comm, labels)
    finally:
        close_world()


def run(rank: Rank, folder: Path, steps: range, fails_at: int | None = None) -> None:
    with profiled(folder, rank, steps) as advance:
        for step in steps:
            shape = rank.micro_batches, rank.job.cut(rank.layout).tokens
            with rank.world.labels.at(phase="data"):
                ids, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
            train_step(rank, ids, targets)
            del ids, targets
            if step == fails_at:
                raise ArithmeticError
            advance()


def profile_of(
    text: str, folder: Path, steps: range = range(5), precision: str = "fp32"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was written: the memory timeline, and the events of the trace."""
    open_folder(folder)
    with one_rank(text, precision) as rank:
        run(rank, folder, steps)
        assert rank.world.labels.watch is None
        assert rank.world.comm.__class__.__name__ == "DistributedComm"
    assert sorted(p.name for p in folder.iterdir()) == ["rank-0-memory.json", "rank-0-memory.svg", "rank-0.json"]
    events = json.loads((folder / "rank-0.json").read_text())["traceEvents"]
    return json.loads((folder / "rank-0-memory.json").read_text()), events


def ranges(events: list[dict[str, Any]]) -> set[str]:
    return {e["name"] for e in events if e.get("cat") == "user_annotation"}


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("mb=2", "fp32"),
        ("mb=1", "fp32"),
        ("mb=2 recompute=full", "fp32"),
        ("mb=2 recompute=norm,act,core", "fp32"),
        ("mb=2", "bf16"),  # peaks in F: in B a CPU casts each weight gradient into a copy to add it
    ],
)
def test_the_peak_is_the_allocators_and_the_accounts_by_category(text: str, precision: str, tmp_path: Path) -> None:
    found, events = profile_of(text, tmp_path, precision=precision)
    (account,) = memory_of(small(precision), parse(text))
    peak = found["peak"]
    level, highest = 0, 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        level += event["args"]["Bytes"]
        highest = max(highest, level)
    before = sum(values[0] for values in found["bytes"].values())
    assert sum(peak["bytes"].values()) == peak["total_bytes"]
    assert abs(peak["total_bytes"] - (before + highest)) <= SCALARS
    mine = dict(peak["bytes"])
    mine["activations"] += mine.pop("workspace")
    for category, size in mine.items():
        assert abs(size - account.proved.get(category, 0)) <= SCALARS, category
    assert peak["range"][0] == account.action[0]


def test_the_written_timeline_has_the_peak_and_the_counters_are_the_same(tmp_path: Path) -> None:
    found, events = profile_of("mb=2", tmp_path)
    totals = [sum(row) for row in zip(*found["bytes"].values(), strict=True)]
    assert found["categories"] == list(found["bytes"]) == list(CATEGORIES)
    assert max(totals) == found["peak"]["total_bytes"]
    assert found["times_us"][totals.index(max(totals))] == found["peak"]["time_us"]
    assert found["times_us"] == sorted(found["times_us"])
    assert min(map(min, found["bytes"].values())) == 0
    counters = [e for e in events if e.get("ph") == "C" and e["name"] == "memory, bytes"]
    first = next(e["ts"] for e in events if e.get("name") == "step 2" and e.get("cat") == "user_annotation")
    assert [sum(e["args"].values()) for e in counters] == totals
    assert counters[0]["ts"] == pytest.approx(first, abs=1e-2)


def test_the_ranges_name_the_schedule(tmp_path: Path) -> None:
    found, events = profile_of("mb=2", tmp_path)
    assert [step["name"] for step in found["steps"]] == ["step 2", "step 3", "step 4"]
    units = "embedding", "layers.0", "layers.1", "layers.2", "head"
    wanted = {f"{op} {unit} #{mb}" for op in "FB" for unit in units for mb in range(2)}
    wanted |= {"step 2", "step 3", "step 4", "optimizer step", "norm clip", "count loss", "data"}
    wanted |= {f"gather {unit}" for unit in units}
    assert wanted <= ranges(events)
    recomputed = profile_of("mb=2 recompute=full", tmp_path)[1]
    assert "recompute layers.1 #0" in ranges(recomputed)


@pytest.mark.parametrize(("steps", "names"), [(range(1), ["step 1"]), (range(7, 9), ["step 9"])])
def test_a_short_run_has_what_there_is(steps: range, names: list[str], tmp_path: Path) -> None:
    found, _ = profile_of("mb=2", tmp_path, steps)
    assert [step["name"] for step in found["steps"]] == names


def test_a_failed_run_leaves_what_it_recorded(tmp_path: Path) -> None:
    with one_rank("mb=2") as rank, pytest.raises(ArithmeticError):
        run(rank, tmp_path, range(5), fails_at=2)
    found = json.loads((tmp_path / "rank-0-memory.json").read_text())
    assert [step["name"] for step in found["steps"]] == ["step 2", "step 3"]


def test_a_run_that_fails_before_anything_is_recorded_leaves_nothing(tmp_path: Path) -> None:
    with one_rank("mb=2") as rank, pytest.raises(ArithmeticError):
        run(rank, tmp_path, range(5), fails_at=0)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_said_and_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "rank-0-memory.json").mkdir()
    with (
        one_rank("mb=2") as rank,
        pytest.raises(ProfileFailed, match=r"rank-0-memory\.json.*: Is a directory") as caught,
    ):
        run(rank, tmp_path, range(2))
    assert caught.value.kind == "io"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank-0-memory.json", "rank-0.json"]


def test_an_earlier_profile_goes_and_other_files_stay(tmp_path: Path) -> None:
    for name in ("rank-12-memory.svg", "rank-3.json", "rank-x.json", "rank-3.json.gz", "notes.txt"):
        (tmp_path / name).touch()
    open_folder(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "rank-3.json.gz", "rank-x.json"]


@pytest.mark.parametrize("text", ["tp=2 pp=2", "pp=4 schedule=zb-v", "dp=4 zero=1", "dp=2 pp=2 zero=3", "dp=4 zero=2"])
def test_the_categories_are_the_accounts_parts(text: str) -> None:
    work = job(tiny(8), "4xcpu", batch=64)
    parts = {name for of in memory_of(work, parse(f"{text} mb=1")) for name in of.proved}
    assert parts <= set(CATEGORIES)


# On made-up traces ----------------------------------------------------------------------------------------------------

STEP, F, B = Meaning("step"), Meaning("F", "layers.0", 0), Meaning("B", "layers.0", 0)
Made = tuple[str, float, float]


def span(name: str, start: float, end: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": end - start}


def memory(time: float, address: int, size: int, device: tuple[int, int] = CPU, total: int = 0) -> dict[str, Any]:
    where = {"Device Type": device[0], "Device Id": device[1]}
    return {"name": "[memory]", "ts": time, "args": {"Addr": address, "Bytes": size, "Total Allocated": total} | where}


def at(found: timeline.Timeline, time: float) -> dict[str, int]:
    """What is held at a time, by category."""
    place = max(i for i, t in enumerate(found.times_us) if t <= time)
    return {name: values[place] for name, values in found.bytes_by_category.items() if values[place]}


def test_what_outlives_its_action_is_an_activation_and_the_rest_workspace() -> None:
    events = [span("step 1", 0, 100), span("F", 10, 20), span("B", 30, 40)]
    events += [memory(11, 1, 5), memory(12, 2, 7), memory(13, 2, -7), memory(32, 1, -5)]
    found = timeline.read(events, {"step 1": STEP, "F": F, "B": B}, {9: ("parameters", 100)})
    assert at(found, 12.5) == {"parameters": 100, "activations": 5, "workspace": 7}
    assert at(found, 25) == {"parameters": 100, "activations": 5}
    assert at(found, 99) == {"parameters": 100}
    assert found.peak == (12, dict.fromkeys(CATEGORIES, 0) | {"parameters": 100, "activations": 5, "workspace": 7}, "F")


def test_a_message_is_a_buffer_until_it_is_taken_and_a_result_once_its_action_is_over() -> None:
    meanings = {"step 1": STEP, "F": F, "recv": Meaning("recv", "stages.0", 0), "settle": Meaning("settle", "stages")}
    meanings["arrive"] = Meaning("arrive", "stages.0", 0)
    events = [span("step 1", 0, 100), span("recv", 1, 3), span("F", 10, 20), span("arrive", 11, 12)]
    events += [span("settle", 50, 60), memory(2, 1, 5), memory(15, 2, 7), memory(55, 2, -7), memory(70, 1, -5)]
    found = timeline.read(events, meanings, {})
    assert [at(found, t) for t in (5, 16, 30, 56, 71)] == [
        {"pipeline buffers": 5},
        {"activations": 12},
        {"activations": 5, "pipeline buffers": 7},
        {"activations": 5},
        {},
    ]


def test_what_goes_unseen_goes_with_its_range_but_not_in_a_step_that_broke_off() -> None:
    events = [span("step 1", 0, 100), span("F", 10, 20), memory(11, 1, 5)]
    meanings = {"step 1": STEP, "F": F}
    assert at(timeline.read(events, meanings, {}), 50) == {}
    assert at(timeline.read(events, meanings, {}, broken=True), 50) == {"activations": 5}


def test_of_several_devices_one_is_read_and_what_is_unknown_of_it_is_other() -> None:
    events = [span("step 1", 0, 100), span("F", 10, 20), memory(11, 1, 5), memory(12, 1, 8, (1, 0), 9)]
    events += [memory(13, 2, 64, (1, 1), 1000), memory(14, 3, -30, (1, 1), 970)]
    found = timeline.read(events, {"step 1": STEP, "F": F}, {3: ("parameters", 30)}, (1, 1))
    assert at(found, 1) == {"parameters": 30, "other": 906}
    assert at(found, 13.5) == {"parameters": 30, "other": 906, "workspace": 64}
    assert at(found, 15) == {"other": 906, "workspace": 64}


def test_a_long_timeline_is_thinned_and_keeps_its_peak() -> None:
    events = [span("step 1", 0, 1e5)]
    for i in range(20_000):
        size = 1000 if i == 12_345 else 1 + i % 7
        events += [memory(5 * i + 1, i, size), memory(5 * i + 2, i, -size)]
    found = timeline.read(events, {"step 1": STEP}, {})
    assert len(found.times_us) <= 3 * timeline.BUCKETS + 2
    assert at(found, 5 * 12_345 + 1.5) == {"workspace": 1000}


def test_the_picture_is_whole_and_says_its_peak() -> None:
    events = [span("step <1>", 0, 100), span("F", 10, 20), memory(11, 1, 3 << 20), memory(32, 1, -3 << 20)]
    found = timeline.read(events, {"step <1>": STEP, "F": F}, {9: ("parameters", 5 << 20)})
    drawn = ElementTree.fromstring(view.picture(found, "rank 0 & more"))
    said = ["".join(e.itertext()) for e in drawn.iter() if e.tag.endswith("text")]
    assert {"peak 8.0 MiB in F", "step <1>", "Memory by category: rank 0 & more"} <= set(said)
    assert {"parameters", "activations", "total"} <= set(said)
    assert "optimizer" not in said
    assert len([e for e in drawn.iter() if e.tag.endswith("path")]) == 2
