"""Models from configs: real ones to the unit, everything else a ModelError or a Model, and quickly."""

from __future__ import annotations

import json
import os
import time
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.model import hf
from shardwise.model.families.llama import SCALINGS
from shardwise.model.hf import ModelError, from_config, load_model, to_config
from shardwise.model.read import INERT, MAX_LAYERS
from shardwise.model.spec import Model

QUICK_S = 2.0
"""Generous: a shared machine is slow, a quadratic algorithm is far slower."""


def real(name: str = "llama-3.1-8b") -> dict[str, Any]:
    return json.loads((resources.files("shardwise.model") / "catalog" / f"{name}.json").read_text(encoding="utf-8"))


def faults(config: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        from_config(config, "it")
    return "\n".join(caught.value.faults)


def refused(path: Path | str) -> str:
    """What is said of a file, in short time."""
    started = time.perf_counter()
    with pytest.raises(ModelError) as caught:
        load_model(str(path))
    assert time.perf_counter() - started < QUICK_S
    return "\n".join(caught.value.faults)


COUNTS = [
    ("llama-3.1-8b", 8_030_261_248),
    ("llama-3.1-70b", 70_553_706_496),
    ("llama-3.1-405b", 405_853_388_800),
]


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_parameters_to_the_unit(name: str, count: int) -> None:
    assert load_model(name).parameters == count


@pytest.mark.parametrize("name", [name for name, _ in COUNTS])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_survives_its_config(name: str, tied: bool) -> None:
    model = from_config({**real(name), "tie_word_embeddings": tied}, name)
    assert model.tied == tied
    assert from_config(json.loads(json.dumps(to_config(model))), name) == model


def test_a_tied_model_lacks_one_matrix() -> None:
    untied, tied = (from_config({**real(), "tie_word_embeddings": t}, "it").parameters for t in (False, True))
    assert untied - tied == 128_256 * 4096


def test_both_spellings_of_the_rotation_are_one_model() -> None:
    old = real()
    new = {k: v for k, v in old.items() if k not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    assert from_config(new, "it") == from_config(old, "it")
    plain = {**new, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert from_config(plain, "it").rope_scaling == ()


def test_what_a_config_leaves_out_is_filled_in() -> None:
    config = real()
    for key in ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rms_norm_eps", "rope_theta"):
        del config[key]
    model = from_config(config, "it")
    assert (model.kv_heads, model.head_dim, model.tied, model.norm_eps, model.rope_theta) == (32, 128, False, 1e-6, 1e4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": ["llama"]}, "model_type: found ['llama'], wanted one of bloom, deepseek_v2"),
        ({"model_type": {"a": 1}}, "model_type: found {'a': 1}"),
        ({"model_type": None}, "model_type: found nothing"),
        ({"model_type": "qwen2_moe"}, "; the nearest is qwen3_moe"),
        ({"model_type": "llama4"}, "; the nearest is llama"),
        ({"hidden_size": float("nan")}, "hidden_size: found nan"),
        ({"hidden_size": True}, "hidden_size: found True"),
        ({"hidden_size": 4096.0}, "hidden_size: found 4096.0"),
        ({"vocab_size": 10**4000}, "vocab_size: found 1000000"),
        ({"vocab_size": 10**5000}, "vocab_size: found a value beyond all bounds"),
        ({"num_hidden_layers": MAX_LAYERS + 1}, "wanted a whole number from 1 to 4,096"),
        ({"rope_theta": float("inf")}, "rope_theta: found inf, wanted a positive number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: found -1"),
        ({"num_key_value_heads": 7}, "7 does not divide num_attention_heads 32"),
        ({"head_dim": None, "num_attention_heads": 24, "num_key_value_heads": 8}, "24 heads do not divide hidden_size"),
        ({"head_dim": 127}, "head_dim: 127 is odd"),
        ({"attention_bias": True}, "attention_bias: true is not supported"),
        ({"mlp_bias": "no"}, "mlp_bias: found 'no', wanted true or false"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu', wanted 'silu'"),
        ({"rope_scaling": [1]}, "rope_scaling: found [1], wanted a table"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.rope_type: found 'yarn', wanted 'linear', 'llama3'"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, "rope_scaling.rope_type: found ['llama3']"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 0}}, "rope_scaling.factor: found 0"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        ({"rope_parameters": 1}, "rope_parameters: found 1, wanted a table"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5, which these blocks do not have"),
        ({"sliding_window": 4096}, "sliding_window: found 4096"),
        ({"num_local_experts": 8}, "num_local_experts: found 8"),
        ({"quantization_config": {}}, "quantization_config: found {}"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    assert said in faults({**real(), **changes})


def test_all_faults_are_said_at_once_and_a_misspelt_key_is_named() -> None:
    config = {**real(), "vocab_size": 0, "hiden_size": 4096, "rope_scaling": {"rope_type": "llama3"}}
    del config["hidden_size"]
    said = faults(config)
    for words in (
        "is 'hiden_size' meant?",
        "vocab_size: found 0",
        *(f"rope_scaling.{key}" for key in SCALINGS["llama3"]),
    ):
        assert words in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty; wanted a JSON object"),
        (b" \n", "empty; wanted a JSON object"),
        (b"[1, 2]", "wanted a JSON object"),
        (b"{", "not JSON: "),
        (b"\xff\xfe\x00", "not UTF-8 at byte 0"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' is there more than once"),
        (b'{"rope_scaling": {"factor": 1, "factor": 2}}', "'factor' is there more than once"),
        (b" " * (hf.MAX_FILE_BYTES + 1), "larger than 1,048,576 bytes"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert said in refused(path)


def test_many_keys_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    keys = {f"hidden_siz{i}": i for i in range(40_000)}
    path.write_text(json.dumps({"model_type": "llama", **keys}))
    assert "hidden_size: found nothing" in refused(path)
    path.write_text(json.dumps(keys)[:-1] + ', "hidden_siz0": 1}')
    assert "more than once" in refused(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    assert "not a regular file" in refused(tmp_path / "pipe.json")
    assert "not a regular file" in refused("/dev/zero")
    assert "a directory" in refused(tmp_path / "folder")
    assert "a folder without a config.json" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "no.json")
    assert "did you mean llama-3.1-70b?" in refused("Llama3.1-70B")
    assert "did you mean" not in refused("zzz")


def test_a_model_is_named_by_its_folder_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny-llama.v1"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(real()))
    (folder / "a\nb\x1b.json").write_text(json.dumps(real()))
    assert load_model(str(folder)).name == "tiny-llama.v1"
    assert load_model(str(folder / "a\nb\x1b.json")).name == "a?b?"
    monkeypatch.chdir(folder)
    assert load_model("config.json").name == load_model(".").name == "tiny-llama.v1"


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(real()).encode())
    assert load_model(str(path)).parameters == 8_030_261_248


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["llama", "silu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from([*hf.KEYS, *INERT, *(f"rope_scaling.{key}" for key in ("rope_type", *SCALINGS["llama3"]))])


@given(
    st.sampled_from([*hf.catalog(), "llama-3.1-8b"]),
    st.lists(st.tuples(KEYS, st.none() | ODD), max_size=4),
    st.lists(KEYS, max_size=3),
)
def test_a_mutated_config_is_a_model_or_a_model_error(
    name: str, changes: list[tuple[str, Any]], drops: list[str]
) -> None:
    config = real(name)
    for key, value in changes:
        outer, _, inner = key.partition(".")
        if inner and isinstance(config.get(outer), dict):
            config[outer] = {**config[outer], inner: value}
        else:
            config[outer] = value
    for key in drops:
        config.pop(key, None)
    started = time.perf_counter()
    found = read(config)
    assert time.perf_counter() - started < QUICK_S
    if isinstance(found, Model):
        assert found.parameters > 0
        assert set(to_config(found)) <= set(hf.KEYS)
        assert from_config(to_config(found), "it") == found
    else:
        assert found.faults
        assert all(map(str.isprintable, found.faults))


def read(config: dict[str, Any]) -> Model | ModelError:
    try:
        return from_config(config, "it")
    except ModelError as error:
        return error
