"""The dry run of the compositions of the front: predicted ledger = recorded ledger, predicted peak = measured peak."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from shardwise.plan.layout import parse
from shardwise.prove.compare import Proof
from shardwise.prove.dryrun import prove_rank
from tests.support.front import NAMES, ODD, TWICE, Case, cases, odd
from tests.support.models import job, tiny

torch.set_num_threads(1)


def assert_proved(proof: Proof) -> None:
    """The command passes 1 %; what is computed is exact but for a few scalars, so that less is let through here."""
    assert not proof.differences()
    assert proof.ok
    assert abs(proof.memory_error) <= 0.001, (
        f"rank {proof.rank}: peak predicted {proof.predicted_peak_bytes}, measured {proof.measured_peak_bytes}"
    )


@pytest.mark.parametrize(("case", "precision"), list(zip(cases(8, NAMES), cycle(("fp64", "bf16")))), ids=str)
def test_a_composition_of_the_front_is_proved(case: Case, precision: str) -> None:
    """First, a middle and the last rank, on real tensors under the fake process group."""
    work, world = case.job(precision), case.layout.world_size
    for rank in sorted({0, world // 2, world - 1}):
        assert_proved(prove_rank(work, case.layout, rank, tensors="real"))


@pytest.mark.parametrize("micro_batches", [*ODD, 31])
@pytest.mark.parametrize("text", TWICE)
def test_an_odd_number_of_micro_batches_on_two_copies_is_proved(text: str, micro_batches: int) -> None:
    """On every rank."""
    layout, work = odd(text, micro_batches, "bf16")
    for rank in range(layout.world_size):
        assert_proved(prove_rank(work, layout, rank, tensors="real"))


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gpipe"}))
def test_a_long_step_is_continued_by_its_period(name: str, pp: int) -> None:
    """On every rank; what is executed and continued is what the whole step, executed, shows."""
    layout = parse(f"pp={pp} schedule={name} mb=1")
    work = job(tiny(max(3, layout.stages - 1), tied=True), f"{pp}xcpu", batch=32)
    for rank in range(pp):
        short, whole = (prove_rank(work, layout, rank, tensors="real", full=full) for full in (False, True))
        assert short.executed < 32
        assert not (*short.differences(), *whole.differences())
        # The prediction counts every loss; the peak comes before some of them, and a shorter step has fewer.
        peaks = [short.measured_peak_bytes, whole.measured_peak_bytes, whole.predicted_peak_bytes]
        assert peaks == sorted(peaks)
        assert peaks[-1] - peaks[0] <= 8 * (32 + 2)


@pytest.mark.parametrize("pp", [2, 4])
def test_gpipe_has_no_period(pp: int) -> None:
    """Every forward is alive at once: the step is executed whole."""
    work = job(tiny(3, tied=True), f"{pp}xcpu", batch=32)
    proof = prove_rank(work, parse(f"pp={pp} schedule=gpipe mb=1"), pp - 1, tensors="real")
    assert proof.executed == 32
    assert_proved(proof)
