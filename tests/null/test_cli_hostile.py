"""What others write and type: whatever it is, the commands answer, refuse it with the field, or say that nothing fits.

Mutated configs run in one child process under limits, as a program would that asks again and again; some in a process
of their own, as a shell would. CPU seconds are held to the bound, not the clock: the machine may be busy. Both children
are started afresh, because Linux counts into a process's peak what its parent held when it started it.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from shardwise.cli import app

RUNS = 2000
PROCESSES = 50
USUAL_CPU_S, MAX_CPU_S = 1.0, 2.0
"""What nearly every command keeps to, and what each one does: a neighbour on the same core slows it."""

MAX_RSS_BYTES = 300 << 20
MAX_ADDRESSES = 4 << 30

CODES = (0, 2, 3)
SEED = 20261130

# ------------------------------------------------------------------------------------------------------- mutations

Config = dict[str, Any]
Random = random.Random

ABSURD: tuple[Any, ...] = (
    *(0, -1, -(2**63), 2**24, 2**31, 2**63, 10**18, 0.5, -0.0, 1e308, float("inf"), float("nan"), True, None),
    *("", "32", "x" * 5000, "\x1b[31mred", "\x00", "\u202e", [], [1] * 5000, {}, {"a": {"b": {}}}, [[[[]]]]),
)


def a_key(of: Config, draw: Random) -> str:
    return draw.choice(list(of))


def absurd(of: Config, draw: Random) -> Config:
    return {**of, a_key(of, draw): draw.choice(ABSURD)}


def off_by_some(of: Config, draw: Random) -> Config:
    """Sizes that do not divide any more."""
    sizes = [key for key, value in of.items() if type(value) is int and value]
    key = draw.choice(sizes)
    return {**of, key: draw.choice((of[key] + 1, of[key] - 1, of[key] * 7, of[key] // 2 or 1, 8191, 3))}


def dropped(of: Config, draw: Random) -> Config:
    gone = a_key(of, draw)
    return {key: value for key, value in of.items() if key != gone}


def renamed(of: Config, draw: Random) -> Config:
    old = a_key(of, draw)
    return {(key[::-1] if key == old else key): value for key, value in of.items()}


def other_family(of: Config, draw: Random) -> Config:
    return {**of, "model_type": draw.choice(("llama", "mixtral", "gpt2", "deepseek_v3", "bert", "", 7, None))}


def wide(of: Config, draw: Random) -> Config:
    return {**of, **{f"key{i}": draw.choice(ABSURD[:8]) for i in range(3000)}}


TREES: tuple[Callable[[Config, Random], Config], ...] = (
    *(absurd, absurd, absurd, off_by_some, off_by_some, dropped, renamed, other_family, wide),
)


def truncated(text: bytes, draw: Random) -> bytes:
    return text[: draw.randrange(len(text))]


def flipped(text: bytes, draw: Random) -> bytes:
    at = draw.randrange(len(text))
    return text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :]


def doubled_key(text: bytes, draw: Random) -> bytes:
    key = draw.choice(list(json.loads(text)))
    return text.rstrip()[:-1] + f', "{key}": 1}}'.encode()


def digits(text: bytes, draw: Random) -> bytes:
    """A number of 5,000 digits, which Python refuses to print."""
    numbers = [str(v) for v in json.loads(text).values() if type(v) is int]
    return text.replace(draw.choice(numbers).encode(), b"9" * 5000, 1)


def bomb(text: bytes, draw: Random) -> bytes:
    opening = draw.choice((b"[", b'{"a":', b"[{"))
    return opening * draw.choice((100, 5_000, 100_000)) + draw.choice((b"", text))


def encoded(text: bytes, draw: Random) -> bytes:
    return draw.choice((b"\xef\xbb\xbf" + text, text.decode().encode("utf-16"), b"\xff\xfe" + text, b"\x00" + text))


def trailed(text: bytes, draw: Random) -> bytes:
    return text + draw.choice((b"}", b"\x00" * 4096, b" " * 100_000, text, b"// comment"))


def emptied(text: bytes, draw: Random) -> bytes:
    return draw.choice((b"", b" \n", b"null", b"[]", b'"llama"', b"{}", b"7", b"NaN"))


BYTES: tuple[Callable[[bytes, Random], bytes], ...] = (
    *(truncated, flipped, flipped, doubled_key, digits, bomb, encoded, trailed, emptied),
)


def mutated(draw: Random) -> bytes:
    """A real config with one to three faults of the tree, or one of its bytes."""
    folder = resources.files("shardwise.model") / "catalog"
    files = sorted(f.name for f in folder.iterdir() if f.name.endswith(".json"))
    text = (folder / draw.choice(files)).read_bytes()
    if draw.random() < 0.4:
        return draw.choice(BYTES)(text, draw)
    config: Config = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        config = draw.choice(TREES)(config, draw)
    return json.dumps(config).encode()


def command(i: int, path: str) -> list[str]:
    """Mostly what is quick, so that there is time for many; every twentieth searches all layouts."""
    if i % 20 == 0:
        batch = ["--batch", "8"] if i % 40 else []
        return ["plan" if batch else "fit", path, "--on", "8xh100", *batch]
    if i % 10 < 4:
        return ["fit", path, "--on", "8xh100", "--seq", "2K", "--layout", "tp=2 dp=4 zero=3 mb=1"]
    return ["models", path]


# ----------------------------------------------------------------------------------------------------- one process


class Ran(NamedTuple):
    code: int
    cpu_s: float
    said: str


def run(words: Sequence[str]) -> Ran:
    started = time.process_time()
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "80"})
    return Ran(result.exit_code, time.process_time() - started, result.output)


def wrong(ran: Ran) -> str:
    """What is wrong with an answer; nothing where all is well."""
    if ran.code not in CODES or "Traceback" in ran.said:
        return f"exit code {ran.code}: {ran.said[-400:]}"
    if any(not c.isprintable() and c != "\n" for c in ran.said):
        return f"control characters: {ran.said[:200]!r}"
    if ran.code == 2 and len(ran.said) > 20_000:
        return f"{len(ran.said):,} characters of faults"
    return f"{ran.cpu_s:.2f} s" if ran.cpu_s > MAX_CPU_S else ""


def torture(folder: Path, runs: int) -> None:
    """The child: a line of JSON with what went wrong, and what it took."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESSES, MAX_ADDRESSES))
    draw, path = random.Random(SEED), folder / "config.json"
    run(["fit", "llama-3.1-8b", "--on", "8xh100"])  # imports, and what is read once
    faults: list[str] = []
    codes: dict[int, int] = dict.fromkeys(CODES, 0)
    seconds: list[float] = []
    for i in range(runs):
        path.write_bytes(content := mutated(draw))
        ran = run(command(i, str(path)))
        codes[ran.code] = codes.get(ran.code, 0) + 1
        seconds.append(ran.cpu_s)
        if fault := wrong(ran):
            faults.append(f"run {i}: {fault}; of {content[:200]!r}")
    slow = sum(s > USUAL_CPU_S for s in seconds)
    print(json.dumps({"faults": faults[:5], "codes": codes, "slow": slow, "rss_bytes": peak_rss_bytes()}))


