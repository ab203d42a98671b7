"""Hugging Face's words for a model: where each parameter lies in its class's files, and the class's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from shardwise.model.hf import to_config
from shardwise.model.spec import EMBEDDING, HEAD, Model, Parameter, Unit
from shardwise.plan.shards import logical_name, storage_owner

SHOWN = 20
"""Faults that an error spells out; it counts the rest."""


class WeightsError(ValueError):
    """A folder whose tensors are not the model's; `faults` says what is wrong with it, and where."""

    def __init__(self, where: object, faults: list[str]) -> None:
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        self.faults = [f"{where}: {fault}" for fault in (*faults[:SHOWN], *more)]
        super().__init__("\n".join(self.faults))


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

_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
"""transformers' class of each family."""

HEAD_KEY: Final = "lm_head.weight"


def sources(model: Model) -> dict[str, Source]:
    """Every logical parameter of the model, and where Hugging Face's class keeps it. Raises WeightsError for a family
    whose names are not known here."""
    names = _BY_FAMILY.get(model.family)
    if names is None or model.tail:
        raise WeightsError(
            model.name, [f"weights of the family {model.family} are not read; {', '.join(_BY_FAMILY)} are"]
        )
    return {
        logical_name(model, unit, p): _source(names, model, storage_owner(model, unit), p)
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


def hf_config(model: Model, context: int | None = None) -> dict[str, Any]:
    """The config.json of which transformers makes the model's class. `context`: the longest sequence, which is said
    where the model has no learned positions. Raises WeightsError where there is no such class."""
    if model.loops > 1:
        raise WeightsError(model.name, [f"num_loops: {model.loops}; transformers has no class that runs layers twice"])
    config = _whole_lengths(to_config(model)) | {"architectures": [_ARCHITECTURES[model.family]]}
    config.pop("num_loops", None)  # a word of ours
    if context is not None and "n_positions" not in config:
        config["max_position_embeddings"] = context
    return config


def _whole_lengths(table: dict[str, Any]) -> dict[str, Any]:
    """A length of a rotary table is a whole number to transformers."""
    return {
        k: _whole_lengths(cast("dict[str, Any]", v))
        if isinstance(v, dict)
        else int(v)
        if k.startswith("original_max")
        else v
        for k, v in table.items()
    }
