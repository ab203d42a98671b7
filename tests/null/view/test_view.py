"""Tables and sentences: they fit the width, add up, and say the same as the data for programs."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from shardwise import schedule as schedules
from shardwise.cluster import parse_cluster
from shardwise.collective import Collective, Key, Kind
from shardwise.plan.layout import parse
from shardwise.plan.plan import Plan
from shardwise.results import MemoryBreakdown, StepTime
from shardwise.search.solve import Candidate, SearchResult
from shardwise.units import GIB
from shardwise.view import chart, data, pages, proof, tables, training, words
from shardwise.view.review import Request, Review, bubble_s, communication_s, families, ledger_rows
from tests.support.models import job, tiny

LAYOUT = parse("tp=2 pp=4 dp_replicate=2 dp_shard=4 zero=1 schedule=zb-h1 mb=1 recompute=full")
JOB = job(tiny(), "8x8xh100", batch=64, precision="bf16")
ASKED = Request(JOB, LAYOUT, ("--seq 16",))


def text(of: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(of)
    return out.getvalue()


def step(seconds: float = 2.0) -> StepTime:
    parts = {"compute": 0.5, "recompute": 0.0, "tp communication": 0.1, "bubble": 0.3, "optimizer": 0.1}
    return StepTime({k: v * seconds for k, v in parts.items()}, 4096, 64, 1e15, 989e12, 8, 8)


def make_review(peak_GiB: float = 70.0) -> Review:
    schedule = schedules.build("zb-h1", 4, 8)
    timeline = schedules.walk(schedule.rows, schedule, lambda op, stage: 1.0)
    memory = [
        MemoryBreakdown(r, f"BW of stage {r}", {"parameters": GIB, "activations": 0}, {"context": GIB // 2})
        for r in range(4)
    ]
    memory[2] = MemoryBreakdown(2, "F of stage 2", {"activations": round(peak_GiB * GIB)}, {})
    ledger = Counter(
        {
            Collective(Key("layers.0.mlp.down", "B", "tp"), Kind.ALL_GATHER, (0, 1), 2**20, "bfloat16"): 8,
            Collective(Key("layers.1.mlp.down", "B", "tp"), Kind.ALL_GATHER, (0, 1), 2**20, "bfloat16"): 8,
            Collective(Key("clip", "norm", "pp+dp_shard+tp"), Kind.ALL_REDUCE, tuple(range(64)), 4, "float32"): 1,
            Collective(Key("stages.0", "send", "pp"), Kind.SEND, (0, 16), 2**19, "bfloat16"): 8,
        }
    )
    return Review(JOB, LAYOUT, memory, step(), 5e9, 0, ledger, schedule, timeline)


def candidate(seconds: float, peak_GiB: float = 70.0) -> Candidate:
    return Candidate(LAYOUT, step(seconds), round(peak_GiB * GIB), JOB.cluster.device.usable_bytes)


FOUND = SearchResult(26_230, 17_630, 4_802, tuple(candidate(s) for s in range(1, 11)), None, 26, 0.5)


@pytest.mark.parametrize("width", [80, 120])
def test_pages_fit_their_width(width: int) -> None:
    over = replace(make_review(90.0), remedies=(candidate(1.0),))
    for page in (
        pages.show(ASKED, make_review(), width),
        pages.show(ASKED, over, width),
        pages.fit(ASKED, make_review(), FOUND, width),
        pages.plan(ASKED, FOUND, "some/folder/plan.toml", width),
    ):
        said = text(page, width)
        assert max(map(len, said.splitlines())) <= width
        assert "…" not in said


@pytest.mark.parametrize(
    ("peak_GiB", "said"),
    [
        (70.0, "fits with 9.2 GiB (12 %) of 79.2 GiB to spare"),
        (78.0, "fits with 1.2 GiB (1.5 %) of 79.2 GiB to spare, which is thin"),
        (79.2 + 12.3, "does not fit: 12.3 GiB over 79.2 GiB"),
        (79.2 + 0.01, "does not fit: 10.2 MiB over 79.2 GiB"),
    ],
)
def test_the_verdict_gives_the_headroom(peak_GiB: float, said: str) -> None:
    verdict = words.verdict(make_review(peak_GiB))
    assert verdict.startswith(said)
    assert verdict.endswith("fullest is pipeline rank 2, in the forward of stage 2")


def test_a_layout_that_does_not_fit_comes_with_remedies() -> None:
    over = make_review(90.0)
    assert "No single change" in text(pages.show(ASKED, over, 80))
    assert "One change makes it fit" in text(pages.show(ASKED, replace(over, remedies=(candidate(1.0),)), 80))
    assert "change" not in text(pages.show(ASKED, make_review(), 80))


def test_nothing_fits_is_said_with_the_closest() -> None:
    nothing = replace(FOUND, best=(), fitting=0, closest=candidate(1.0, 80.2))
    for page in (pages.plan(ASKED, nothing, None, 80), pages.fit(ASKED, None, nothing, 80)):
        assert "nothing fits: the closest is 1.0 GiB over 79.2 GiB" in text(page)
    assert "no layout is legal" in words.nothing_fits(replace(nothing, closest=None))


def test_a_thin_winner_comes_with_the_fastest_that_has_room() -> None:
    thin = replace(FOUND, best=(candidate(1.0, 79.0), candidate(2.0, 78.0), candidate(3.0, 60.0)))
    assert [title.partition(":")[0] for title, _ in words.best(FOUND)] == ["Fastest"]
    (first, why), (other, margin) = words.best(thin)
    assert (first.partition(":")[0], other.partition(":")[0]) == ("Fastest", "Fastest with 5 % to spare")
    assert "thin" in why
    assert "thin" not in margin
    assert "3.00 s a step" in margin
    said = " ".join(text(pages.plan(ASKED, thin, "p.toml", 80)).split())
    assert f'shardwise show p.toml --layout "{LAYOUT}" -o p.toml' in said
    none = replace(FOUND, best=thin.best[:2])
    assert words.best(none)[1][0] == "None of the 2 fastest has 5 % to spare"
    assert "with room" not in text(pages.plan(ASKED, none, "p.toml", 80))


def twins() -> tuple[Candidate, ...]:
    """Two families: the second of the first differs in how dp parts, the last in recompute too."""
    a = candidate(1.0)
    b = replace(candidate(2.0), layout=replace(LAYOUT, dp_replicate=4, dp_shard=2))
    c = replace(candidate(3.0), layout=replace(LAYOUT, dp_replicate=1, dp_shard=8, recompute="none"))
    return a, b, c


def test_twins_are_folded_for_people_and_kept_for_programs() -> None:
    a, b, c = twins()
    assert families((a, b, c)) == [(a, 1), (c, 0)]
    found = replace(FOUND, best=(a, b, c))
    said = " ".join(text(pages.plan(ASKED, found, None, 80)).split())
    assert "folded, as they differ in dp_replicate x dp_shard alone: 1 like #1 (--json has them)" in said
    assert "dp_replicate=4" not in said
    assert len(data.plan(ASKED, found, None)["best"]) == 3
    assert "folded" not in text(pages.plan(ASKED, replace(FOUND, best=(a, c)), None, 80))


def test_the_ledger_is_summed_over_modules() -> None:
    rows = ledger_rows(make_review().ledger, JOB.cluster)
    assert [row.axis for row in rows] == ["tp", "pp", "pp+dp_shard+tp"]
    assert (rows[0].issued, rows[0].payload_bytes, rows[0].link) == (16, 2**24, "nvlink")
    assert (rows[1].link, rows[2].ranks) == ("infiniband", 64)
    said = text(tables.ledger(make_review()))
    assert rows[0].travels == "activation gradients, saved inputs"
    assert "16.0 MiB" in said


def test_links_follow_the_nodes() -> None:
    cluster = parse_cluster("2x8xh100")
    for ranks, link in (((0, 7), "nvlink"), ((8, 15), "nvlink"), ((7, 8), "infiniband")):
        entry = Collective(Key("x", "F", "tp"), Kind.ALL_REDUCE, ranks, 8, "bfloat16")
        (row,) = ledger_rows(Counter({entry: 1}), cluster)
        assert row.link == link


def test_the_parts_of_a_step_add_up() -> None:
    assert bubble_s(step()) == pytest.approx(0.6)
    assert communication_s(step()) == pytest.approx(0.2)
    said = text(tables.step_parts(step()))
    assert "recompute" not in said  # it takes no time
    assert "2.00 s" in said


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.integers(5, 60))
def test_bars_fill_the_width_together(values: list[float], width: int) -> None:
    bars = chart.waterfall(values, width)
    assert all(len(bar) <= width for bar in bars)
    assert sum(bar.count("█") for bar in bars) == (width if sum(values) > 0 else 0)


@given(st.integers(1, 300), st.integers(2, 20))
def test_picked_ranks_hold_both_ends(count: int, most: int) -> None:
    picked = chart.pick(count, most)
    assert len(picked) <= most
    assert picked[0] == 0
    assert picked[-1] == count - 1


def drawn(name: str, pp: int, m: int, width: int = 80) -> tuple[schedules.Timeline, list[str]]:
    schedule = schedules.build(name, pp, m)
    timeline = schedules.walk(schedules.add_p2p(schedule), schedule, lambda op, stage: 1.0 + (op == "BW"), 0.1)
    return timeline, text(chart.pipeline(timeline, width), width).splitlines()


def rows_of(lines: list[str]) -> dict[str, str]:
    """Each rank's row, its bands joined."""
    rows: dict[str, str] = {}
    for line in lines:
        if line.startswith("rank "):
            _, rank, cells = line.split(maxsplit=2)
            rows[rank] = rows.get(rank, "") + cells
    return rows


