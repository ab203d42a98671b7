"""Byte-level text, packed: a global cursor of samples that every layout reads alike."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from shardwise.plan.plan import STDLIB

BYTES = 256


class DataError(ValueError):
    """A corpus that cannot be read, or is too small."""


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Bytes as tokens; sample i is `seq_len + 1` of them from i * seq_len on. Each epoch has its own order."""

    tokens: np.ndarray
    """uint8 [n]"""
    seq_len: int
    seed: int

    @property
    def samples(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def batch(self, indices: range) -> torch.Tensor:
        """Samples at these places of the endless stream: int64 [len(indices), seq_len + 1]."""
        starts = np.array([self._start(i) for i in indices])
        rows = self.tokens[starts[:, None] + np.arange(self.seq_len + 1)]
        return torch.from_numpy(rows.astype(np.int64))

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self.samples)
        return int(_order(self.seed, epoch, self.samples)[place]) * self.seq_len


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of one epoch's samples, a function of (seed, epoch) alone."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(samples)


def read_corpus(source: str, seq_len: int, seed: int, least: int) -> Corpus:
    """`python-stdlib`, or a file's bytes. Raises DataError where fewer than `least` samples come of it."""
    data = b"".join(path.read_bytes() for path in _files(source))
    corpus = Corpus(np.frombuffer(data, dtype=np.uint8), seq_len, seed)
    if corpus.samples < least:
        remedy = "take a larger file, or a smaller global_batch or seq_len"
        raise DataError(f"{source}: {len(data):,} bytes; one step takes {least * seq_len + 1:,}: {remedy}")
    return corpus


def _files(source: str) -> list[Path]:
    if source == STDLIB:
        return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{source}: {'not a regular file' if path.exists() else 'no such file'}")
    return [path]
