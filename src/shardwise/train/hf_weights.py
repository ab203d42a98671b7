"""Weights in Hugging Face's names and layout: a folder of safetensors files, one file or a sharded index, and the
config.json beside them.

Logical names are the runtime's (`layers.3.attention.q.weight`); every tensor of a file is one of them, or holds
several side by side (GPT-2's fused q, k and v). Nothing is guessed: missing, unexpected and mis-shaped tensors are all
named before one is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shardwise.model.hf import load_model, to_config
from shardwise.model.read import ModelError
from shardwise.model.spec import Model
from shardwise.plan.shards import TIED, Record
from shardwise.train.hf_names import HEAD_KEY, Source, WeightsError, hf_config, sources

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
MAX_SHARD_BYTES = 5 * 10**9
MAX_INDEX_BYTES = 1 << 26
FLOATS: Final = ("BF16", "F16", "F32", "F64")
"""dtypes of a file that are read, as safetensors names them."""

BUFFERS: Final = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of keys that older files hold beside the parameters: tables that follow from the config."""


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a folder, checked against a model; nothing is read until it is asked for."""

    model: Model
    places: Mapping[str, tuple[Path, str, Source]]
    """logical name -> (file, key in the file, what the key holds)"""

    def whole(self, name: str) -> torch.Tensor:
        """The whole parameter, in the file's dtype."""
        return self._read(name, [slice(0, n) for n in self.places[name][2].shape])

    def local(self, record: Record, tp_index: int) -> torch.Tensor:
        """A rank's part [its box] of a parameter: only these rows or columns are read."""
        return self._read(record.name, list(record.box(tp_index)))

    def _read(self, name: str, box: list[slice]) -> torch.Tensor:
        """A box of the parameter."""
        path, key, source = self.places[name]
        shift = source.part * source.shape[0]
        box[0] = slice(box[0].start + shift, box[0].stop + shift)
        with safe_open(path, framework="pt") as file:
            part = cast("torch.Tensor", file.get_slice(key)[tuple(box[::-1] if source.transposed else box)])
        return (part.t() if source.transposed else part).contiguous()


def open_weights(model: Model, where: Path | str) -> Weights:
    """The weights in a folder, or in one file. Raises WeightsError with every missing, unexpected or mis-shaped tensor
    and, where the folder has a config.json, every key in which that is another model's; OSError as the system."""
    root = Path(where)
    wanted = sources(model)
    found = _listed(root)
    alias = _aliases(found, {s.key for s in wanted.values()})
    faults = _other_config(model, root / CONFIG)
    for source in {s.key: s for s in wanted.values()}.values():
        if source.key not in alias:
            faults.append(f"{source.key}: missing, wanted {_shown(source.stored_shape)}")
        else:
            faults += _misfits(source, found[alias[source.key]])
    faults += _unexpected(model, set(found) - set(alias.values()))
    if faults:
        raise WeightsError(where, faults)
    return Weights(model, {n: (found[alias[s.key]].path, alias[s.key], s) for n, s in wanted.items()})


def _misfits(source: Source, found: _Stored) -> list[str]:
    """What is wrong with the tensor that is there."""
    faults: list[str] = []
    if found.shape != source.stored_shape:
        faults.append(f"{source.key}: found {_shown(found.shape)}, wanted {_shown(source.stored_shape)}")
    if found.dtype not in FLOATS:
        faults.append(f"{source.key}: found {found.dtype}, wanted one of {', '.join(FLOATS)}: not quantized")
    return faults


def _other_config(model: Model, path: Path) -> list[str]:
    """Every key in which a config.json describes another model: some change no shape, and yet every logit."""
    if not path.is_file():
        return []
    try:
        theirs = to_config(load_model(str(path)))
    except ModelError as error:
        return [f"{CONFIG}: {fault}" for fault in error.faults]
    ours = to_config(model)
    return [
        f"{CONFIG}: {key} is {theirs.get(key)!r}, the plan's model has {ours.get(key)!r}"
        for key in dict.fromkeys((*ours, *theirs))
        if theirs.get(key) != ours.get(key)
    ]


def _aliases(found: Mapping[str, object], wanted: set[str]) -> dict[str, str]:
    """Wanted key -> key in the files. Files of a bare trunk (GPT-2's first ones) leave out its prefix."""
    prefixes = {key.partition(".")[0] + "." for key in wanted if key != HEAD_KEY}
    bare = not any(key.startswith(p) for key in found for p in prefixes)
    pairs = ((key, key.partition(".")[2] if bare and key != HEAD_KEY else key) for key in wanted)
    return {key: there for key, there in pairs if there in found}


