"""A Hugging Face `config.json` -> Model. One small function a family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, cast

from shardwise.model import blocks
from shardwise.model.spec import Model

MAX_DIM = 1 << 24
"""Larger than any real dim (vocabularies reach 2^18), small enough that no product of a few overflows a float."""

MAX_FILE_BYTES = 1 << 20


class ModelError(ValueError):
    """A model description that cannot be used; `faults` says all that is wrong with it."""

    def __init__(self, where: str, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"{where}: {fault}" for fault in faults))


class _Reader:
    """Reads keys of one config and collects every fault."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.faults: list[str] = []

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIM:
            self.faults.append(f"{key}: found {_short(value)}, wanted a whole number from 1 to {MAX_DIM:,}")
            return 1
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
            self.faults.append(f"{key}: found {_short(value)}, wanted a positive number")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            self.faults.append(f"{key}: found {_short(value)}, wanted true or false")
            return default
        return value


def _short(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _llama(name: str, read: _Reader) -> Model:
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", default=heads)
    if read.config.get("head_dim") is None and hidden % heads:
        read.faults.append(f"num_attention_heads: {heads} heads do not divide hidden_size {hidden}; set head_dim")
    head_dim = read.integer("head_dim", default=max(1, hidden // heads))
    if heads % kv_heads:
        read.faults.append(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
    if head_dim % 2:
        read.faults.append(f"head_dim: {head_dim} is odd, rotary embeddings turn pairs")
    for key in ("attention_bias", "mlp_bias"):
        if read.flag(key, False):
            read.faults.append(f"{key}: true is not supported, these blocks have no biases")
    activation = read.config.get("hidden_act", "silu")
    if activation != "silu":
        read.faults.append(f"hidden_act: found {_short(activation)}, wanted 'silu'")
    tied = read.flag("tie_word_embeddings", False)
    return Model(
        name=name,
        layers=read.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        ffn=read.integer("intermediate_size"),
        vocab=read.integer("vocab_size"),
        tied=tied,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=read.number("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(read),
        blocks=(blocks.embedding(), blocks.layer(), blocks.head(tied)),
    )


ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _rope_scaling(read: _Reader) -> tuple[tuple[str, float], ...]:
    """Llama 3.1's stretched rotary frequencies, or nothing."""
    found = read.config.get("rope_scaling")
    if found is None:
        return ()
    if not isinstance(found, Mapping):
        read.faults.append(f"rope_scaling: found {_short(found)}, wanted a table")
        return ()
    table = cast("Mapping[str, Any]", found)
    kind = table.get("rope_type", table.get("type"))
    if kind != "llama3":
        read.faults.append(f"rope_scaling: type {_short(kind)} is not supported, wanted 'llama3'")
        return ()
    inner = _Reader(table)
    values = tuple((key, inner.number(key, 1.0)) for key in ROPE_KEYS)
    missing = [key for key in ROPE_KEYS if key not in table]
    read.faults += [f"rope_scaling.{fault}" for fault in inner.faults]
    read.faults += [f"rope_scaling.{key}: missing" for key in missing]
    return values


FAMILIES: dict[str, Callable[[str, _Reader], Model]] = {"llama": _llama}


def from_config(config: Mapping[str, Any], name: str, where: str = "model") -> Model:
    """The model that a Hugging Face config describes. Raises ModelError with all faults at once."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(where, [f"model_type: found {_short(family)}, wanted one of {', '.join(sorted(FAMILIES))}"])
    read = _Reader(config)
    model = FAMILIES[str(family)](name, read)
    if read.faults:
        raise ModelError(where, read.faults)
    return model


def to_config(model: Model) -> dict[str, Any]:
    """The config of a model, in Hugging Face's keys: `from_config` reads it back."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
    }
    if model.rope_scaling:
        config["rope_scaling"] = {"rope_type": "llama3", **dict(model.rope_scaling)}
    return config


def catalog() -> list[str]:
    """Names of the models that come with the package."""
    folder = resources.files("shardwise.model") / "catalog"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def load_model(spec: str) -> Model:
    """A catalogue name, a `config.json`, or a folder that holds one. Raises ModelError."""
    if spec in catalog():
        text = (resources.files("shardwise.model") / "catalog" / f"{spec}.json").read_text(encoding="utf-8")
        return from_config(json.loads(text), spec, spec)
    path = Path(spec)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        known = ", ".join(catalog())
        raise ModelError(spec, [f"neither a file nor a model of the catalogue, which has {known}"])
    return from_config(_read_json(path), path.parent.name if path.name == "config.json" else path.stem, str(path))


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ModelError(str(path), [f"larger than {MAX_FILE_BYTES:,} bytes, this is not a config.json"])
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ModelError(str(path), [f"not JSON: {error}"]) from error
    if not isinstance(found, dict):
        raise ModelError(str(path), ["wanted a JSON object of the model's dimensions"])
    return cast("dict[str, Any]", found)
