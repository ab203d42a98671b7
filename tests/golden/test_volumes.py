"""Communication of one rank in one step, from the predicted ledger, against the volumes of the literature.

Payloads are whole tensors: what crosses the wire is (n-1)/n of a gather's or scatter's, twice that of an all-reduce's.
Volumes of context and expert parallelism, and of ZeRO-2, cannot be computed yet.
"""

from __future__ import annotations

from collections import Counter

import pytest

from shardwise.account.comm import predict_ledger
from shardwise.cluster import parse_cluster
from shardwise.collective import Kind
from shardwise.model.hf import load_model
from shardwise.plan.job import Job
from shardwise.plan.layout import parse

pytestmark = pytest.mark.golden

MODEL = load_model("llama-3.1-8b")
SEQ, BATCH = 8192, 64
P, LAYERS = MODEL.parameters, MODEL.layers
STREAM = 2 * SEQ * MODEL.hidden
"""2 T h: the residual stream of one micro-batch."""

Volume = tuple[int, int]
"""(number, bytes)."""


def ledger(text: str, of: str, rank: int = 0) -> dict[tuple[Kind, str], Volume]:
    """(kind, phase) -> volume, of modules whose name begins with `of`."""
    layout = parse(text)
    job = Job(MODEL, parse_cluster(f"{layout.world_size // 8}x8xh100"), SEQ, BATCH)
    number: Counter[tuple[Kind, str]] = Counter()
    total: Counter[tuple[Kind, str]] = Counter()
    for c, count in predict_ledger(job, layout, rank).items():
        if c.key.module.startswith(of):
            number[c.kind, str(c.key.phase)] += count
            total[c.kind, str(c.key.phase)] += count * c.payload_bytes
    return {key: (number[key], total[key]) for key in number}


def test_tensor_parallelism() -> None:
    """Megatron-LM (Shoeybi et al. 1909.08053, figure 4): two all-reduces forward, two backward, of 2 T h a layer."""
    found = ledger("tp=8 sp=0 mb=1", "layers.0.")
    each = (2 * BATCH, 2 * BATCH * STREAM)
    assert found == {(Kind.ALL_REDUCE, "F"): each, (Kind.ALL_REDUCE, "B"): each}


def test_sequence_parallelism() -> None:
    """Korthikanti et al. 2205.05198, section 4.2.2: two gathers and two scatters each way; and two gathers of the
    saved shards for the weight gradients.
    """
    found = ledger("tp=8 mb=1", "layers.0.")
    steps = {kind_phase: volume for kind_phase, volume in found.items() if kind_phase[1] in "FB"}
    two, four = ((n * BATCH, n * BATCH * STREAM) for n in (2, 4))
    assert steps == {
        (Kind.ALL_GATHER, "F"): two,
        (Kind.REDUCE_SCATTER, "F"): two,
        (Kind.ALL_GATHER, "B"): four,
        (Kind.REDUCE_SCATTER, "B"): two,
    }
    # Once a step, the gradients of both norms: each rank has seen a t-th of the tokens.
    assert ledger("tp=8 mb=1", "layers.0")[Kind.ALL_REDUCE, "reduce"] == (1, 2 * MODEL.hidden * 4)


def test_full_recomputation_repeats_the_forward_but_its_end() -> None:
    """The last scatter of a layer is not needed again."""
    found = ledger("tp=8 mb=1 recompute=full", "layers.0.")
    assert found[Kind.ALL_GATHER, "recompute"] == (2 * BATCH, 2 * BATCH * STREAM)
    assert found[Kind.REDUCE_SCATTER, "recompute"] == (BATCH, BATCH * STREAM)


def test_the_vocabulary_is_cut() -> None:
    """Three all-reduces of 4 T bytes in the loss, none in its backward (Megatron's vocabulary-parallel loss)."""
    found = ledger("tp=8 sp=0 mb=1", "head.loss")
    assert found == {(Kind.ALL_REDUCE, "F"): (3 * BATCH, 3 * BATCH * SEQ * 4)}


def test_data_parallelism() -> None:
    """One all-reduce of the gradients a step, however many micro-batches: 4 P bytes."""
    found = {k: v[1] for k, v in ledger("dp=8 mb=1", "").items() if k[1] in ("reduce", "gather")}
    assert found == {(Kind.ALL_REDUCE, "reduce"): 4 * P}


def test_zero_1() -> None:
    """ZeRO (1910.02054, section 7): a scatter of the gradients and a gather of the parameters, a step."""
    found = {k: v[1] for k, v in ledger("dp=8 zero=1 mb=1", "").items() if k[1] in ("reduce", "gather")}
    assert found == {(Kind.REDUCE_SCATTER, "reduce"): 4 * P, (Kind.ALL_GATHER, "gather"): 2 * P}


def test_zero_3() -> None:
    """Section 7.2.2: 3 P elements a micro-batch, two gathers and a scatter. A unit that runs twice in a row stays
    gathered: the head at each turn to the backward. The embedding's backward reads no weight: gathered once.
    """
    found = {k: v[1] for k, v in ledger("dp=8 zero=3 mb=1", "").items() if k[1] in ("reduce", "unshard", "gather")}
    m = BATCH // 8
    head = MODEL.vocab * MODEL.hidden + MODEL.hidden
    embedding = MODEL.vocab * MODEL.hidden
    kept = m * (head + embedding)
    assert found == {
        (Kind.ALL_GATHER, "unshard"): m * 2 * 2 * P - 2 * kept,
        (Kind.REDUCE_SCATTER, "reduce"): m * 4 * P,
    }


def test_hybrid_sharding() -> None:
    """Zhao et al. 2304.11277 (PyTorch FSDP), section 3.2.2: the shard's gradients are summed over the replicas. Ours
    does so once a step.
    """
    found = {k: v[1] for k, v in ledger("dp_replicate=2 dp_shard=8 zero=3 mb=1", "").items() if k[1] == "reduce"}
    assert found == {
        (Kind.REDUCE_SCATTER, "reduce"): BATCH // 16 * 4 * P,
        (Kind.ALL_REDUCE, "reduce"): 4 * P // 8,
    }


@pytest.mark.parametrize(("sp", "cut"), [(0, 1), (1, 2)])
@pytest.mark.parametrize(("schedule", "borders"), [("1f1b", 1), ("interleaved:2", 2)])
def test_pipeline(sp: int, cut: int, schedule: str, borders: int) -> None:
    """2 T h (a t-th under sequence parallelism) at each border and way; v times as many borders if interleaved
    (Narayanan et al. 2104.04473, section 2.2.2). The middle of four ranks has a border on both sides.
    """
    found = ledger(f"tp=2 sp={sp} pp=4 schedule={schedule} mb=1", "stages.", rank=2)
    each = (2 * borders * BATCH, 2 * borders * BATCH * STREAM // cut)
    assert found == {(Kind.SEND, "send"): each, (Kind.RECV, "recv"): each}
