"""Columns that broadcast against each other, and the few distinct rows among many."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardwise.model.spec import Count
from shardwise.plan.batch import Bools, Ints, LayoutBatch


def _codes(columns: Sequence[Ints]) -> Ints:
    """[n] one number a row, equal for equal rows. The columns are not negative."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    return code


def rows_of_each(*columns: Ints) -> list[Ints]:
    """The rows, ascending, of every distinct key."""
    code = _codes(columns)
    order = np.argsort(code, kind="stable")
    _, starts = np.unique(code[order], return_index=True)
    return np.split(order, starts[1:])


def distinct(batch: LayoutBatch, names: Sequence[str]) -> tuple[LayoutBatch, Ints]:
    """(the rows of a grid's first axis that differ in these columns, which of them each row is)."""
    k = batch.shape[0]
    columns = [np.broadcast_to(getattr(batch, name)[:, 0, 0], k) for name in names]
    _, first, inverse = np.unique(_codes(columns), return_index=True, return_inverse=True)
    return batch.rows(first), inverse


def spread(value: Count, rows: int, inverse: Ints) -> Count:
    """A column of distinct rows [d, ..] as one of all rows."""
    return value[inverse] if np.ndim(value) == 3 and len(value) == rows > 1 else value


def where(mask: Bools, this: Count, other: Count) -> Count:
    """NumPy's, of whatever may be a column."""
    chosen: Count = np.where(mask, np.asarray(this), np.asarray(other))
    return chosen


def by_recompute(batch: LayoutBatch, value: Callable[[str], Sequence[Count]]) -> list[Count]:
    """`value` of each layout's own way of recomputing; it is asked once for each way that the batch has."""
    used: list[int] = np.unique(batch.recompute).tolist()
    found = [value(batch.recomputes[i]) for i in used]
    if len(used) == 1:
        return list(found[0])
    masks = [batch.recompute == i for i in used[1:]]
    out: list[Count] = []
    for values in zip(*found, strict=True):
        chosen: Count = values[0]
        for mask, other in zip(masks, values[1:], strict=True):
            chosen = where(mask, other, chosen)
        out.append(chosen)
    return out
