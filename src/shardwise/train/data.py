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


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes as tokens; sample i is `seq_len + 1` of them from i * seq_len on. Each epoch has its own order."""

    tokens: torch.Tensor
    """uint8 [n]"""
    seq_len: int
    seed: int

    @property
    def samples(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, indices: range) -> torch.Tensor:
        """Samples at these places of the endless stream: int64 [len(indices), seq_len + 1]."""
        rows = [self._sample(i) for i in indices]
        return torch.stack(rows).to(torch.int64)

    def _sample(self, index: int) -> torch.Tensor:
        epoch, place = divmod(index, self.samples)
        start = int(_order(self.seed, epoch, self.samples)[place]) * self.seq_len
        return self.tokens[start : start + self.seq_len + 1]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of one epoch's samples, a function of (seed, epoch) alone."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(samples)


def read_corpus(source: str, seq_len: int, seed: int, least: int) -> Corpus:
    """`python-stdlib`, or a file's bytes. Raises DataError where fewer than `least` samples come of it."""
    data = b"".join(path.read_bytes() for path in _files(source))
    corpus = Corpus(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8), seq_len, seed)
    if corpus.samples < least:
        wanted = least * seq_len + 1
        raise DataError(f"{source}: {len(data):,} bytes are too few, one step takes {wanted:,}")
    return corpus


def _files(source: str) -> list[Path]:
    if source == STDLIB:
        return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{source}: no such file")
    return [path]