def peak_rss_bytes() -> int:
    """Of this program alone: what `getrusage` says of a process also covers the one that it was forked from."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    assert found
    return int(found[1]) * 1024


def in_a_child(what: str, folder: Path, runs: int) -> dict[str, Any]:
    child = [sys.executable, __file__, what, str(folder), str(runs)]
    done = subprocess.run(child, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_mutated_configs_in_one_process(tmp_path: Path) -> None:
    found = in_a_child("torture", tmp_path, RUNS)
    assert found["faults"] == []
    assert found["slow"] <= RUNS // 200
    assert 0 < found["rss_bytes"] < MAX_RSS_BYTES
    # The mutations are no strangers to the commands: some are accepted, most refused.
    assert found["codes"]["0"] > RUNS // 20
    assert found["codes"]["2"] > RUNS // 2


def one_by_one(folder: Path, runs: int) -> None:
    """The child: each command in a process of its own; a line of JSON with what went wrong, and the largest of them."""
    draw, path = random.Random(SEED + 1), folder / "config.json"
    faults: list[str] = []
    rss = 0
    for i in range(runs):
        path.write_bytes(content := mutated(draw))
        words = command(i + 1, str(path))
        asked = [sys.executable, "-m", "shardwise", *words]
        with (folder / "said").open("w+") as said:
            child = subprocess.Popen(asked, stdout=said, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            fault = wrong(Ran(child.returncode, used.ru_utime + used.ru_stime, said.read()))
        if fault:
            faults.append(f"{words}: {fault}; of {content[:200]!r}")
        rss = max(rss, used.ru_maxrss * 1024)
    print(json.dumps({"faults": faults[:5], "rss_bytes": rss}))


def test_mutated_configs_in_processes_of_their_own(tmp_path: Path) -> None:
    found = in_a_child("one_by_one", tmp_path, PROCESSES)
    assert found["faults"] == []
    assert 0 < found["rss_bytes"] < MAX_RSS_BYTES


# ------------------------------------------------------------------------------------------------ places and flags


def refused(*words: str, code: int = 2) -> str:
    ran = run(words)
    assert ran.code == code, ran.said
    assert not wrong(ran._replace(cpu_s=0.0))
    return " ".join(ran.said.split())


@pytest.mark.parametrize("verb", ["models", "fit", "plan"])
def test_what_is_no_file_is_refused(verb: str, tmp_path: Path) -> None:
    options = {"models": (), "fit": ("--on", "8xh100"), "plan": ("--on", "8xh100", "--batch", "8")}[verb]
    empty = tmp_path / "empty"
    empty.mkdir()
    pipe, loop = tmp_path / "pipe.json", tmp_path / "loop.json"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path, said in ((empty, "config.json"), (pipe, "not a regular file"), (Path("/dev/zero"), "not a regular file")):
        assert said in refused(verb, str(path), *options)
    assert run((verb, str(loop), *options)).code in (2, 74)
    assert "no such file" in refused(verb, "x" * 200 + ".json", *options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seq", "0"), "--seq"),
        (("--seq", "-5"), "--seq"),
        (("--seq", "9" * 5000), "--seq"),
        (("--seq", "1G"), "--seq: found 1,073,741,824; wanted at most"),
        (("--batch", "-1"), "--batch"),
        (("--batch", "9" * 5000), "--batch"),
        (("--batch-tokens", "nan"), "--batch-tokens"),
        (("--batch-tokens", "1e99"), "--batch-tokens"),
        (("--batch-tokens", "100K"), "not whole sequences"),
        (("--imbalance", "nan"), "--imbalance: found nan"),
        (("--imbalance", "1e400"), "--imbalance: found inf"),
        (("--imbalance", "0.5"), "--imbalance: found 0.5"),
        (("--imbalance", "2"), "no routed experts"),
        (("--precision", "int" * 99), "--precision"),
        (("--stack", "megatorn"), "did you mean megatron"),
        (("--stack", "no.toml"), "no.toml: no such file"),
        (("--stack", "/dev/zero"), "not a regular file"),
        (("--on", "0x8xh100"), "at least 1"),
        (("--on", "999999999x8xh100"), "at most"),
        (("--on", "-1xh100"), "at least 1"),
        (("--on", "8xh100" * 1000), "--on"),
        (("--on", "64xC=nan,W=1,M=1"), "C is 'nan'"),
    ],
)
def test_absurd_options_are_refused_by_name(words: tuple[str, ...], said: str) -> None:
    batch = () if words[0].startswith("--batch") else ("--batch", "8")
    on = () if words[0] == "--on" else ("--on", "8xh100")
    assert said in refused("plan", "llama-3.1-8b", *on, *batch, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pin", "tp"), "wanted key=value"),
        (("--pin", "tp=0"), "wanted a whole number"),
        (("--pin", "tp=" + "9" * 5000), "wanted a whole number"),
        (("--pin", "tp=2", "--pin", "tp=4"), "pinned to 2 and to 4"),
        (("--pin", "fsdp=8"), "no such key"),
        (("--forbid", "zero=9"), "wanted one of"),
        (("--why-not", "tp=2 tp=4 mb=x"), "given twice"),
        (("--critical-batch", "many"), "--critical-batch"),
    ],
)
def test_absurd_limits_are_refused_by_name(words: tuple[str, ...], said: str) -> None:
    assert said in refused("plan", "llama-3.1-8b", "--on", "8xh100", "--batch", "8", *words)


def test_an_absurd_layout_is_refused_with_every_rule() -> None:
    words = ("show", "llama-3.1-8b", "--on", "8xh100", "--batch", "8", "--layout")
    assert "wanted a whole number" in refused(*words, "tp=99999999999999 mb=1")
    assert "no such key" in refused(*words, "\x1b[31m=1 mb=1")
    said = refused(*words, "tp=3 pp=7 dp=5 mb=11 zero=3 schedule=interleaved:9999")
    for rule in ("(world)", "(batch)", "(heads)", "(kv-heads)", "(ffn)", "(stages)"):
        assert rule in said


@pytest.mark.parametrize("cluster", ["7x8xh100", "7xh100", "3x5xh100", "5xv5e:3x3"])
def test_devices_that_do_not_factor_are_planned_or_told_why_not(cluster: str) -> None:
    ran = run(("plan", "qwen3-0.6b", "--on", cluster, "--batch", "64", "--seq", "2K"))
    assert ran.code in (0, 3), ran.said
    assert not wrong(ran._replace(cpu_s=0.0))
    assert ("Fastest" in ran.said) == (ran.code == 0)
    assert ("no layout is legal" in ran.said or "nothing fits" in ran.said) == (ran.code == 3)


def test_a_sequence_and_a_batch_that_cannot_be_cut() -> None:
    ran = run(("plan", "llama-3.1-8b", "--on", "8xh100", "--seq", "8191", "--batch", "7"))
    assert ran.code in (0, 3), ran.said
    assert not wrong(ran._replace(cpu_s=0.0))
    said = refused("show", "llama-3.1-8b", "--on", "8xh100", "--seq", "8191", "--layout", "cp=8 mb=1")
    assert "(context)" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("schedules", "zb-v", "--pp", "0"), "--pp"),
        (("schedules", "zb-v", "--pp", "9" * 50), "--pp"),
        (("schedules", "interleaved:9999", "--pp", "1024"), "--micro-batches"),
        (("schedules", "gpipe", "--micro-batches", "20000", "--pp", "1024"), "--micro-batches"),
        (("schedules", "dualpipe", "--pp", "3"), "must be even"),
        (("schedules", "\x1b[2J"), "unknown schedule"),
        (("schedules", "dualpipe", "--csv"), "use dualpipe-v"),
        (("clusters", "\x1b[2J"), "is not a cluster"),
        (("clusters", "no.toml"), "no such file"),
        (("models", ""), "MODEL: "),
        (("models", "gpt:L=" + "9" * 5000), "gpt:"),
        (("score", "no.csv"), "no.csv: no such file"),
        (("score", "/dev/zero"), "not a regular file"),
    ],
)
def test_absurd_listings_are_refused(words: tuple[str, ...], said: str) -> None:
    ran = run(words)
    assert ran.code in (2, 74), ran.said
    assert said in " ".join(ran.said.split())
    assert not any(not c.isprintable() and c != "\n" for c in ran.said)


if __name__ == "__main__":
    {"torture": torture, "one_by_one": one_by_one}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