def _unexpected(model: Model, left: set[str]) -> list[str]:
    """Keys that are nobody's. A tied model's head may be there as well: it is the embedding."""
    tied = {HEAD_KEY} if model.tied else set[str]()
    return [
        f"{key}: unexpected, the model has no such parameter"
        for key in sorted(left - tied)
        if not key.endswith(BUFFERS)
    ]


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


class _Stored(NamedTuple):
    """A tensor of a file, as its header says."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


def _listed(root: Path) -> dict[str, _Stored]:
    """Every key in the files."""
    listed: dict[str, _Stored] = {}
    faults: list[str] = []
    for path in _files(root):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - the handle is no mapping
                    if key in listed:
                        faults.append(f"{key}: in {listed[key].path.name} and in {path.name}")
                    there = file.get_slice(key)
                    listed[key] = _Stored(path, tuple(there.get_shape()), str(there.get_dtype()))
        except SafetensorError as error:
            faults.append(f"{path.name}: not a safetensors file: {error}")
        except OSError as error:
            faults.append(f"{path.name}: {error.strerror or error}")
    if faults:
        raise WeightsError(root, faults)
    return listed


def _files(root: Path) -> list[Path]:
    """The file itself, or of a folder the files that its index names, or all of its safetensors files."""
    if not root.exists():
        raise WeightsError(root, ["no such file; wanted a safetensors file, or a folder of them"])
    if not root.is_dir():
        return [root]
    index = root / INDEX
    if not index.exists():
        found = sorted(root.glob("*.safetensors"))
        if not found:
            raise WeightsError(root, [f"no {INDEX} and no *.safetensors; wanted a folder of safetensors files"])
        return found
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise WeightsError(root, [f"{INDEX}: larger than {MAX_INDEX_BYTES:,} bytes"])
    try:
        read: Any = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(root, [f"{INDEX}: not JSON: {error}"]) from None
    table = cast("dict[str, Any]", read).get("weight_map") if isinstance(read, dict) else None
    names = set(cast("dict[str, Any]", table).values()) if isinstance(table, dict) else set[Any]()
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise WeightsError(root, [f"{INDEX}: wanted a weight_map of parameter names to names of files in this folder"])
    return [root / name for name in sorted(names)]


# ------------------------------------------------------------------------------------------------------------- writing


def save_weights(
    model: Model,
    whole: Callable[[str], torch.Tensor],
    folder: Path | str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    context: int | None = None,
) -> list[Path]:
    """Write the model's config.json and its parameters, `whole(logical name)` each, as Hugging Face's class reads
    them; the files of weights. Raises WeightsError for a model of which there is no such class, and OSError.

    One file, or shards of at most `max_shard_bytes` (a larger tensor has one of its own) and an index. A shard's
    tensors are asked for together, so that one shard is in memory at a time. Files of these names are replaced.
    """
    root, dtype = Path(folder), whole(TIED).dtype
    root.mkdir(parents=True, exist_ok=True)
    by_key: dict[str, list[tuple[str, Source]]] = {}
    for name, source in sources(model).items():
        by_key.setdefault(source.key, []).append((name, source))
    config = hf_config(model, context) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (root / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shards: list[list[str]] = [[]]
    filled = 0
    for key, parts in by_key.items():
        size = prod(parts[0][1].stored_shape) * dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    n = len(shards)
    names = [SINGLE] if n == 1 else [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    total = 0
    for name, keys in zip(names, shards, strict=True):
        tensors = {key: _stored(by_key[key], whole) for key in keys}
        total += sum(t.numel() * t.element_size() for t in tensors.values())
        try:
            save_file(tensors, root / name, metadata={"format": "pt"})
        except SafetensorError as error:  # the library's word for what the system said
            raise OSError(None, str(error), str(root / name)) from error
        (root / name).chmod((root / CONFIG).stat().st_mode)  # the library makes it the owner's alone
    if n > 1:
        table = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": table}, indent=2, sort_keys=True)
        (root / INDEX).write_text(text + "\n", encoding="utf-8")
    return [root / name for name in names]


def _stored(parts: list[tuple[str, Source]], whole: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The file's tensor of these parameters."""
    found: list[torch.Tensor] = []
    for name, source in sorted(parts, key=lambda pair: pair[1].part):
        value = whole(name)
        if tuple(value.shape) != source.shape:
            raise WeightsError(name, [f"found {_shown(tuple(value.shape))}, wanted {_shown(source.shape)}"])
        found.append(value.t() if source.transposed else value)
    return torch.cat(found, parts[0][1].dim).contiguous() if len(found) > 1 else found[0].contiguous()
