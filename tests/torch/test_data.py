"""The corpus and the order in which steps read it: one stream, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.plan.layout import parse
from shardwise.train.data import Corpus, DataError, read_corpus
from shardwise.train.loop import sample_places

SEQ = 8


def corpus_of(samples: int, seed: int = 3, spare: int = 1) -> Corpus:
    """Every token is the number of its place, modulo 256."""
    return Corpus(np.arange(samples * SEQ + spare).astype(np.uint8), SEQ, seed)


@pytest.mark.parametrize(
    ("tokens", "samples"), [(0, 0), (1, 0), (SEQ, 0), (SEQ + 1, 1), (2 * SEQ, 1), (2 * SEQ + 1, 2)]
)
def test_a_sample_is_a_sequence_and_the_token_after_it(tokens: int, samples: int) -> None:
    assert Corpus(np.zeros(tokens, np.uint8), SEQ, 0).samples == samples


def test_an_epoch_holds_every_sample_once_and_the_next_one_in_another_order() -> None:
    corpus = corpus_of(20)
    first, second = (corpus.batch(range(20 * i, 20 * i + 20)) for i in range(2))
    assert first.dtype is torch.int64
    assert torch.equal(first - first[:, :1], torch.arange(SEQ + 1).expand(20, -1))  # consecutive tokens
    starts = [sorted(epoch[:, 0].tolist()) for epoch in (first, second)]
    assert starts == [list(range(0, 20 * SEQ, SEQ))] * 2
    assert not torch.equal(first, second)
    across = corpus.batch(range(15, 25))
    assert torch.equal(across, torch.cat([first[15:], second[:5]]))


def test_the_order_is_the_seeds() -> None:
    one, same, other = (corpus_of(20, seed).batch(range(20)) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    corpus_of(20, (1 << 63) - 1).batch(range(1))  # the largest seed of a plan


LAYOUTS = ("mb=1", "mb=4", "dp=2 mb=2", "dp=4 zero=1 mb=1", "dp_replicate=2 dp_shard=2 zero=3 mb=2", "dp=8 mb=1")


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_layout_takes_the_same_samples_in_a_step(text: str) -> None:
    layout = parse(text)
    for step in range(3):
        taken = [sample_places(layout, rank, 8, step) for rank in range(layout.dp)]
        assert {len(micro_batches) for micro_batches in taken} == {8 // (layout.dp * layout.mb)}
        in_turn = [place for micro_batch in zip(*taken, strict=True) for places in micro_batch for place in places]
        assert in_turn == list(range(8 * step, 8 * step + 8))


def test_files_are_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    corpus = read_corpus(str(path), SEQ, 0, least=31)
    assert corpus.tokens.tolist() == list(range(256))
    with pytest.raises(DataError, match="text: 256 bytes; one step takes 257: take a larger file, or a smaller"):
        read_corpus(str(path), SEQ, 0, least=32)
    with pytest.raises(DataError, match="not a regular file"):
        read_corpus(str(tmp_path), SEQ, 0, least=1)
    with pytest.raises(DataError, match="none: no such file"):
        read_corpus(str(tmp_path / "none"), SEQ, 0, least=1)


def test_the_standard_library_is_read_alike_each_time() -> None:
    one, two = (read_corpus("python-stdlib", 128, 0, least=16).tokens for _ in range(2))
    assert len(one) > 1 << 20
    assert np.array_equal(one, two)


# Token files ----------------------------------------------------------------------------------------------------------


def documents(folder: Path, *texts: str) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n\n" for i, text in enumerate(texts)))
    return path


def word_tokenizer(folder: Path, end: str | None = None) -> Path:
    """Of the tokenizers library: a token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "one", "two", "three", *([end] if end else [])]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def token_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".tokens")


def test_documents_are_joined_and_their_tokens_written_once(tmp_path: Path) -> None:
    path = documents(tmp_path, "one two", "é")
    first = read_corpus(str(path), 2, 0, least=1)
    assert bytes(first.tokens) == "one two\né\n".encode()
    assert isinstance(first.tokens, np.memmap)
    [name] = token_files(tmp_path)
    before = (tmp_path / name).stat().st_mtime_ns
    again = read_corpus(str(path), 2, 0, least=1)
    assert (tmp_path / name).stat().st_mtime_ns == before
    assert first.fingerprint() == again.fingerprint()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "corpus.jsonl"]), "no lock, nothing half-written"
    documents(tmp_path, "one two three", "é")
    assert read_corpus(str(path), 2, 0, least=1).fingerprint() != first.fingerprint()
    assert len(token_files(tmp_path)) == 2


def test_a_tokenizer_makes_tokens_and_ends_documents(tmp_path: Path) -> None:
    path, tokenizer = documents(tmp_path, "one three", "two four"), word_tokenizer(tmp_path, "</s>")
    corpus = read_corpus(str(path), 2, 0, least=1, vocab=5, tokenizer=tokenizer)
    assert corpus.tokens.tolist() == [1, 3, 4, 2, 0, 4]
    with pytest.raises(DataError, match=r"vocabulary of 4: the tokenizer .*tokenizer.json takes 5"):
        read_corpus(str(path), 2, 0, least=1, vocab=4, tokenizer=tokenizer)
    with pytest.raises(DataError, match="6 tokens; one step takes 7"):
        read_corpus(str(path), 2, 0, least=3, vocab=5, tokenizer=tokenizer)


def test_a_text_of_many_blocks_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one two\r\nthree\n" * 20_000)
    corpus = read_corpus(str(path), 2, 0, least=1, vocab=4, tokenizer=word_tokenizer(tmp_path))
    assert corpus.tokens.tolist() == [1, 2, 3] * 20_000


def test_a_folder_that_cannot_be_written_leaves_the_tokens_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = documents(tmp_path, "one two")
    real = Path.open

    def refused(self: Path, *words: Any, **names: Any) -> Any:
        if self.parent == tmp_path and self != path:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *words, **names)

    monkeypatch.setattr(Path, "open", refused)
    assert len(read_corpus(str(path), 2, 0, least=1).tokens) == 8
    assert token_files(tmp_path) == []
    assert len(token_files(tmp_path / "cache" / "shardwise")) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": 1}\n', 'line 2: no "text"'),
        ('{"text": "a"}\nnonsense\n', "line 2: not JSON"),
        ('["text"]\n', 'line 1: no "text"'),
        ("[" * 100_000, "line 1: not JSON"),
        (b'{"text": "\xff"}', "not UTF-8"),
        ("", "corpus.jsonl: 0 bytes"),
    ],
)
def test_documents_that_are_none_are_named_and_leave_nothing(
    content: str | bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read_corpus(str(path), 2, 0, least=1)
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".jsonl"] == token_files(tmp_path)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match="no such file"):
        read_corpus("python-stdlib", 2, 0, least=1, tokenizer=path)
    path.write_text("{}")
    with pytest.raises(DataError, match="no tokenizer of the tokenizers library"):
        read_corpus("python-stdlib", 2, 0, least=1, tokenizer=path)
