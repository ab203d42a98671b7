"""What is known of the published tables beside their rows: `data/words.toml`, `data/sources.toml`, `data/models.toml`.

Words of the tables, what each source leaves out, and which config a model's name stands for. Data, so that a new source
is an entry and not code.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Final

MEMORIES: Final = ("", "allocated", "reserved", "device")
"""What a memory column may measure: nothing, bytes of tensors, what the allocator holds, what the driver reports."""


@dataclass(frozen=True, slots=True)
class Words:
    """Words of the tables -> ours."""

    excluded: Mapping[str, str]
    accelerators: Mapping[str, str]
    precisions: Mapping[str, str]
    schedules: Mapping[str, str]
    recomputes: dict[str, str]
    conventions: Mapping[str, tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a blank means in a source. None: it is not guessed."""

    zero: int | None = None
    sp: bool = False
    recompute: str | None = None
    schedule: str = ""
    vpp: int | None = None
    micro_batch: int | None = None
    precision: str | None = None
    cp_kind: str = "ring"
    etp_is_tp: bool = False
    """Megatron's default: experts are cut by tp as all else is."""
    ep_is_shards: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """One source of rows, and the software stack that they ran on. `data/sources.toml` says what each field means."""

    name: str
    match: str
    stack: str
    memory: str = ""
    between_nodes_Gbps_per_node: float | None = None
    selective: str = ""
    shards: str = ""
    pure: str = ""
    sweep: bool = False
    defaults: Defaults = field(default_factory=Defaults)


@dataclass(frozen=True, slots=True)
class ModelRule:
    """How the config of the models of some name is made from a row."""

    match: re.Pattern[str]
    like: str
    config: Mapping[str, Any]
    columns: Mapping[str, str]
    repeat: str


@cache
def words() -> Words:
    return _words(**_load("words"))


def _words(conventions: Mapping[str, tuple[str, float]], **tables: Any) -> Words:
    return Words(**tables, conventions={text: (name, factor) for text, (name, factor) in conventions.items()})


@cache
def sources() -> tuple[Source, ...]:
    """In the order in which they are tried."""
    return tuple(_source(**entry) for entry in _load("sources")["sources"])


def _source(defaults: Mapping[str, Any] | None = None, **fields: Any) -> Source:
    return Source(**fields, defaults=Defaults(**(defaults or {})))


@cache
def model_rules() -> tuple[ModelRule, ...]:
    """In the order in which they are tried."""
    found = _load("models")
    return tuple(
        ModelRule(
            match=re.compile(entry["match"]),
            like=entry.get("like", ""),
            config=entry.get("config", {}),
            columns=found["columns"][entry["columns"]],
            repeat=entry.get("repeat", ""),
        )
        for entry in found["models"]
    )


def source_of(text: str) -> Source | None:
    """The entry of a row's source, where there is one."""
    return next((source for source in sources() if source.match in text), None)


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files("shardwise.score") / "data" / f"{name}.toml").read_text("utf-8"))
