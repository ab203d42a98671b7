"""Limits of a search: what is pinned to a value, what is forbidden. `tp=8`, `cp`, `schedule=interleaved`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.plan.layout import CP_KINDS, KEYS, MAX_DEGREE, ORDERS, ZERO, LayoutError, recompute_text
from shardwise.schedule import NAMES

DEGREES = ("tp", "sp", "cp", "pp", "ep", "etp", "dp", "dp_replicate", "dp_shard", "zero", "mb")

PINNED = tuple(key for key in KEYS if key != "split")
"""Keys that a search can be held to: it tries the default split alone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`pins[key]` is the only value, `forbids[key]` the values that are not tried; None among them: none but the
    neutral one (no cp at all). `runnable`: only what our own runtime runs."""

    pins: dict[str, str] = field(default_factory=dict[str, str])
    forbids: dict[str, tuple[str | None, ...]] = field(default_factory=dict[str, tuple[str | None, ...]])
    runnable: bool = False

    def allows(self, key: str, value: int | str) -> bool:
        """Whether a value of a key may be tried."""
        text = str(value)
        if key in self.pins and not _same(key, text, self.pins[key]):
            return False
        neutral = {"zero": "0", "sp": "0", "recompute": "none", "schedule": "1f1b", "order": ORDERS[0]}.get(key, "1")
        return not any(text != neutral if bad is None else _same(key, text, bad) for bad in self.forbids.get(key, ()))


def _same(key: str, value: str, wanted: str) -> bool:
    """A schedule's family stands for all its numbers of virtual stages."""
    return value == wanted or (key == "schedule" and value.partition(":")[0] == wanted)


def read_limits(pins: Sequence[str], forbids: Sequence[str], runnable: bool = False) -> Limits:
    """`["tp=8 pp=2"]` and `["cp", "zero=3"]`. Raises LayoutError with all faults."""
    faults: list[str] = []
    pinned: dict[str, str] = {}
    for word in _words(pins):
        key, equals, value = word.partition("=")
        if not equals:
            faults.append(f"--pin {word[:40]}: wanted key=value, for example tp=8")
        elif key in pinned and pinned[key] != value:
            faults.append(f"--pin {key}: pinned to {pinned[key]} and to {value[:40]}")
        elif _known(f"--pin {word[:40]}", key, value, faults):
            pinned[key] = value
    forbidden: dict[str, list[str | None]] = {}
    for word in _words(forbids):
        key, equals, value = word.partition("=")
        if _known(f"--forbid {word[:40]}", key, value if equals else None, faults):
            forbidden.setdefault(key, []).append(value if equals else None)
    if faults:
        raise LayoutError(faults)
    return Limits(pinned, {key: tuple(values) for key, values in forbidden.items()}, runnable)


def _words(texts: Sequence[str]) -> list[str]:
    return [word.rstrip(",;") for text in texts for word in text.split()]


def _known(where: str, key: str, value: str | None, faults: list[str]) -> bool:
    """Whether a key and its value can be held to; a fault if not."""
    if key not in PINNED:
        faults.append(f"{where}: no such key; the keys are {' '.join(PINNED)}")
        return False
    if value is None:
        return True
    choices = {
        "cp_kind": CP_KINDS,
        "order": ORDERS,
        "zero": tuple(map(str, ZERO)),
        "sp": ("0", "1"),
        "schedule": tuple(dict.fromkeys(n.partition(":")[0] for n in NAMES)),
    }.get(key)
    if key == "recompute":
        try:
            recompute_text(value)
        except LayoutError as error:
            faults.append(f"{where}: {error}")
            return False
        return True
    if choices is not None and value.partition(":")[0] not in choices:
        faults.append(f"{where}: wanted one of {', '.join(choices)}")
        return False
    if choices is None and not (
        value.isascii() and value.isdigit() and 1 <= len(value) < 9 and 1 <= int(value) <= MAX_DEGREE
    ):
        faults.append(f"{where}: wanted a whole number from 1 to {MAX_DEGREE:,}")
        return False
    return True
