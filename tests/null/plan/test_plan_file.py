"""Plan files: they read back as written, and whatever else comes is refused with all that is wrong."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from shardwise.model.hf import catalog, load_model
from shardwise.plan.layout import Layout
from shardwise.plan.layout import parse as parse_layout
from shardwise.plan.plan import (
    MAX_FILE_BYTES,
    Plan,
    PlanError,
    TrainSettings,
    load_cluster,
    load_plan,
    parse_plan,
    to_toml,
    write,
)
from shardwise.plan.table import MAX_UNKNOWN
from tests.support.models import job, tiny

TINY_FILE = Path(__file__).parents[3] / "examples" / "tiny.toml"


def make_plan() -> Plan:
    layout = parse_layout("tp=2 pp=2 dp=2 zero=1 schedule=interleaved:2 mb=1")
    results = {"step_s": 1.5, "mfu_convention": "causal", "enumerated": 10}
    return Plan(job(tiny(tied=True), "8xh100"), layout, TrainSettings(steps=7, data="some/folder"), results)


def faults_of(data: dict[str, object] | str) -> list[str]:
    tables = tomllib.loads(data) if isinstance(data, str) else data
    with pytest.raises(PlanError) as error:
        parse_plan(tables, "plan.toml")
    return error.value.faults


def test_a_plan_reads_back_as_written(tmp_path: Path) -> None:
    plan = make_plan()
    path = tmp_path / "plan.toml"
    write(plan, path)
    assert load_plan(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.toml"]
    assert to_toml(load_plan(path)) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", catalog())
@pytest.mark.parametrize("cluster", ["2x8xh100", "8xa100", "4xcpu"])
def test_every_known_model_and_device_goes_into_a_file(name: str, cluster: str) -> None:
    plan = Plan(job(load_model(name), cluster, precision="bf16"), Layout(mb=1))
    assert parse_plan(tomllib.loads(to_toml(plan)), "plan.toml") == plan


@given(
    steps=st.integers(1, 10**9),
    rate=st.floats(0, 100, allow_nan=False),
    seed=st.integers(0, 2**63 - 1),
    data=st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=30),
)
def test_settings_survive_the_file(steps: int, rate: float, seed: int, data: str) -> None:
    plan = replace(make_plan(), train=TrainSettings(steps=steps, learning_rate=rate, seed=seed, data=data))
    assert parse_plan(tomllib.loads(to_toml(plan)), "plan.toml") == plan


def test_the_example_is_a_plan() -> None:
    plan = load_plan(TINY_FILE)
    assert str(plan.layout) == "tp=2 pp=2 mb=4"
    assert plan.job.micro_batches(plan.layout) == 4
    assert plan.job.cluster.world_size == plan.layout.world_size == 4
    assert plan.train is not None


def test_a_model_may_be_named_by_a_path_as_seen_from_the_plan(tmp_path: Path) -> None:
    tables = tomllib.loads(to_toml(make_plan()))
    config = {k: v for k, v in tables["model"].items() if k != "name"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    path = tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps({**tables, "model": "config.json"}), encoding="utf-8")
    assert load_plan(path).job.model.hidden == 32


def test_all_faults_are_said_at_once() -> None:
    tables = tomllib.loads(to_toml(make_plan()))
    tables["job"] = {"seq_len": "long", "global_batch": 0, "precision": "int4"}
    tables["layout"] = {"text": "tp=two pp=0"}
    tables["model"]["hidden_size"] = -1
    tables["cluster"]["device"]["usable_GiB_per_device"] = "80"
    tables["train"]["learning_rate"] = float("nan")
    tables["trian"] = {}
    said = faults_of(tables)
    for key in (
        "job.seq_len: found 'long'",
        "job.global_batch: found 0",
        "job.precision: found 'int4'",
        "layout.text: tp=two",
        "layout.text: pp=0",
        "layout.text: mb=",
        "model.hidden_size: found -1",
        "cluster.device.usable_GiB_per_device: found '80'",
        "train.learning_rate: found nan",
        "trian: unknown key; did you mean train?",
    ):
        assert any(fault.startswith(f"plan.toml: {key}") for fault in said), (key, said)


@pytest.mark.parametrize(
    ("table", "key", "hint"),
    [
        ("job", "sequence_len", "seq_len"),
        ("layout", "texts", "text"),
        ("train", "learning_rat", "learning_rate"),
        ("model", "hidden_sise", "hidden_size"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(table: str, key: str, hint: str) -> None:
    tables = tomllib.loads(to_toml(make_plan()))
    tables[table][key] = 1
    assert faults_of(tables) == [f"plan.toml: {table}.{key}: unknown key; did you mean {hint}?"]


def test_many_unknown_keys_are_counted_and_a_faulty_model_hides_none() -> None:
    tables = tomllib.loads(to_toml(make_plan()))
    tables["job"] |= {f"seq_lenn{i}": 1 for i in range(MAX_UNKNOWN + 7)}
    tables["model"] |= {"vocab_size": 0, "vocab_sizes": 40}
    said = faults_of(tables)
    assert "plan.toml: job: 7 more unknown keys" in said
    assert sum("did you mean seq_len?" in fault for fault in said) == MAX_UNKNOWN
    assert "plan.toml: model.vocab_sizes: unknown key; did you mean vocab_size?" in said
    assert any(fault.startswith("plan.toml: model.vocab_size: found 0") for fault in said)


def test_another_schema_is_refused_alone() -> None:
    (said,) = faults_of({"schema": 2, "job": "x"})
    assert "schema: found 2; wanted 1" in said


def test_an_empty_file_says_what_is_wanted() -> None:
    assert len(faults_of({"schema": 1})) == 4


def test_the_names_of_a_file_cannot_control_the_terminal() -> None:
    tables = tomllib.loads(to_toml(make_plan()))
    tables["model"]["name"] = "\x1b[2J"
    tables["cluster"]["name"] = "\x1b[2J"
    tables["results"]["\x1b[2J"] = 1
    said = faults_of(tables)
    assert len(said) == 3
    assert all(fault.isprintable() for fault in said)


def test_results_hold_numbers_and_texts_only() -> None:
    tables = tomllib.loads(to_toml(make_plan()))
    tables["results"] = {"a": [1], "b": float("inf"), "c": {"d": 1}, "e": True, "f": "x"}
    assert [fault.split(":")[1].strip() for fault in faults_of(tables)] == ["results.a", "results.b", "results.c"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "not UTF-8 at byte 0"),
        (b"job = ", "not TOML"),
        (b"x = " + b"[" * 5000, "not TOML: nested too deeply"),
        (b"x = " + b"9" * 5000, "not TOML"),
        (b"#" * (MAX_FILE_BYTES + 1), "larger than"),
        (b"", "schema: found nothing"),
        (b"schema = 1\nmodel" + b".a" * 4000 + b" = 1", "model.name: found nothing"),
        (b"schema = 1\nmodel" + b".a" * 20000 + b" = 1", "a line is longer than"),
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    with pytest.raises(PlanError) as error:
        load_plan(path)
    assert any(said in fault for fault in error.value.faults), error.value.faults


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for path, said in ((tmp_path, "a directory"), (pipe, "not a regular file"), (tmp_path / "no", "no such file")):
        with pytest.raises(PlanError, match=said):
            load_plan(path)


def test_writing_replaces_a_file_whole_and_never_a_device(tmp_path: Path) -> None:
    plan, path, link = make_plan(), tmp_path / "plan.toml", tmp_path / "link.toml"
    path.write_text("old", encoding="utf-8")
    link.symlink_to(path)
    write(plan, link)
    assert link.is_symlink()
    assert load_plan(path) == plan
    write(plan, Path(os.devnull))
    assert not Path(os.devnull).is_file()
    with pytest.raises(OSError, match="directory"):
        write(plan, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.toml", "plan.toml"]


def test_a_cluster_is_spelled_or_a_file(tmp_path: Path) -> None:
    tables = tomllib.loads(to_toml(make_plan()))["cluster"]
    path = tmp_path / "cluster.toml"
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    assert load_cluster(str(path)) == load_cluster("8xh100")
    path.write_text(tomli_w.dumps({**tables, "nodes": 0}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"cluster\.toml: nodes"):
        load_cluster(str(path))
