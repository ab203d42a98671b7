"""Text files into token files: encoded once, kept beside the corpus or in a cache folder, whole or not there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

BYTES = 256

FORMAT = 1
"""Of the token files: part of their names, so that no other version's is taken."""

BATCH = 1024
"""Documents, or blocks of lines, that are encoded at once."""

BLOCK_CHARACTERS = 1 << 16
"""A plain text is encoded in blocks that end with a line, so that no file is too large."""

LOCK_S = 3600.0
"""Longest wait for another process that encodes the same corpus."""

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Tokens that end a document, the first that a tokenizer knows."""


class DataError(ValueError):
    """A corpus or a tokenizer that cannot be read, or is too small."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Every byte of UTF-8 is a token; a newline ends a document."""

    vocab: ClassVar[int] = BYTES
    title: ClassVar[str] = "byte-level text"
    unit: ClassVar[str] = "bytes"
    key: ClassVar[str] = "bytes"
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)

    def encode(self, documents: list[str]) -> np.ndarray:
        """The tokens [n] of documents, each with its end."""
        return np.frombuffer("".join(f"{text}\n" for text in documents).encode(), dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A `tokenizer.json` of the tokenizers library."""

    tokenizer: Any
    title: str
    key: str
    """digest of the file"""
    vocab: int
    end: int | None
    unit: ClassVar[str] = "tokens"

    @staticmethod
    def read(path: Path) -> TokenizerFile:
        """Raises DataError for what is no tokenizer, ModuleNotFoundError where the library is missing."""
        from tokenizers import Tokenizer

        if not path.is_file():
            raise DataError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        content = path.read_bytes()
        try:
            made = Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{path}: no tokenizer of the tokenizers library: {error}") from None
        made.no_truncation()
        vocab = max(made.get_vocab().values(), default=-1) + 1
        end = next((number for name in ENDS if (number := made.token_to_id(name)) is not None), None)
        return TokenizerFile(made, f"the tokenizer {path}", hashlib.sha256(content).hexdigest(), vocab, end)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2") if self.vocab <= 1 << 16 else np.dtype("<u4")

    def encode(self, documents: list[str]) -> np.ndarray:
        """The tokens [n] of documents, each with its end where the tokenizer knows one."""
        return self._encode(documents, [] if self.end is None else [self.end])

    def encode_parts(self, parts: list[str]) -> np.ndarray:
        """The tokens [n] of parts of one document."""
        return self._encode(parts, [])

    def _encode(self, texts: list[str], tail: list[int]) -> np.ndarray:
        found = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return np.array([token for one in found for token in (*one.ids, *tail)], dtype=self.dtype)


Encoder = Bytes | TokenizerFile


def is_documents(path: Path) -> bool:
    """Whether a file has a JSON object a line."""
    return path.suffix in (".jsonl", ".ndjson")


def encoded(corpus: Path, encoder: Encoder) -> Path:
    """The file of a corpus' tokens: found, or written now by one of all processes that ask."""
    name = _name(corpus, encoder)
    for folder in _folders(corpus):
        if (folder / name).is_file():
            return folder / name
    for folder in _folders(corpus):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder / f"{name}.lock"):
                if not (folder / name).is_file():
                    _write(corpus, encoder, folder / name)
                return folder / name
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno != 30:  # a read-only file system
                raise
    raise PermissionError(13, "neither the corpus' folder nor the cache can be written", str(corpus))


def _folders(corpus: Path) -> tuple[Path, Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return corpus.resolve().parent, cache / "shardwise"


def _name(corpus: Path, encoder: Encoder) -> str:
    """Of the file's place, size and time, and of the encoder: a changed corpus has another name."""
    of, where = corpus.stat(), corpus.resolve()
    said = f"{FORMAT}/{where}/{of.st_size}/{of.st_mtime_ns}/{encoder.key}"
    return f".{where.name}.{hashlib.sha256(said.encode()).hexdigest()[:16]}.tokens"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that ends with its process. Raises DataError after LOCK_S."""
    deadline = time.monotonic() + LOCK_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    said = f"{path}: another process has held it for {LOCK_S:g} s while it encodes the corpus"
                    raise DataError(said) from None
                time.sleep(0.1)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _write(corpus: Path, encoder: Encoder, target: Path) -> None:
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with beside.open("xb") as file:
            for tokens in _encode(corpus, encoder):
                file.write(tokens.tobytes())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _encode(corpus: Path, encoder: Encoder) -> Iterator[np.ndarray]:
    if is_documents(corpus):
        for documents in _batches(_documents(corpus)):
            yield encoder.encode(documents)
    else:
        assert isinstance(encoder, TokenizerFile)  # a text's bytes are its tokens
        for parts in _batches(_blocks(corpus)):
            yield encoder.encode_parts(parts)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    left = iter(texts)
    while batch := list(islice(left, BATCH)):
        yield batch


def _documents(corpus: Path) -> Iterator[str]:
    with corpus.open(encoding="utf-8-sig", errors="strict") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(line, f"{corpus}: line {number:,}")
        except UnicodeDecodeError as error:
            raise DataError(f"{corpus}: not UTF-8: {error.reason}") from None


def _text_of(line: str, where: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: no "text"; wanted an object such as {{"text": "..."}} a line')
    return text


def _blocks(corpus: Path) -> Iterator[str]:
    with corpus.open(encoding="utf-8", errors="replace", newline="") as file:
        while lines := file.readlines(BLOCK_CHARACTERS):
            yield "".join(lines)
