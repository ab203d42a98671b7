"""A table of a file, read key by key: whatever is wrong is collected, so that all faults are said at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, TypeVar, cast

from shardwise.cluster import ClusterError
from shardwise.model.hf import ModelError
from shardwise.plan.layout import LayoutError
from shardwise.plan.stack import StackError

T = TypeVar("T")

MAX_UNKNOWN: Final = 20
"""Unknown keys of one table that are named; the rest are counted."""


class Table:
    """A table of the file and its key path; faults of all tables go into one list."""

    def __init__(self, data: Mapping[str, Any], path: str, faults: list[str]) -> None:
        self.data, self.path, self.faults = data, path, faults

    def fault(self, key: str, said: str) -> None:
        self.faults.append(f"{self.path}{key}: {said}")

    def table(self, key: str, wanted: str) -> Table | None:
        """The table under a key; None, with a fault, where there is none."""
        found = self.data.get(key)
        if isinstance(found, dict):
            return Table(cast("dict[str, Any]", found), f"{self.path}{key}.", self.faults)
        self.fault(key, f"found {short(found)}; wanted {wanted}")
        return None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.data.get(key, default)
        if type(value) is int and low <= value <= high:
            return value
        self.fault(key, f"found {short(value)}; wanted a whole number from {low:,} to {high:,}")
        return low

    def number(self, key: str, low: float, high: float, default: float) -> float:
        value = self.data.get(key, default)
        if type(value) in (int, float) and low <= value <= high:
            return float(value)
        self.fault(key, f"found {short(value)}; wanted a number from {low:g} to {high:g}")
        return default

    def text(self, key: str, wanted: str, default: str | None = None) -> str:
        """A printable text: a file may not send control codes to the terminal that shows it."""
        value = self.data.get(key, default)
        if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 4096:
            return value
        self.fault(key, f"found {short(value)}; wanted {wanted}")
        return ""

    def choice(self, key: str, options: Sequence[str], default: str) -> str:
        """One of a few words."""
        value = self.data.get(key, default)
        if isinstance(value, str) and value in options:
            return value
        self.fault(key, f"found {short(value)}; wanted one of {', '.join(options)}")
        return default

    def known(self, keys: Iterable[str]) -> None:
        """A fault for every key that is none of these, with the nearest one."""
        names = list(dict.fromkeys(keys))
        unknown = [key for key in self.data if key not in names]
        for key in unknown[:MAX_UNKNOWN]:
            near = get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(names)}"
            self.fault(short(key)[1:-1], f"unknown key; {hint}")
        if len(unknown) > MAX_UNKNOWN:
            self.faults.append(
                f"{self.path.rstrip('.') or 'top level'}: {len(unknown) - MAX_UNKNOWN:,} more unknown keys"
            )

    def take(self, read: Callable[[], T], key: str) -> T | None:
        """What `read` returns, or None with its faults under `key`."""
        try:
            return read()
        except (ModelError, ClusterError, LayoutError, StackError) as error:
            inside = isinstance(self.data.get(key), dict)
            for fault in error.faults:
                # A fault of a value inside a table begins with that value's own key.
                dot = "." if inside and not fault.startswith("unknown key") else ": "
                self.faults.append(f"{self.path}{key}{dot}{fault}")
            return None


def short(value: object) -> str:
    """A value as it is shown in a fault."""
    try:
        text = "nothing" if value is None else repr(value)
    except RecursionError:
        text = "a deep table"
    return text if len(text) <= 40 else text[:37] + "..."
