"""Files to values and back: strict (no text read as a number, no key unknown), with all faults at once."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

from cattrs import (
    AttributeValidationNote,
    BaseValidationError,
    Converter,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)

from shardwise.cluster.device import Bounds, Cluster, ClusterError

T = TypeVar("T")

_LONGEST_TEXT: Final = 300


class _UnwantedError(ValueError):
    """A value that is not what its field wants."""


def structure(data: object, kind: type[T]) -> T:
    """`data`, as read from TOML, as a dataclass of `device.py`.

    Raises ClusterError that lists every fault: the field's path, what was found and what was wanted.
    """
    try:
        return _CONVERTER.structure(data, kind)
    except Exception as error:
        faults = list(_faults(error, "", kind))
        if not faults:  # a fault of ours, not of the file
            raise
        raise ClusterError(faults) from None


def to_dict(cluster: Cluster) -> dict[str, Any]:
    """Plain tables, lists, numbers and text, as `from_dict` reads them and a TOML file holds them."""
    return _CONVERTER.unstructure(cluster)


def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, omit_if_default=True, unstruct_collection_overrides={tuple: list})
    converter.register_structure_hook(str, _text)
    converter.register_structure_hook(bool, _truth)
    converter.register_structure_hook_func(_is_bounded, _bounded)
    return converter


def _is_bounded(kind: Any) -> bool:
    return get_origin(kind) is Annotated and isinstance(get_args(kind)[1], Bounds)


def _text(value: object, _: Any) -> str:
    if not isinstance(value, str):
        raise _UnwantedError(f"found {reprlib.repr(value)}; wanted text")
    if not value.isprintable() or len(value) > _LONGEST_TEXT:
        raise _UnwantedError(f"found {reprlib.repr(value)}; wanted at most {_LONGEST_TEXT} printable characters")
    return value


def _truth(value: object, _: Any) -> bool:
    if not isinstance(value, bool):
        raise _UnwantedError(f"found {reprlib.repr(value)}; wanted true or false")
    return value


def _bounded(value: object, kind: Any) -> float:
    number, bounds = get_args(kind)
    allowed = int if number is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not bounds.low <= value <= bounds.high:
        raise _UnwantedError(f"found {reprlib.repr(value)}; wanted {_plainly(kind)}")
    return number(value)


def _faults(error: BaseException, path: str, kind: Any) -> Iterator[str]:
    """One line for each leaf of cattrs' tree of errors."""
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            step, inner_kind = _step(inner, kind)
            yield from _faults(inner, f"{path}.{step}" if path and step and step[0] != "[" else path + step, inner_kind)
        return
    where = f"{path}: " if path else ""
    if isinstance(error, ClusterError):
        yield from (f"{path}.{fault}" if path else fault for fault in error.faults)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = ", ".join(field.name for field in fields(error.cl))
        yield from (f"{where}unknown key {key!r}; known: {known}" for key in sorted(error.extra_fields))
    elif isinstance(error, KeyError):
        yield f"{where}missing; wanted {_plainly(kind)}"
    elif isinstance(error, _UnwantedError):
        yield f"{where}{error}"
    else:
        yield f"{where}wanted {_plainly(kind)}"


def _step(error: BaseException, kind: Any) -> tuple[str, Any]:
    """The field or the index that an error of a tree was noted for, and what that place wants."""
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return note.name, note.type
        if isinstance(note, IterableValidationNote):
            return f"[{note.index!r}]", note.type
    return "", kind


def _plainly(kind: Any) -> str:
    """What a place wants, in words."""
    if is_dataclass(kind):
        return f"a table with the keys {', '.join(field.name for field in fields(kind))}"
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if _is_bounded(kind):
        number, (low, high, unit) = get_args(kind)
        article = "a whole number" if number is int else "a number"
        return f"{article} from {low:,.12g} to {high:,.12g} {unit}".rstrip()
    if kind is str:
        return "text"
    if kind is bool:
        return "true or false"
    return "a table" if get_origin(kind) is Mapping else "a list"


_CONVERTER = _converter()
