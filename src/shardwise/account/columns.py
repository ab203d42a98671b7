"""Columns [n] with few distinct rows: what is asked once for each distinct key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.plan.batch import Ints

Number = TypeVar("Number", bound=np.generic)


def _codes(columns: Sequence[Ints]) -> Ints:
    """[n] one number a row, equal for equal rows. The columns are not negative."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    return code


def per_key(columns: Sequence[Ints], value: Callable[..., npt.NDArray[Number]]) -> npt.NDArray[Number]:
    """Stack value(*key) over the rows of `columns` [n] each; every distinct key is evaluated once."""
    _, first, inverse = np.unique(_codes(columns), return_index=True, return_inverse=True)
    keys = zip(*(column[first].tolist() for column in columns), strict=True)
    return np.stack([value(*key) for key in keys])[inverse]


def rows_of_each(*columns: Ints) -> list[Ints]:
    """The rows, ascending, of every distinct key."""
    code = _codes(columns)
    order = np.argsort(code, kind="stable")
    _, starts = np.unique(code[order], return_index=True)
    return np.split(order, starts[1:])
