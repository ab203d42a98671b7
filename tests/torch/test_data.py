"""The corpus and the order in which steps read it: one stream, whatever the layout."""

from __future__ import annotations

from pathlib import Path

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