CASES = [("1f1b", 4, 8), ("zb-h1", 4, 8), ("interleaved:2", 4, 8), ("interleaved:8", 4, 16), ("gpipe", 2, 1)]


@pytest.mark.parametrize(("name", "pp", "m"), CASES)
@pytest.mark.parametrize("width", [80, 120])
def test_the_pipeline_is_drawn_to_scale(name: str, pp: int, m: int, width: int) -> None:
    timeline, said = drawn(name, pp, m, width)
    assert {len(line) for line in said if line.startswith("rank ")} == {width}
    assert len(said) <= chart.MAX_LINES + 2
    rows = rows_of(said)
    assert len(rows) == pp
    for rank, row in enumerate(rows.values()):
        busy = sum(c != chart.IDLE for c in row) / len(row)
        assert busy == pytest.approx(timeline.busy_s[rank] / timeline.span_s, abs=0.03)
    assert ("W weight gradient" in "".join(said)) == (name == "zb-h1")
    idle = max(timeline.idle_s) / timeline.span_s
    assert f"{100 * idle:.1f} % of the time" in said[-1]


@pytest.mark.parametrize(("name", "pp", "m"), [case for case in CASES if case[0] != "interleaved:8"])
def test_a_picture_with_room_names_every_action_once(name: str, pp: int, m: int) -> None:
    rows = rows_of(drawn(name, pp, m)[1])
    chunks = 2 if name == "interleaved:2" else 1
    ops = "FBW" if name == "zb-h1" else "FB"
    for row in rows.values():
        found = Counter(re.findall(r"[FBW][0-9]", row))  # between two bands the chunk's letter may be cut off
        assert found == {f"{op}{i}": chunks for op in ops for i in range(m)}


