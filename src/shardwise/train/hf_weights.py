"""Weights in Hugging Face's names and layout: a folder of safetensors files, one file or a sharded index.

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
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shardwise.model.spec import EMBEDDING, HEAD, Model, Parameter, Unit
from shardwise.plan.shards import TIED, Record, logical_name

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_SHARD_BYTES = 5 * 10**9
MAX_INDEX_BYTES = 1 << 26
SHOWN = 20
"""Faults that an error spells out; it counts the rest."""


class WeightsError(ValueError):
    """A folder whose tensors are not the model's; `faults` says all that is wrong with it."""

    def __init__(self, where: object, faults: list[str]) -> None:
        self.faults = faults
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        super().__init__("\n".join(f"{where}: {fault}" for fault in (*faults[:SHOWN], *more)))


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter lies: under `key`, transposed or not (GPT-2's Conv1D), as part `part` of `parts` equal ones
    along the file's dim `dim`; `shape` is the parameter's own, whole."""

    key: str
    shape: tuple[int, ...]
    transposed: bool = False
    part: int = 0
    parts: int = 1

    @property
    def dim(self) -> int:
        """The file's dim along which parts lie side by side: the parameter's rows."""
        return 1 if self.transposed else 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the file's tensor, all parts."""
        rows, *rest = self.shape
        stored = (rows * self.parts, *rest)
        return stored[::-1] if self.transposed else stored


_LLAMA: Final = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_GEMMA: Final = {**_LLAMA, "mlp_norm": "pre_feedforward_layernorm"}
_GPT2: Final = {
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_FUSED: Final = ("attention.q", "attention.k", "attention.v")


@dataclass(frozen=True, slots=True)
class _Names:
    """A family's words: the prefix of the trunk, of a layer inside it, of the ends, and of a layer's modules."""

    trunk: str
    layers: str
    ends: Mapping[str, str]
    modules: Mapping[str, str]
    conv1d: bool = False


_ENDS: Final = {"embedding.weight": "embed_tokens.weight", "head.norm": "norm"}
_PLAIN: Final = _Names("model.", "layers", _ENDS, _LLAMA)
_BY_FAMILY: Final[Mapping[str, _Names]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2"), _PLAIN),
    **dict.fromkeys(("gemma2", "gemma3_text"), _Names("model.", "layers", _ENDS, _GEMMA)),
    "gpt2": _Names(
        "transformer.",
        "h",
        {"embedding.weight": "wte.weight", "embedding.positions.weight": "wpe.weight", "head.norm": "ln_f"},
        _GPT2,
        conv1d=True,
    ),
}

HEAD_KEY: Final = "lm_head.weight"

BUFFERS: Final = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of keys that older files hold beside the parameters: tables that follow from the config."""


def sources(model: Model) -> dict[str, Source]:
    """Every logical parameter of the model, and where Hugging Face's class keeps it. Raises WeightsError for a family
    whose names are not known here."""
    names = _BY_FAMILY.get(model.family)
    if names is None or model.loops > 1 or model.tail:
        raise WeightsError(
            model.name, [f"weights of the family {model.family} are not read; {', '.join(_BY_FAMILY)} are"]
        )
    return {
        logical_name(model, unit, p): _source(names, model, unit, p)
        for unit in model.units()
        for p in unit.block.parameters
        if p.name not in unit.block.tied
    }


def _source(names: _Names, model: Model, unit: Unit, p: Parameter) -> Source:
    shape = tuple(model.dims[d] for d in p.dims)
    name = f"{unit.name}.{p.name}"
    module, _, leaf = p.name.rpartition(".")
    if name == "head.output.weight":
        return Source(HEAD_KEY, shape)
    if unit.block.kind in (EMBEDDING, HEAD):
        own, _, last = name.rpartition(".")
        return Source(names.trunk + (names.ends[name] if name in names.ends else f"{names.ends[own]}.{last}"), shape)
    key = f"{names.trunk}{names.layers}.{unit.name.removeprefix('layers.')}.{names.modules[module]}.{leaf}"
    if not names.conv1d:
        return Source(key, shape)
    fused = module in _FUSED
    return Source(key, shape, len(shape) > 1, _FUSED.index(module) if fused else 0, len(_FUSED) if fused else 1)


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

    def local(self, record: Record, tp: int, tp_index: int) -> torch.Tensor:
        """A rank's part [record.shape] of a parameter: only these rows or columns are read."""
        shape = self.places[record.name][2].shape
        box = [slice(0, n) for n in shape]
        if record.tp_dim is not None:
            each = shape[record.tp_dim] // tp
            box[record.tp_dim] = slice(tp_index * each, (tp_index + 1) * each)
        return self._read(record.name, box)

    def _read(self, name: str, box: list[slice]) -> torch.Tensor:
        """A box of the parameter."""
        path, key, source = self.places[name]
        shift = source.part * source.shape[0]
        box[0] = slice(box[0].start + shift, box[0].stop + shift)
        with safe_open(path, framework="pt") as file:
            part = cast("torch.Tensor", file.get_slice(key)[tuple(box[::-1] if source.transposed else box)])
        return (part.t() if source.transposed else part).contiguous()


def open_weights(model: Model, folder: Path | str) -> Weights:
    """The weights in a folder. Raises WeightsError with every missing, unexpected or mis-shaped tensor, OSError as the
    system."""
    root = Path(folder)
    wanted = sources(model)
    shapes, files = _listed(root)
    alias = _aliases(shapes, {s.key for s in wanted.values()})
    faults: list[str] = []
    for source in {s.key: s for s in wanted.values()}.values():
        if source.key not in alias:
            faults.append(f"{source.key}: missing, wanted {_shown(source.stored_shape)}")
        elif (found := shapes[alias[source.key]]) != source.stored_shape:
            faults.append(f"{source.key}: found {_shown(found)}, wanted {_shown(source.stored_shape)}")
    faults += _unexpected(model, set(shapes) - set(alias.values()))
    if faults:
        raise WeightsError(folder, faults)
    return Weights(model, {n: (files[alias[s.key]], alias[s.key], s) for n, s in wanted.items()})


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


def _listed(root: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Path]]:
    """Shapes and files of every key in the folder's files."""
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, Path] = {}
    faults: list[str] = []
    for path in _files(root):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - the handle is no mapping
                    if key in files:
                        faults.append(f"{key}: in {files[key].name} and in {path.name}")
                    files[key], shapes[key] = path, tuple(file.get_slice(key).get_shape())
        except SafetensorError as error:
            faults.append(f"{path.name}: not a safetensors file: {error}")
        except OSError as error:
            faults.append(f"{path.name}: {error.strerror or error}")
    if faults:
        raise WeightsError(root, faults)
    return shapes, files


def _files(root: Path) -> list[Path]:
    """The files that the index names, or every safetensors file of the folder."""
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
    model: Model, whole: Callable[[str], torch.Tensor], folder: Path | str, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[Path]:
    """Write the model's parameters, `whole(logical name)` each, as Hugging Face's class reads them; the files.

    One file, or shards of at most `max_shard_bytes` (a larger tensor has one of its own) and an index. A shard's
    tensors are asked for together, so that one shard is in memory at a time. Files of these names are replaced.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    by_key: dict[str, list[tuple[str, Source]]] = {}
    for name, source in sources(model).items():
        by_key.setdefault(source.key, []).append((name, source))
    element = whole(TIED).element_size()
    shards: list[list[str]] = [[]]
    filled = 0
    for key, parts in by_key.items():
        size = prod(parts[0][1].stored_shape) * element
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
        save_file(tensors, root / name, metadata={"format": "pt"})
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
