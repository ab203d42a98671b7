"""`shardwise train` as people start it: its own ranks or torchrun's, and every way in which it can end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist.commands import ROOT, TORCHRUN, run, said, session_members, shardwise, started
from tests.dist.test_distributed import is_alive

TINY = ROOT / "examples" / "tiny.toml"

BROKEN_RANK = """
import os, signal, sys, time
from shardwise.cli import main
from shardwise.train import loop

how = sys.argv.pop(1)
step, ours = 0, loop.train_step
loop.TIMEOUT_S = 3.0 if how == "hang" else loop.TIMEOUT_S

def train_step(rank, *arguments):
    global step
    step += 1
    if step == 3 and rank.world.rank == rank.layout.world_size // 2:
        if how == "raise":
            raise ValueError("boom")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(1000)
    result = ours(rank, *arguments)
    if step == 3 and how == "not a number":
        result.loss.fill_(float("nan"))
    return result

loop.train_step = train_step
main()
"""

pytestmark = pytest.mark.dist


def plan_file(folder: Path, layout: str = "tp=2 pp=2 mb=4", **changes: str) -> Path:
    """The example with another layout on CPUs, and other values of some keys."""
    text = TINY.read_text().replace('"tp=2 pp=2 mb=4"', f'"{layout}"')
    for key, value in changes.items():
        text, n = re.subn(rf"^{key} = [^#\n]*", f"{key} = {value} ", text, flags=re.MULTILINE)
        assert n == 1
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def train(path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return shardwise("train", path, *words)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1)), "each step is told once"
    return [s["loss"] for s in steps]


# How it goes ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_starts_its_ranks_tells_every_step_and_learns() -> None:
    before = time.monotonic()
    lines: list[str] = []
    first_s = 0.0
    with started(sys.executable, "-m", "shardwise", "train", TINY, "--steps", 20) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            first_s = first_s or (time.monotonic() - before if line.startswith("step") else 0.0)
        assert process.wait(60) == 0
        assert not session_members(process.pid)
    assert first_s < 15
    told = [
        re.fullmatch(r"step +(\d+)/20  loss (\d+\.\d{4})  gradient norm .* tokens/s  .* [MG]iB  .*% MFU", line)
        for line in lines[4:24]
    ]
    assert [int(step[1]) for step in told if step] == list(range(1, 21))
    found = [float(step[2]) for step in told if step]
    assert 5.3 < found[0] < 5.9  # ln 256 = 5.545: it starts from knowing nothing
    assert max(found[-5:]) < found[0] - 2
    assert lines[24:] == [f"loss {found[0]:.4f} -> {found[-1]:.4f} over 40,960 tokens; median step " + lines[24][-6:]]


@pytest.mark.slow
def test_every_layout_and_launcher_trains_the_same_steps(tmp_path: Path) -> None:
    """One start, one order of data, one loss: float32 sums alone differ."""
    wanted = losses(train(TINY, "--steps", 2, "--json"))
    plan = plan_file(tmp_path, "dp=2 zero=3 mb=2", cluster='"2xcpu"')
    found = {"torchrun": losses(run(*TORCHRUN, 2, "-m", "shardwise", "train", plan, "--steps", 2, "--json"))}
    found["dp=4"] = losses(train(plan_file(tmp_path, "dp=4 zero=1 mb=1"), "--steps", 2, "--json"))
    found["one rank"] = losses(train(plan_file(tmp_path, "mb=16", cluster='"1xcpu"'), "--steps", 2, "--json"))
    for name, values in found.items():
        assert values == pytest.approx(wanted, abs=1e-5), name


# How it ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_another_world_than_the_plans_is_refused_by_rank_0_alone(rank: int, lines: int) -> None:
    """Nobody listens at the address: a process group would fail otherwise, or wait."""
    torchruns = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    done = shardwise("train", TINY, **torchruns)
    assert done.returncode == 2
    assert len(said(done)) == lines
    assert all("wants 4 ranks (tp 2 x pp 2 x dp 1), the launcher started 2" in line for line in said(done))
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_torchrun_with_another_world_shows_one_message() -> None:
    done = run(*TORCHRUN, 2, "-m", "shardwise", "train", TINY)
    assert done.returncode != 0
    assert [line.rpartition("wants ")[2] for line in said(done)] == [
        "4 ranks (tp 2 x pp 2 x dp 1), the launcher started 2"
    ]
    assert re.search(r"exitcode +: 2 ", done.stderr)


def test_a_plan_for_other_devices_or_for_several_machines_is_not_started(tmp_path: Path) -> None:
    for cluster, text in {"v5p:2x2x1": "ranks run on CPUs and on GPUs of", "2x2xcpu": "torchrun --nnodes 2"}.items():
        done = train(plan_file(tmp_path, cluster=f'"{cluster}"', precision='"bf16"'))
        assert done.returncode == 2
        assert len(said(done)) == 1
        assert text in said(done)[0]


@pytest.mark.parametrize(
    ("changes", "content", "message"),
    [
        ({}, "a" * 2048, "corpus: 2,048 bytes; one step takes 2,049: take a larger file, or a smaller"),
        ({}, "", "corpus: 0 bytes; one step takes 2,049"),
        ({}, None, "corpus: no such file"),
        ({"vocab_size": "255"}, "a" * 4096, "vocabulary of 255: byte-level text takes 256"),
    ],
    ids=["too small", "empty", "missing", "vocabulary"],
)
def test_bad_data_starts_no_rank(tmp_path: Path, changes: dict[str, str], content: str | None, message: str) -> None:
    corpus = tmp_path / "corpus"
    if content is not None:
        corpus.write_text(content)
    layout = "pp=4 mb=4"  # a vocabulary of 255 splits over no tensor-parallel ranks
    done = train(plan_file(tmp_path, layout, data=f'"{corpus}"', **changes))
    assert done.returncode == 2
    assert len(said(done)) == 1
    assert message in said(done)[0]
    assert "step" not in done.stdout.replace("a step", "")


def test_a_directory_is_no_data(tmp_path: Path) -> None:
    done = train(plan_file(tmp_path, data=f'"{tmp_path}"'))
    assert done.returncode == 2
    assert "not a regular file" in said(done)[0]


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "rank 2, step 3: ValueError: boom"),
        ("kill", "rank 2, step 3: killed by SIGKILL"),
        ("hang", r"rank [013], step 3: CommError: rank [013]: .* on (tp|pp) \(ranks .*\) failed: .*[Tt]imed out.*"),
        (
            "not a number",
            r"rank \d, step 3: NotFiniteError: loss nan, gradient norm .*: take a smaller learning_rate.*",
        ),
    ],
    ids=["raises", "is killed", "hangs", "is no number"],
)
def test_a_rank_that_fails_ends_all_and_is_named(how: str, cause: str) -> None:
    before = time.monotonic()
    done = shardwise(how, "train", TINY, "--steps", 10, code=BROKEN_RANK)
    assert time.monotonic() - before < 30
    assert done.returncode == 1
    assert re.fullmatch(cause, said(done)[0])
    assert sum(line.startswith("rank ") for line in said(done)) == 1, "its peers fail of it, and are not heard"
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step")] == ["1/10", "2/10"]


@pytest.mark.slow
def test_a_rank_that_fails_under_torchrun_speaks_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BROKEN_RANK)
    plan = plan_file(tmp_path, "dp=2 mb=4", cluster='"2xcpu"')
    before = time.monotonic()
    done = run(*TORCHRUN, 2, script, "raise", "train", plan, "--steps", 10)
    assert time.monotonic() - before < 45  # torchrun's own start included
    assert done.returncode != 0
    assert said(done)[0] == "rank 1, step 3: ValueError: boom"
    assert sum(line.startswith("rank ") for line in said(done)) == 1


@pytest.mark.parametrize(
    ("number", "code", "lines"), [(signal.SIGINT, 130, ["shardwise: interrupted"]), (signal.SIGTERM, 143, [])], ids=str
)
def test_ctrl_c_and_a_schedulers_word_end_all(
    number: signal.Signals, code: int, lines: list[str], tmp_path: Path
) -> None:
    """Ctrl-C goes to every process, SIGTERM to the one that was started; nothing is left of either."""
    words = sys.executable, "-m", "shardwise", "train", TINY, "--steps", 1000
    with started(*words, TMPDIR=str(tmp_path)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step"):
                break
        ranks = [pid for pid in session_members(process.pid) if pid != process.pid]
        assert len(ranks) == (4 if sys.platform == "linux" else 0)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == code
        assert err.splitlines() == lines
        assert not any(is_alive(pid) for pid in ranks)
    assert not list(tmp_path.glob("shardwise-*"))


def test_a_reader_that_leaves_ends_all_in_silence() -> None:
    """`shardwise train ... | head -5`"""
    with started(sys.executable, "-m", "shardwise", "train", TINY, "--steps", 1000) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(5):
            process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 74
        assert not session_members(process.pid)


# What it reads and writes ---------------------------------------------------------------------------------------------


def test_documents_a_tokenizer_metrics_and_traces(tmp_path: Path) -> None:
    from tests.torch.test_data import documents, word_tokenizer

    corpus, tokenizer = documents(tmp_path, *["one two three one"] * 2000), word_tokenizer(tmp_path, "</s>")
    plan = plan_file(tmp_path, "dp=2 mb=8", cluster='"2xcpu"', num_hidden_layers="1")
    traces, metrics = tmp_path / "traces", tmp_path / "metrics.jsonl"
    words = "--data", corpus, "--tokenizer", tokenizer, "--profile", traces, "--metrics", metrics
    found = losses(train(plan, "--steps", 4, "--json", "--warmup", 2, "--decay", "linear", *words))
    told = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["loss"] for step in told] == found
    assert [step["learning_rate"] for step in told] == pytest.approx([1.5e-3, 3e-3, 3e-3, 0])
    assert all(step["memory_bytes"] > 1 << 20 and 0 < step["mfu"] < 1 for step in told)
    written = sorted(path.name for path in traces.iterdir())
    assert written == [f"rank-{r}{end}" for r in range(2) for end in ("-memory.json", "-memory.svg", ".json")]
    names = {event.get("name", "") for event in json.loads((traces / "rank-1.json").read_text())["traceEvents"]}
    assert any("aten::mm" in name for name in names)
    assert any("all_reduce" in name for name in names)


def test_without_the_tokenizers_library_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['tokenizers'] = None; from shardwise.cli import main; main()"
    done = run(sys.executable, "-c", code, "train", TINY, "--tokenizer", tmp_path / "tokenizer.json")
    assert done.returncode == 5
    assert said(done) == ["this command needs tokenizers, which is not installed: pip install 'shardwise[train]'"]