def test_a_long_step_is_drawn_at_its_ends_and_says_so() -> None:
    for name, pp, m in (("1f1b", 4, 256), ("interleaved:2", 32, 64)):
        _, said = drawn(name, pp, m)
        assert sum("what lies between is not drawn" in line for line in said) == 1
        assert len(said) <= chart.MAX_LINES + 2
        assert any("ranks shown" in line for line in said) == (pp > chart.MAX_ROWS)
        first = next(line for line in said if line.startswith("rank 0 ")).split()[2]
        assert first.startswith("FfFf")  # no action is too short for a column


def test_programs_get_the_same_content() -> None:
    of = make_review()
    found = json.loads(json.dumps(data.show(ASKED, of), allow_nan=False))
    assert found["verdict"] == words.verdict(of)
    assert found["assumed"] == ["--seq 16"]
    assert found["headroom_bytes"] == of.headroom_bytes
    assert sum(found["step"]["parts_s"].values()) == pytest.approx(found["step"]["step_s"])
    assert len(found["memory"]) == 4
    assert sum(row["payload_bytes"] for row in found["ledger"]["rows"]) == 2**24 + 2**22 + 4
    ranked = json.loads(json.dumps(data.plan(ASKED, FOUND, "plan.toml"), allow_nan=False))
    assert [row["step_s"] for row in ranked["best"]] == [pytest.approx(s) for s in range(1, 11)]
    assert data.fit(ASKED, None, replace(FOUND, best=()))["fits"] is False


