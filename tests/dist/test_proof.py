"""The dry run of every composition of the front: predicted ledger = recorded ledger, predicted peak = measured peak."""

from __future__ import annotations

import pytest
import torch

from shardwise.prove.compare import Proof
from shardwise.prove.dryrun import prove_rank
from tests.support.front import Case, cases

torch.set_num_threads(1)


def assert_proved(proof: Proof) -> None:
    """The command passes 1 %; what is computed is exact but for a few scalars, so that less is let through here."""
    assert not proof.differences()
    assert proof.ok
    assert abs(proof.memory_error) <= 0.001, (
        f"rank {proof.rank}: peak predicted {proof.predicted_peak_bytes}, measured {proof.measured_peak_bytes}"
    )


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("case", cases(8), ids=str)
def test_every_composition_of_the_front_is_proved(case: Case, precision: str) -> None:
    """First, a middle and the last rank, on real tensors under the fake process group."""
    work, world = case.job(precision), case.layout.world_size
    for rank in sorted({0, world // 2, world - 1}):
        assert_proved(prove_rank(work, case.layout, rank, tensors="real"))
