"""A Hugging Face `config.json` -> Model. One small function a family."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

from shardwise.model import blocks
from shardwise.model.spec import Model

MAX_DIM = 1 << 24
"""Larger than any real dim (vocabularies reach 2^18), small enough that no product of a few overflows a float."""

MAX_LAYERS = 1 << 12
"""Far more than any real model has, few enough that every layer's collectives can be listed one by one."""

MAX_FILE_BYTES = 1 << 20

MANY_KEYS = 200
"""Keys of a config among which a misspelt one is looked for."""

DIMS: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)

KEYS: Final = (
    "model_type",
    *DIMS,
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
)
"""Keys of a config that are read. Hugging Face's files have many more, which say nothing about the model."""

INERT: Final[Mapping[str, tuple[object, ...]]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "num_local_experts": (None, 1),
    "attention_dropout": (None, 0, 0.0),
}
"""Keys that would make another model of it, with the values at which they do not."""


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

    def integer(self, key: str, default: int | None = None, most: int = MAX_DIM) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            others = [k for k in list(self.config)[:MANY_KEYS] if k not in KEYS] if value is None else []
            near = get_close_matches(key, others, n=1, cutoff=0.8)
            hint = f"; is {_short(near[0])} meant?" if near else ""
            self.faults.append(f"{key}: found {_short(value)}, wanted a whole number from 1 to {most:,}{hint}")
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
    try:
        text = "nothing" if value is None else repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer of too many digits
        text = "a value beyond all bounds"
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
    for key, harmless in INERT.items():
        if (found := read.config.get(key)) not in harmless:
            read.faults.append(f"{key}: found {_short(found)}, which these blocks do not have")
    tied = read.flag("tie_word_embeddings", False)
    theta, scaling = _rope(read)
    return Model(
        name=name,
        layers=read.integer("num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        ffn=read.integer("intermediate_size"),
        vocab=read.integer("vocab_size"),
        tied=tied,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        blocks=(blocks.embedding(), blocks.layer(), blocks.head(tied)),
    )


ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _rope(read: _Reader) -> tuple[float, tuple[tuple[str, float], ...]]:
    """The rotation's base, and Llama 3.1's stretched frequencies or nothing; from the keys of either version."""
    key = "rope_scaling" if read.config.get("rope_parameters") is None else "rope_parameters"
    found = read.config.get(key)
    if found is None:
        return read.number("rope_theta", 10000.0), ()
    if not isinstance(found, Mapping):
        read.faults.append(f"{key}: found {_short(found)}, wanted a table")
        return 1.0, ()
    table = cast("Mapping[str, Any]", found)
    inner = _Reader(table)
    theta = inner.number("rope_theta", 10000.0) if "rope_theta" in table else read.number("rope_theta", 10000.0)
    scaling = _scaling(inner)
    read.faults += [f"{key}.{fault}" for fault in inner.faults]
    return theta, scaling


def _scaling(inner: _Reader) -> tuple[tuple[str, float], ...]:
    kind = inner.config.get("rope_type", inner.config.get("type"))
    if kind == "default":
        return ()
    if kind != "llama3":
        inner.faults.append(f"rope_type: found {_short(kind)}, wanted 'llama3' or 'default'")
        return ()
    inner.faults += [f"{key}: missing" for key in ROPE_KEYS if key not in inner.config]
    values = {key: inner.number(key, 1.0) for key in ROPE_KEYS}
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    if not inner.faults and low >= high:
        inner.faults.append(f"low_freq_factor: found {low:g}, wanted less than high_freq_factor, {high:g}")
    return tuple(values.items())


FAMILIES: dict[str, Callable[[str, _Reader], Model]] = {"llama": _llama}


def from_config(config: Mapping[str, Any], name: str, where: str = "model") -> Model:
    """The model that a Hugging Face config describes. Raises ModelError with all faults at once."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(where, [f"model_type: found {_short(family)}, wanted one of {', '.join(sorted(FAMILIES))}"])
    read = _Reader(config)
    model = FAMILIES[family](name, read)
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
    if not path.exists():
        raise ModelError(spec, [_nothing_there(spec, path)])
    named = path.resolve()
    return from_config(_read_json(path), _name(named.parent if named.name == "config.json" else named), str(path))


def _nothing_there(spec: str, path: Path) -> str:
    """Why a spec is no model: with the nearest name, if one is near."""
    if path != Path(spec):
        return "a folder without a config.json"
    if spec.endswith(".json") or os.sep in spec:
        return "no such file"
    near = get_close_matches(spec.lower(), catalog(), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"neither a file nor a model of the catalogue; {hint}the catalogue has {', '.join(catalog())}"


def _name(path: Path) -> str:
    """A model's name from its file or folder: printable, and never empty."""
    name = path.stem if path.suffix == ".json" else path.name
    return "".join(c if c.isprintable() else "?" for c in name)[:200] or "model"


def _read_json(path: Path) -> dict[str, Any]:
    """A small regular file's JSON object, in which no key comes twice. Raises ModelError, OSError as the system."""

    def refuse(said: str) -> ModelError:
        return ModelError(str(path), [said])

    if path.is_dir():
        raise refuse("a directory; wanted a JSON file")
    # A pipe would block the opening, and a device may have no end.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise refuse("not a regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise refuse(f"larger than {MAX_FILE_BYTES:,} bytes, this is not a config.json")
    if not content.strip():
        raise refuse("empty; wanted a JSON object of the model's dimensions")
    try:
        found = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise refuse(f"not UTF-8 at byte {error.start:,}; wanted a JSON file") from None
    except RecursionError:
        raise refuse("not JSON that can be read: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise refuse(f"not JSON: {error}") from None
    except ValueError as error:
        raise refuse(str(error).partition(";")[0]) from None
    if not isinstance(found, dict):
        raise refuse("wanted a JSON object of the model's dimensions")
    return cast("dict[str, Any]", found)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; which of two values a file means that has the same key twice is not ours to guess."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{_short(twice)} is there more than once")
    return found
