"""The commands: exit codes, every kind of bad input, both forms of an answer, and no torch where none is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

import shardwise
from shardwise import cli
from shardwise.plan.plan import load_plan

TINY = str(Path(__file__).parents[2] / "examples" / "tiny.toml")
FIT = ("fit", "llama-3.1-8b", "--on", "8xh100")
PLAN = ("plan", "llama-3.1-8b", "--on", "8xh100", "--batch", "8")
SHOW = ("show", "llama-3.1-8b", "--on", "8xh100", "--layout", "tp=2 dp=4 zero=3 mb=2")
TOO_BIG = ("show", "llama-3.1-70b", "--on", "8xh100", "--layout", "tp=8 mb=1")


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "80"})


def refused(*words: str, code: int = 2) -> str:
    """What is said on stderr; there is no traceback and nothing on stdout."""
    result = run(*words)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_fit_answers_for_the_best_layout_and_says_what_it_assumed() -> None:
    result = run(*FIT)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "65,536 tokens = 8 sequences of 8,192 a step" in said
    assert result.stdout.startswith("yes: fits with ")
    for words in ("fits with", "--seq 8192; --batch 8", "AdamW", "layouts enumerated", "(assumed)"):
        assert words in said


def test_plan_ranks_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    result = run(*PLAN, "-o", str(path))
    assert result.exit_code == 0, result.output
    plan = load_plan(path)
    assert f"Fastest: {plan.layout}" in result.stdout
    assert plan.results is not None
    assert plan.results["capacity_GiB"] == pytest.approx(79.2)
    shown = run("show", str(path))
    assert shown.exit_code == 0
    assert f"layout: {plan.layout}" in shown.stdout


def test_show_writes_another_layout_as_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    result = run("show", TINY, "--layout", "dp=4 zero=3 mb=4", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert "Written to" in result.stdout
    written = load_plan(path)
    assert (written.job, str(written.layout)) == (load_plan(TINY).job, "dp=4 zero=3 mb=4")
    assert written.results is not None
    assert json.loads(run("show", str(path), "-o", str(path), "--json").stdout)["written"] == str(path)


def test_a_step_of_very_many_micro_batches_is_drawn_with_fewer() -> None:
    words = ("show", "llama-3.1-8b", "--on", "8xh100", "--layout", "pp=8 zero=0 mb=1", "--batch", "4096")
    said = run(*words).stdout
    assert "4,096 micro-batches, drawn as if there were 64" in " ".join(said.split())
    assert "drawn as if" not in run(*words[:-1], "64").stdout
    found = json.loads(run(*words, "--json").stdout)["pipeline"]
    assert (found["micro_batches"], found["drawn_micro_batches"]) == (4096, 64)


def test_the_length_of_a_sequence_is_a_count_of_tokens() -> None:
    assert "16 sequences of 4,096" in run(*FIT, "--seq", "4K", "--batch-tokens", "64K").stdout


def test_names_of_files_send_no_control_codes(tmp_path: Path) -> None:
    said = refused("show", str(tmp_path / "\x1b[31mno.toml"))
    assert "\x1b" not in said
    assert "\\x1b[31mno.toml: no such file" in said


def test_show_explains_what_fits_and_what_does_not() -> None:
    result = run(*SHOW)
    assert result.exit_code == 0, result.output
    assert "fits with" in result.stdout
    over = run(*TOO_BIG)
    assert over.exit_code == 0
    assert "does not fit: " in over.stdout
    assert "change" in over.stdout


def test_show_and_fit_take_a_plan_and_another_layout() -> None:
    assert "layout: tp=2 pp=2 mb=4" in run("show", TINY).stdout
    assert "layout: dp=4 zero=3 mb=4" in run("fit", TINY, "--layout", "dp=4 zero=3 mb=4").stdout


@pytest.mark.parametrize("words", [FIT, PLAN, SHOW, TOO_BIG, ("show", TINY), ("fit", TINY)])
def test_nothing_is_wider_than_the_terminal(words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_narrow_terminal_loses_no_column() -> None:
    result = CliRunner().invoke(cli.app, list(PLAN), env={"COLUMNS": "30"})
    assert "tp=2" in result.stdout
    assert "…" not in result.stdout


@pytest.mark.parametrize("words", [FIT, PLAN, SHOW, TOO_BIG, ("show", TINY)])
def test_json_is_json(words: tuple[str, ...]) -> None:
    result = run(*words, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["optimizer"] == "adamw"
    assert found["mfu_convention"]


@pytest.mark.parametrize("verb", ["fit", "plan"])
def test_nothing_fits_is_exit_3(verb: str) -> None:
    words = (verb, "llama-3.1-405b", "--on", "8xh100", "--batch", "8")
    result = run(*words)
    assert result.exit_code == 3
    assert "nothing fits: the closest is" in result.stdout
    found = run(*words, "--json")
    assert found.exit_code == 3
    assert json.loads(found.stdout)


def test_a_given_layout_that_does_not_fit_is_exit_3_of_fit_alone() -> None:
    assert run("fit", *TOO_BIG[1:]).exit_code == 3


def test_all_faults_are_said_at_once() -> None:
    said = refused("show", "llama-9", "--on", "8xb100", "--batch-tokens", "x", "--layout", "q=1", "--precision", "int1")
    for words in ("llama-9", "did you mean", "--batch-tokens", "'q': no such key", "mb=", "--precision"):
        assert words in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fit", "no-such-model", "--on", "8xh100"), "llama-3.1-70b"),
        (("fit", "llama-3.1-8b"), "--on: missing"),
        (("fit", "llama-3.1-8b", "--on", "h100x8"), "did you mean 8xh100?"),
        (("fit", "llama-3.1-8b", "--on", "16xh100"), "did you mean 2x8xh100?"),
        (("fit", "llama-3.1-8b", "--on", "no.toml"), "no.toml: no such file"),
        (("fit", "llama-3.1-8b", "--on", "8xh100", "--precision", "fp64"), "has no float64"),
        (("plan", "llama-3.1-8b", "--on", "8xh100"), "--batch-tokens or --batch: missing"),
        ((*PLAN, "--batch-tokens", "1M"), "refused beside --batch-tokens"),
        (("plan", TINY, "--batch", "8"), "a plan already"),
        (("show", "llama-3.1-8b", "--on", "8xh100"), "--layout: missing"),
        (("show", TINY, "--seq", "4096"), "--seq: refused beside"),
        (("show", TINY, "--rank", "4"), "wanted a rank from 0 to 3"),
        (("show", TINY, "-o", "plan"), "wanted a file whose name ends in .toml"),
        ((*PLAN, "-o", ""), "wanted a file whose name ends in .toml"),
        (("fit", "llama3.1-70B", "--on", "8xh100"), "did you mean llama-3.1-70b?"),
        (("fit", "", "--on", "8xh100"), "MODEL: "),
        (("fit", "llama-3.1-8b", "--on", "8xh100", "--seq", "8k5"), "--seq: '8k5' is not a token count"),
        (("fit", "llama-3.1-8b", "--on", "8xh100", "--seq", "1G"), "--seq: found 1,073,741,824; wanted at most"),
        (("show", TINY, "--mfu", "best"), "wanted one of exact, megatron"),
        (("show", TINY, "--stack", "megatron"), "--stack: refused beside"),
        (("prove", TINY, "--rank", "0,9,last,x"), "found '9'"),
        (("prove", "llama-3.1-8b"), "no such file"),
        (("train", "no.toml"), "no such file"),
    ],
)
def test_bad_input_is_exit_2(words: tuple[str, ...], said: str) -> None:
    assert said in refused(*words)


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest() -> None:
    said = refused("plan", "llama-3.1-8b", "--on", "8xh100", "--seq", "3000", "--batch-tokens", "1M")
    assert "try 1,047,000 or 1,050,000" in said


def test_an_illegal_layout_is_refused_with_every_rule() -> None:
    said = refused("show", "llama-3.1-8b", "--on", "8xh100", "--layout", "tp=3 dp=2 mb=3", "--batch", "8")
    for rule in ("(world)", "(batch)", "(heads)", "(kv-heads)", "(ffn)"):
        assert rule in said


def test_files_that_are_no_plans_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path, said in ((folder, "a directory"), (binary, "not UTF-8")):
        for verb in ("show", "fit", "prove", "train"):
            assert said in refused(verb, str(path))


@pytest.mark.parametrize("words", [("fit",), ("fit", "x", "--sequence", "1"), ("fit", "x", "--seq", "0"), ("solve",)])
def test_what_cannot_be_parsed_is_exit_2(words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 2


def test_output_that_cannot_be_written_is_exit_74(tmp_path: Path) -> None:
    said = refused(*PLAN, "-o", str(tmp_path / "no" / "plan.toml"), code=74)
    assert "No such file or directory" in said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ZeroDivisionError("odd\nthing"), 1, "ZeroDivisionError: odd thing"),
        (ModuleNotFoundError("no torch", name="torch._C"), 5, "pip install 'shardwise[train]'"),
        (ModuleNotFoundError("no such", name="shardwise.nothing"), 1, "--debug"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "plan.toml"), 74, "plan.toml: No space left"),
    ],
)
def test_other_failures_have_their_codes(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "review", broken)
    assert said in refused(*SHOW, code=code)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(cli, "review", broken)
    assert isinstance(run(*SHOW, "--debug").exception, ZeroDivisionError)


def test_ranks_are_numbers_or_names() -> None:
    assert cli.read_ranks(["first,last", "5", "middle", "0"], 16) == [0, 15, 5, 8]


LISTINGS = (("models",), ("models", "mixtral-8x7b"), ("clusters",), ("schedules", "zb-v"), ("rules",))


@pytest.mark.parametrize("words", [FIT, PLAN, SHOW, *LISTINGS, ("--version",), ("plan", "--help")])
def test_these_commands_never_load_torch(words: tuple[str, ...]) -> None:
    code = "import sys; from shardwise.cli import app; app(standalone_mode=False); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_is_no_failure_of_ours() -> None:
    command = f"{sys.executable} -m shardwise show {TINY} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "74")


def test_public_names() -> None:
    assert set(shardwise.__all__) == {
        "Model",
        "Cluster",
        "Job",
        "Layout",
        "Plan",
        "load_model",
        "parse_cluster",
        "parse_layout",
        "load_plan",
        "findings",
        "load_stack",
        "under",
        "memory_of",
        "predict_ledger",
        "step_time",
        "solve",
        "explain",
        "why_not",
        "prove_rank",
        "fsdp",
        "ddp",
        "zero1",
        "__version__",
    }
    assert dir(shardwise) == sorted(shardwise.__all__)
    for name in set(shardwise.__all__) - {"prove_rank", "fsdp", "ddp", "zero1", "__version__"}:
        assert getattr(shardwise, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = shardwise.plans


@pytest.mark.parametrize("verb", ["prove", "train"])
def test_without_torch_the_extra_is_named(verb: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from shardwise.cli import main; main()"
    command = [sys.executable, "-c", code, verb, TINY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 5
    assert "pip install 'shardwise[train]'" in done.stderr
    assert "Traceback" not in done.stderr


class FakeProof(SimpleNamespace):
    """Stands for `prove.compare.Proof`, whose module needs torch."""

    def differences(self) -> list[SimpleNamespace]:
        row = {"module": "layers.0.mlp.down", "phase": "B", "axis": "tp", "predicted": "1 x all-gather"}
        return [] if self.ok else [SimpleNamespace(**row, recorded="nothing")]


@pytest.mark.parametrize(("equal", "code"), [(True, 0), (False, 4)])
def test_a_proof_that_fails_is_exit_4_with_the_module(monkeypatch: pytest.MonkeyPatch, equal: bool, code: int) -> None:
    def prove_rank(*_: object, **__: object) -> FakeProof:
        numbers = {"rank": 3, "collectives": 7, "executed": 4, "micro_batches": 4, "seconds": 1.0, "max_rss_bytes": 1}
        return FakeProof(ok=equal, predicted_peak_bytes=10, measured_peak_bytes=10, **numbers)

    monkeypatch.setitem(sys.modules, "shardwise.prove.dryrun", SimpleNamespace(prove_rank=prove_rank))
    result = run("prove", TINY, "--rank", "last")
    assert result.exit_code == code, result.output
    assert ("layers.0.mlp.down" in result.stdout) != equal
    assert json.loads(run("prove", TINY, "--rank", "0,3", "--json").stdout)["ok"] == equal
