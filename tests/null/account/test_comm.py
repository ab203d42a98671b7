"""The predicted ledger over the whole field: volumes by formula, and ranks that agree on every collective."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwise.account.comm import predict_ledger
from shardwise.cluster import parse_cluster
from shardwise.collective import Collective, Kind, Ledger, Phase
from shardwise.model.hf import load_model
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout, parse
from shardwise.plan.rules import findings
from tests.support.drawn import LOOPED, drawn, job_of

SEQ, BATCH = 8192, 64
MODEL = load_model("llama-3.1-8b")
P, M, HEAD = MODEL.parameters, BATCH, 128
Q, K = 32 * HEAD, 8 * HEAD


def ledger(text: str, name: str = "llama-3.1-8b", rank: int = 0) -> Ledger:
    layout = parse(text)
    job = Job(load_model(name), parse_cluster(f"{layout.world_size // 8}x8xh100"), SEQ, BATCH)
    assert not findings(layout, job)
    return predict_ledger(job, layout, rank)


def moved(found: Ledger, axis: str, of: str = "", phases: str = "") -> dict[tuple[Kind, str], tuple[int, int]]:
    """(kind, phase) -> (number, bytes) of one axis, in modules whose name begins with `of`."""
    number, total = Counter[tuple[Kind, str]](), Counter[tuple[Kind, str]]()
    for c, n in found.items():
        if c.key.axis == axis and c.key.module.startswith(of) and (not phases or c.key.phase in phases.split()):
            number[c.kind, str(c.key.phase)] += n
            total[c.kind, str(c.key.phase)] += n * c.payload_bytes
    return {key: (number[key], total[key]) for key in number}


# --------------------------------------------------------------------------------------------------------- context


@pytest.mark.parametrize("cp", [2, 8])
def test_a_ring_passes_keys_and_values_round(cp: int) -> None:
    """Liu et al. 2310.01889: c - 1 steps of K and V forward; again backward, with c of their gradients, in float32."""
    found = moved(ledger(f"cp={cp} dp={64 // cp} mb=1"), "cp", "layers.0.")
    m, keys = M // (64 // cp), 2 * 2 * K * SEQ // cp
    forward, backward = (m * (cp - 1), m * (cp - 1) * keys), (m * (2 * cp - 1), m * ((cp - 1) * keys + cp * 2 * keys))
    assert found == {
        (kind, phase): n for kind in (Kind.SEND, Kind.RECV) for phase, n in (("F", forward), ("B", backward))
    }


def test_ulysses_exchanges_heads_for_tokens() -> None:
    """Jacobs et al. 2309.14509: queries, keys, values and the output, each way."""
    found = moved(ledger("cp=4 cp_kind=ulysses dp=16 mb=1"), "cp", "layers.0.")
    m, each = M // 16, (Q + 2 * K + Q) * 2 * SEQ // 4
    assert found == {(Kind.ALL_TO_ALL, phase): (4 * m, m * each) for phase in "FB"}


def test_keys_and_values_are_gathered() -> None:
    """Llama 3 (2407.21783, section 3.3.2): K and V of the whole sequence; backward their gradients are scattered."""
    found = moved(ledger("cp=4 cp_kind=gather dp=16 mb=1"), "cp", "layers.0.")
    m, whole = M // 16, 2 * 2 * K * SEQ
    assert found == {
        (Kind.ALL_GATHER, "F"): (m, m * whole),
        (Kind.ALL_GATHER, "B"): (m, m * whole),
        (Kind.REDUCE_SCATTER, "B"): (m, m * whole),
    }


@pytest.mark.parametrize("kind", ["ring", "ulysses", "gather"])
def test_tensor_parallelism_cuts_what_context_parallelism_moves(kind: str) -> None:
    """By heads, not by tokens."""
    whole, cut = (moved(ledger(f"tp={t} cp=2 cp_kind={kind} dp=8 mb=1"), "cp", "layers.0.") for t in (4, 8))
    assert {k: (n, total / 2) for k, (n, total) in whole.items()} == cut


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_context_parallel_ranks_share_the_state(zero: int) -> None:
    """Gradients are summed over D c ranks, and ZeRO cuts over as many: 4 P bytes whichever way."""
    found = ledger(f"cp=2 dp=4 zero={zero} mb=1")
    axis = "dp_replicate+cp" if zero == 0 else "dp_shard+cp"
    kind = Kind.ALL_REDUCE if zero == 0 else Kind.REDUCE_SCATTER
    times = M // 4 if zero >= 2 else 1
    assert {k: total for k, (_, total) in moved(found, axis, phases="reduce").items()} == {
        (kind, "reduce"): times * 4 * P
    }
    groups = {c.ranks for c in found if c.key.phase == Phase.REDUCE}
    assert groups == {tuple(range(8))}
    gathered = moved(found, axis, phases="gather")
    assert {k: total for k, (_, total) in gathered.items()} == (
        {(Kind.ALL_GATHER, "gather"): 2 * P} if zero in (1, 2) else {}
    )


def test_zero_2_reduces_every_micro_batch_and_gathers_once() -> None:
    """ZeRO (1910.02054, section 7.2.1): as ZeRO-1, but a scatter a micro-batch."""
    found = ledger("dp=8 zero=2 mb=1")
    totals = {k: total for k, (_, total) in moved(found, "dp_shard", phases="reduce gather unshard").items()}
    assert totals == {(Kind.REDUCE_SCATTER, "reduce"): M // 8 * 4 * P, (Kind.ALL_GATHER, "gather"): 2 * P}


# --------------------------------------------------------------------------------------------------------- experts

ROUTED = "qwen3-30b-a3b"
"""128 experts of 768 rows, 8 a token; 2,048 wide."""
H, TOP, X, EXPERTS, LAYERS = 2048, 8, 768, 128, 48


@pytest.mark.parametrize(("tp", "cp", "ep"), [(1, 1, 8), (2, 1, 16), (2, 2, 4)])
def test_experts_are_sent_their_tokens_and_send_them_back(tp: int, cp: int, ep: int) -> None:
    """Two all-to-alls a layer each way of T K h, of the tokens of this rank alone; and how many each is sent."""
    dp = 64 // tp // cp
    found = moved(ledger(f"tp={tp} cp={cp} ep={ep} dp={dp} zero=1 mb=1", ROUTED), "ep", "layers.0.")
    m, copies = M // dp, SEQ // cp // tp * TOP * H * 2
    assert found == {
        (Kind.ALL_TO_ALL, "F"): (3 * m, m * (2 * copies + 8 * EXPERTS)),
        (Kind.ALL_TO_ALL, "B"): (2 * m, 2 * m * copies),
    }


def test_expert_tensor_parallelism_gathers_and_scatters_the_copies() -> None:
    found = moved(ledger("tp=4 ep=8 etp=4 dp=16 zero=1 mb=1", ROUTED), "etp", "layers.0.")
    m, gathered = M // 16, SEQ // 4 * TOP * H * 2 * 4
    each = m, m * gathered
    assert found == {(kind, phase): each for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) for phase in "FB"}


@pytest.mark.parametrize(("zero", "times"), [(1, 1), (2, M // 32), (3, M // 32)])
def test_experts_are_reduced_over_their_own_ranks(zero: int, times: int) -> None:
    """The rest over dp_shard; experts over the edp ranks that hold the same ones: 4 bytes of P / (ep etp)."""
    found = ledger(f"tp=2 ep=8 etp=2 dp=32 zero={zero} mb=1", ROUTED)
    routed = LAYERS * EXPERTS * 3 * H * X // (8 * 2)
    assert moved(found, "edp", phases="reduce")[Kind.REDUCE_SCATTER, "reduce"] == (times * LAYERS, times * 4 * routed)
    (group,) = {c.ranks for c in found if c.key.axis == "edp"}
    assert group == (0, 16, 32, 48)
    if zero < 3:
        assert moved(found, "edp", phases="gather")[Kind.ALL_GATHER, "gather"] == (LAYERS, 2 * routed)


def test_without_zero_experts_are_reduced_over_all_their_copies() -> None:
    found = ledger("ep=16 dp=64 mb=1", ROUTED)
    routed = LAYERS * EXPERTS * 3 * H * X // 16
    assert moved(found, "edp") == {(Kind.ALL_REDUCE, "reduce"): (LAYERS, 4 * routed)}


@pytest.mark.parametrize("name", ["llama-3.1-8b", ROUTED])
def test_recomputing_an_operation_repeats_what_it_moves(name: str) -> None:
    """The core of attention, and with it the ring; nothing of activations and plain norms."""
    base = "cp=4 dp=16 zero=1 mb=1"
    plain, core, act = (moved(ledger(f"{base} recompute={way}", name), "cp") for way in ("none", "core", "norm,act"))
    again = {(kind, "recompute"): n for (kind, phase), n in plain.items() if phase == "F"}
    assert core == plain | again
    assert act == plain


# --------------------------------------------------------------------------------------------------------- agreement


def mismatches(job: Job, layout: Layout) -> list[str]:
    """What some rank issues and another one of its group does not, as often and as large."""
    ledgers = [logical(predict_ledger(job, layout, rank)) for rank in range(layout.world_size)]
    wrong: list[str] = []
    for rank, found in enumerate(ledgers):
        sent, received = Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
        for c, n in found.items():
            if c.kind in (Kind.SEND, Kind.RECV):
                mine, other = c.ranks if c.kind is Kind.SEND else c.ranks[::-1]
                wrong += [f"{rank}: {c}"] if mine != rank or other == rank else []
                (sent if c.kind is Kind.SEND else received)[message(c)] += n
            else:
                wrong += [f"{rank}: {c}"] if rank not in c.ranks or len(set(c.ranks)) < 2 else []
                wrong += [f"{other}: no {c}" for other in c.ranks if ledgers[other][c] != n]
        for counted, kind in ((sent, Kind.RECV), (received, Kind.SEND)):
            for what, n in counted.items():
                peer = next(r for r in what[0] if r != rank)  # type: ignore[attr-defined]
                answered = sum(k for c, k in ledgers[peer].items() if c.kind is kind and message(c) == what)
                wrong += [f"{rank}: {n} x {what}, answered {answered} times"] if answered != n else []
    return wrong


def logical(found: Ledger) -> Ledger:
    """The two copies of a tied weight lie in units of different names."""
    out: Ledger = Counter()
    for c, n in found.items():
        tied = c.key.phase == Phase.TIE
        out[c._replace(key=c.key._replace(module="tied")) if tied else c] += n
    return out


def message(c: Collective) -> tuple[object, ...]:
    return c.ranks, c.payload_bytes, c.dtype, c.key.axis


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b", "deepseek-v3", ROUTED, "nemotron-3-nano", LOOPED])
def test_ranks_agree_on_every_collective(name: str) -> None:
    """If one lists another, that one lists it too: the same group, payload and count, whatever cuts them."""
    job = job_of(name, "2x8xh100", batch=24)
    for layout in drawn(job, 3, 11):
        assert not mismatches(job, layout)[:3], str(layout)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (ROUTED, "pp=4 dp=4 mb=1 order=dp"),
        (ROUTED, "tp=2 pp=2 ep=2 dp=4 mb=1 order=dp"),
        (ROUTED, "pp=2 ep=2 dp_replicate=2 dp_shard=4 zero=1 mb=1 order=dp"),
        ("gemma-2-9b", "tp=2 pp=4 dp=2 mb=1 order=dp schedule=dualpipe"),
        ("deepseek-v3", "pp=4 cp=2 ep=4 dp=2 zero=3 mb=1 schedule=dualpipe-v"),
    ],
)
def test_ranks_agree_where_replicas_lie_outermost(name: str, text: str) -> None:
    job, layout = job_of(name, "2x8xh100", batch=24), parse(text)
    assert not findings(layout, job)
    assert not mismatches(job, layout)[:3]


@pytest.mark.parametrize("text", ["ep=16 dp=16 mb=1", "tp=2 ep=4 etp=2 dp=8 zero=1 mb=1", "cp=2 ep=16 dp=8 mb=1"])
def test_the_clip_norm_meets_every_rank_with_other_experts(text: str) -> None:
    """Without ZeRO experts still differ from rank to rank along ep: a norm that leaves them out clips too little."""
    job, layout = job_of(ROUTED, "2x8xh100", batch=32), parse(text)
    assert not findings(layout, job)
    met = {r for c in predict_ledger(job, layout, 0) if c.key.phase == Phase.NORM for r in c.ranks}
    assert met >= set(layout.expert_mesh.group(0, ("ep", "etp")))


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b"])
def test_groups_are_those_of_the_meshes(name: str) -> None:
    job = job_of(name, "4x8xh100")
    for layout in drawn(job, 4, 12, lambda x: x.ep > 1):
        for rank in (0, 21):
            for c in predict_ledger(job, layout, rank):
                axes = tuple(c.key.axis.split("+"))
                if c.kind in (Kind.SEND, Kind.RECV) or axes in (("tied",), ("twins",)):
                    continue
                mesh = layout.expert_mesh if set(axes) & {"ep", "etp", "edp"} else layout.mesh
                assert c.ranks == mesh.group(rank, axes), (str(layout), c)


def test_a_slanted_router_fills_the_payloads_of_the_fullest_rank() -> None:
    """What is gathered over expert-tp is what arrived: a quarter more there."""
    job = replace(job_of(ROUTED), imbalance=1.25)
    layout = parse("tp=2 ep=8 etp=2 dp=32 zero=1 mb=1")
    even, slanted = (moved(predict_ledger(j, layout, 0), "etp") for j in (replace(job, imbalance=1.0), job))
    assert {k: (n, 1.25 * total) for k, (n, total) in even.items()} == slanted