def test_every_figure_names_its_convention() -> None:
    said = " ".join(text(pages.plan(ASKED, FOUND, None, 80)).split())
    for word in ("AdamW", "full training", "no recompute", "causal attention", "uncalibrated", "bf16", "--seq 16"):
        assert word in said
    assert "26,230 layouts enumerated, 17,630 legal, 4,802 fit" in said


COUNTS = [(820_480, "820,480"), (1_500_000, "1.50 M"), (8_030_261_248, "8.03 B"), (405_853_388_800, "405.9 B")]


@pytest.mark.parametrize(("count", "said"), COUNTS)
def test_parameters_are_short(count: int, said: str) -> None:
    assert words.format_parameters(count) == said


class FakeDifference(NamedTuple):
    module: str
    phase: str
    axis: str
    predicted: str
    recorded: str


@dataclass(frozen=True)
class FakeProof:
    found: tuple[FakeDifference, ...] = ()
    measured_peak_bytes: int = 10 * GIB
    rank: int = 3
    collectives: int = 3776
    predicted_peak_bytes: int = 10 * GIB
    executed: int = 4
    micro_batches: int = 16
    seconds: float = 1.5
    max_rss_bytes: int = GIB

    @property
    def ok(self) -> bool:
        return not self.found and self.measured_peak_bytes == self.predicted_peak_bytes

    def differences(self) -> list[FakeDifference]:
        return list(self.found)


def test_a_proof_says_equal_or_where_not() -> None:
    equal = text(proof.page(ASKED, [FakeProof()]))
    assert "rank 3: proved" in equal
    assert "to the byte" in equal
    rows = tuple(FakeDifference(f"layers.{i}.mlp.down", "B", "tp", "8 x all-gather", "nothing") for i in range(50))
    failed = FakeProof(rows, 9 * GIB)
    said = text(proof.page(ASKED, [FakeProof(), failed]))
    assert "NOT as planned" in said
    assert "differs at 50 places" in said
    assert "and 10 more" in said
    assert "1,073,741,824 bytes less than predicted" in said
    assert max(map(len, said.splitlines())) <= 80
    found = json.loads(json.dumps(proof.data("plan.toml", [FakeProof(), failed])))
    assert not found["ok"]
    assert [len(one["differences"]) for one in found["proofs"]] == [0, 50]


class FakeStep(NamedTuple):
    step: int
    steps: int
    loss: float
    norm: float
    tokens: int
    seconds: float


def test_training_is_told_step_by_step() -> None:
    done = [FakeStep(i, 12, 5.5 - i / 10, 1.25, 2048, 0.5) for i in range(1, 13)]
    lines = [training.step_line(one) for one in done]
    assert lines[0] == "step  1/12  loss 5.4000  gradient norm   1.250    500 ms  4,096 tokens/s"
    assert len({len(line) for line in lines}) == 1
    assert training.closing(done) == "loss 5.4000 -> 4.3000 over 24,576 tokens; median step 500 ms"
    assert json.loads(json.dumps(training.step_data(done[0])))["tokens"] == 2048
    opening = training.opening(Plan(JOB, LAYOUT))
    assert "64 ranks" in opening
    assert "AdamW" in opening
