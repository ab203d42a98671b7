"""Text as packed tokens, memory-mapped: a global cursor of samples that every layout reads alike."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from shardwise.plan.settings import STDLIB
from shardwise.train.tokens import BYTES, Bytes, DataError, Encoder, TokenizerFile, encoded, is_documents

__all__ = ["BYTES", "Corpus", "DataError", "read_corpus"]

PROBES, PROBE_TOKENS = 64, 4096
"""Of a fingerprint: so many stretches of the corpus, evenly spaced, of so many tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Tokens; sample i is `seq_len + 1` of them from i * seq_len on. Each epoch has its own order."""

    tokens: np.ndarray
    """unsigned integers [n]"""
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

    def fingerprint(self) -> str:
        """Tells corpora apart by their tokens, wherever the file lies: the count, and a digest of stretches of them."""
        found, last = hashlib.sha256(), max(0, len(self.tokens) - PROBE_TOKENS)
        for start in np.linspace(0, last, PROBES).astype(np.int64):
            found.update(self.tokens[start : start + PROBE_TOKENS].astype("<u4").tobytes())
        return f"{len(self.tokens):,} tokens, {found.hexdigest()[:16]}"

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self.samples)
        return int(_order(self.seed, epoch, self.samples)[place]) * self.seq_len


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of one epoch's samples, a function of (seed, epoch) alone."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(samples)


def read_corpus(
    source: str, seq_len: int, seed: int, least: int, *, vocab: int = BYTES, tokenizer: Path | None = None
) -> Corpus:
    """`python-stdlib`, a text file or a JSONL file with a "text" a line; as bytes, or by a `tokenizers` file.

    Raises DataError where fewer than `least` samples come of it, or where a token is none of the `vocab` of the model.
    """
    encoder = Bytes() if tokenizer is None else TokenizerFile.read(tokenizer)
    if vocab < encoder.vocab:
        raise DataError(f"vocabulary of {vocab}: {encoder.title} takes {encoder.vocab}")
    tokens = _tokens(source, encoder)
    corpus = Corpus(tokens, seq_len, seed)
    if corpus.samples < least:
        remedy = "take a larger file, or a smaller global_batch or seq_len"
        raise DataError(f"{source}: {len(tokens):,} {encoder.unit}; one step takes {least * seq_len + 1:,}: {remedy}")
    return corpus


def _tokens(source: str, encoder: Encoder) -> np.ndarray:
    """[n], mapped from a file where there is one that holds them."""
    if source == STDLIB:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        data = b"".join(path.read_bytes() for path in files)
        if isinstance(encoder, Bytes):
            return np.frombuffer(data, dtype=np.uint8)
        return encoder.encode([data.decode("utf-8", "replace")])
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{source}: {'not a regular file' if path.exists() else 'no such file'}")
    if not isinstance(encoder, Bytes) or is_documents(path):
        path = encoded(path, encoder)
    if path.stat().st_size == 0:  # nothing can be mapped
        return np.empty(0, encoder.dtype)
    return np.memmap(path, dtype=encoder.dtype, mode="r")
