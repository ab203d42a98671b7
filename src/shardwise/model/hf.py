"""A Hugging Face `config.json` -> Model: reading the file; `families` has what its keys mean."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

from shardwise.files import FileError, read_small
from shardwise.model.families import FAMILIES, abstract
from shardwise.model.read import ModelError, Reader, short
from shardwise.model.spec import Model

MAX_FILE_BYTES = 1 << 20

_KEYS = """
model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
vocab_size tie_word_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters hidden_act attention_bias
mlp_bias num_loops sliding_window sliding_window_pattern use_sliding_window max_window_layers layer_types
hidden_activation
num_local_experts num_experts num_experts_per_tok moe_intermediate_size decoder_sparse_step mlp_only_layers
n_routed_experts n_shared_experts first_k_dense_replace num_nextn_predict_layers q_lora_rank kv_lora_rank
qk_nope_head_dim qk_rope_head_dim v_head_dim
n_embd n_inner n_layer n_head n_positions layer_norm_epsilon activation_function
hybrid_override_pattern mtp_hybrid_override_pattern mlp_hidden_act mamba_hidden_act mamba_num_heads mamba_head_dim
ssm_state_size n_groups conv_kernel chunk_size use_bias use_conv_bias moe_shared_expert_intermediate_size
moe_latent_size
n_embed n_ctx max_position_embeddings num_mtp_layers layers_block_type mtp_layers_block_type text_config vision_config
mamba_d_state mamba_n_groups mamba_chunk_size mamba_d_conv norm_eps _sliding_window_pattern experts_per_token
attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar use_bidirectional_attention clip_qkv alibi
apply_residual_connection_post_layernorm quantization_config swiglu_limit swiglu_alpha moe_layer_freq residual_in_fp32
D F L G V
"""

KEYS: Final = tuple(_KEYS.split())
"""Keys of a config that some family reads. Hugging Face's files have many more, which say nothing about the model."""


def from_config(config: Mapping[str, Any], name: str, where: str = "model") -> Model:
    """The model that a Hugging Face config describes. Raises ModelError with all faults at once."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        near = get_close_matches(family, FAMILIES, n=1) if isinstance(family, str) else []
        hint = f"; the nearest is {near[0]}" if near else ""
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(where, [f"model_type: found {short(family)}, wanted one of {known}{hint}"])
    read = Reader(config)
    read.meant["model_type"] = family
    model = FAMILIES[family](name, read)
    read.unread()
    if read.faults:
        raise ModelError(where, read.faults)
    return model


def to_config(model: Model) -> dict[str, Any]:
    """The config of a model, in Hugging Face's keys: `from_config` reads it back."""
    return json.loads(model.config)


def catalog() -> list[str]:
    """Names of the models that come with the package."""
    folder = resources.files("shardwise.model") / "catalog"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def load_model(spec: str) -> Model:
    """A catalogue name, a `config.json`, a folder that holds one, or sizes for the whiteboard. Raises ModelError.

    "mlp:D=16384,F=53248,L=126" is D -> F -> D, L times (G=1: gated; V: vocabulary); "gpt:L=24,h=2304,a=24" a GPT.
    """
    if spec in catalog():
        text = (resources.files("shardwise.model") / "catalog" / f"{spec}.json").read_text(encoding="utf-8")
        return from_config(json.loads(text), spec, spec)
    kind, colon, sizes = spec.partition(":")
    if colon and kind in WHITEBOARD:
        return _whiteboard(spec, kind, sizes)
    path = Path(spec)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        raise ModelError(spec, [_nothing_there(spec, path)])
    named = path.resolve()
    return from_config(_read_json(path), _name(named.parent if named.name == "config.json" else named), str(path))


WHITEBOARD: Final[Mapping[str, Mapping[str, str]]] = {
    "mlp": {key: key for key in abstract.KEYS},
    "gpt": {"L": "n_layer", "h": "n_embd", "a": "n_head", "f": "n_inner", "V": "vocab_size", "s": "n_positions"},
}
"""The keys of a config that letters stand for."""

_GIVEN: Final[Mapping[str, Mapping[str, object]]] = {
    "mlp": {"model_type": "mlp"},
    # The vocabulary and length of Narayanan et al.
    "gpt": {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048},
}


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, seq_len: int = 2048) -> Model:
    """A GPT of these sizes, as Narayanan et al. (2104.04473, table 1) train them. Raises ModelError."""
    return load_model(f"gpt:L={layers},h={hidden},a={heads},V={vocab},s={seq_len}")


def _whiteboard(spec: str, kind: str, sizes: str) -> Model:
    """A model from letters and sizes."""
    letters, name = WHITEBOARD[kind], _printable(spec)
    given: dict[str, int] = {}
    faults: dict[str, str] = {}
    for part in sizes.split(",", maxsplit=2 * len(letters)):
        letter, equals, value = (x.strip() for x in part.partition("="))
        if not equals or letter not in letters:
            faults[short(part)] = f"wanted letter=size, with a letter of {', '.join(letters)}"
        elif letters[letter] in given:
            faults[letter] = "is there more than once"
        elif not re.fullmatch(r"-?[0-9]{1,40}", value):
            faults[letter] = f"found {short(value)}, wanted a whole number"
        else:
            given[letters[letter]] = int(value)
    back = {key: letter for letter, key in letters.items()}
    try:
        model = from_config({**_GIVEN[kind], **given}, name, name)
    except ModelError as error:
        for key, _, said in (fault.partition(": ") for fault in error.faults):
            faults.setdefault(back.get(key, key), said)
    else:
        if not faults:
            return model
    raise ModelError(name, [f"{where}: {said}" for where, said in faults.items()])


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
    return _printable(path.stem if path.suffix == ".json" else path.name)


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name[:200]) or "model"


def _read_json(path: Path) -> dict[str, Any]:
    """A small regular file's JSON object, in which no key comes twice. Raises ModelError, OSError as the system."""

    def refuse(said: str) -> ModelError:
        return ModelError(str(path), [said])

    try:
        content = read_small(path, "a config.json", MAX_FILE_BYTES)
    except FileError as error:
        raise refuse(str(error)) from None
    if not content.strip():
        raise refuse("empty; wanted a JSON object of the model's dimensions")
    try:
        found = json.loads(content, object_pairs_hook=_once)
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
        raise ValueError(f"{short(twice)} is there more than once")
    return found
