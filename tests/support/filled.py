"""Buckets that a tiny model fills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from shardwise.plan import buckets
from shardwise.plan.rows import lowered_row


@contextmanager
def filled_by(numel: int) -> Iterator[None]:
    """A bucket is full once it has so many elements. Rows are kept by layout, so none may outlive this."""
    lowered_row.cache_clear()
    try:
        with patch.object(buckets, "BUCKET_NUMEL", numel):
            yield
    finally:
        lowered_row.cache_clear()
