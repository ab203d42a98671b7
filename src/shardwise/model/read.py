"""Reading one model description: every key is checked, every fault is collected, what was meant is remembered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, cast

MAX_DIM = 1 << 24
"""Larger than any real dim (vocabularies reach 2^18), small enough that no product of a few overflows a float."""

MAX_LAYERS = 1 << 12
"""Far more than any real model has, few enough that every layer's collectives can be listed one by one."""

MANY_KEYS = 200
"""Keys of a config among which a misspelt one is looked for."""

INERT: Final[Mapping[str, tuple[object, ...]]] = {
    "add_cross_attention": (None, False),
    "alibi": (None, False),
    "attention_bias": (None, False),
    "attention_dropout": (None, 0, 0.0),
    "attention_k_eq_v": (None, False),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "final_logit_softcapping": (None,),
    "layer_types": (None,),
    "mlp_bias": (None, False),
    "n_routed_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "num_loops": (None, 1),
    "num_nextn_predict_layers": (None, 0),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "shared_expert_intermediate_size": (None, 0),
    "sliding_window": (None,),
    "vision_config": (None,),
}
"""Keys that would make another model of a family that does not read them, with the values at which they do not."""


class ModelError(ValueError):
    """A model description that cannot be used; `faults` says all that is wrong with it."""

    def __init__(self, where: str, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"{where}: {fault}" for fault in faults))


def short(value: object) -> str:
    """A value as an error quotes it: at most 40 characters."""
    try:
        text = "nothing" if value is None else repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer of too many digits
        text = "a value beyond all bounds"
    return text if len(text) <= 40 else text[:37] + "..."


def as_list(value: object) -> list[object] | None:
    """A JSON list, or None."""
    return cast("list[object]", value) if isinstance(value, list) else None


class Reader:
    """Reads keys of one config. `faults` has all that is wrong; `meant` what each key was read as, defaults among it.

    What a read returns after a fault is a harmless stand-in, so that the rest can be read too.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.faults: list[str] = []
        self.meant: dict[str, Any] = {}
        self.seen: set[str] = set()

    def raw(self, key: str, *also: str) -> Any:
        """The value under a key, or under another name of it; two names must agree."""
        self.seen |= {key, *also}
        found = {k: self.config[k] for k in (key, *also) if self.config.get(k) is not None}
        first, *others = found or [key]
        for other in others:
            if found[other] != found[first]:
                self.faults.append(f"{other}: found {short(found[other])}, but {first} says {short(found[first])}")
        return found.get(first)

    def integer(self, key: str, *also: str, default: int | None = None, least: int = 1, most: int = MAX_DIM) -> int:
        """A whole number from `least` to `most`."""
        value = self.raw(key, *also)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.faults.append(
                f"{key}: found {short(value)}, wanted a whole number from {least} to {most:,}{self._near(key, value)}"
            )
            return max(least, 1)
        self.meant[key] = value
        return value

    def _near(self, key: str, value: object) -> str:
        others = [k for k in list(self.config)[:MANY_KEYS] if k not in self.seen] if value is None else []
        near = get_close_matches(key, others, n=1, cutoff=0.8)
        return f"; is {short(near[0])} meant?" if near else ""

    def number(self, key: str, *also: str, default: float) -> float:
        """A positive number."""
        value = self.raw(key, *also)
        if value is None and self.config.get(key, default) is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
            self.faults.append(f"{key}: found {short(value)}, wanted a positive number")
            return default
        self.meant[key] = float(value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        self.seen.add(key)
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            self.faults.append(f"{key}: found {short(value)}, wanted true or false")
            return default
        self.meant[key] = value
        return value

    def choice(self, key: str, wanted: Sequence[str], *also: str) -> str:
        """One of some words; the first is the default."""
        value = self.raw(key, *also)
        if value is None:
            value = wanted[0]
        if not isinstance(value, str) or value not in wanted:
            known = " or ".join(map(repr, wanted))
            self.faults.append(f"{key}: found {short(value)}, wanted {known}")
            return wanted[0]
        self.meant[key] = value
        return value

    def only(self, key: str, *harmless: object) -> None:
        """A key that must have one of these values, or be absent."""
        if (found := self.raw(key)) is not None and found not in harmless:
            self.faults.append(f"{key}: found {short(found)}, wanted {short(harmless[0])}")

    def words(self, key: str, default: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
        """One word a layer: as many as `default` has, each one of `wanted`. Remembered where it is not the default."""
        value: object = self.raw(key)
        found = as_list(value) or []
        if value is not None and len(found) != len(default):
            self.faults.append(f"{key}: found {short(value)}, wanted a list of {len(default)} words, one a layer")
        strange = [word for word in found if not isinstance(word, str) or word not in wanted]
        if strange:
            self.faults.append(f"{key}: found {short(strange[0])}, wanted {' or '.join(map(repr, wanted))}")
        if strange or len(found) != len(default):
            return tuple(default)
        if found != list(default):
            self.meant[key] = found
        return tuple(map(str, found))

    def pass_by(self, *keys: str) -> None:
        """Keys that make no other model of this family, whatever they say."""
        self.seen |= set(keys)

    def unread(self) -> None:
        """A fault for every key that would make another model and that nobody asked for."""
        for key, harmless in INERT.items():
            found = self.config.get(key)
            if key not in self.seen and found not in harmless:
                self.faults.append(f"{key}: found {short(found)}, which these blocks do not have")

    def text(self) -> str:
        """Canonical JSON of all that was read."""
        return json.dumps(self.meant, sort_keys=True)
