"""The thread backend: values, determinism, and that every way to fail ends all ranks at once, with names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.train.comm import Comm, Message
from shardwise.train.threads import RankError, ThreadComm, run_threads

PART = 6
DTYPES = ["float64", "float32", "bfloat16", "int64"]


def made_input(rank: int, degree: int, dtype: str) -> torch.Tensor:
    """What `rank` brings: [degree * 2, PART / 2], so that it splits into `degree` parts of PART elements."""
    values = torch.randn(degree * PART, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (values * 8).to(getattr(torch, dtype)).view(degree * 2, PART // 2)


def members(rank: int, world_size: int, degree: int) -> tuple[int, ...]:
    return tuple(range(rank % (world_size // degree), world_size, world_size // degree))


def every_operation(comm: Comm, degree: int, dtype: str) -> dict[str, torch.Tensor]:
    """Each operation once, in place where that is allowed; also a batch of messages round the ring of the group."""
    ranks = members(comm.rank, comm.world_size, degree)
    group = comm.group(("tp",), ranks)
    found: dict[str, torch.Tensor] = {}
    for op in ("sum", "max"):
        found[op] = made_input(comm.rank, degree, dtype)
        comm.all_reduce(found[op], group, op).wait()
    x = made_input(comm.rank, degree, dtype)
    found["gather"] = torch.zeros(degree * x.numel(), dtype=x.dtype)
    comm.all_gather(found["gather"], x, group).wait()
    found["gather_in_place"] = torch.zeros(degree, x.numel(), dtype=x.dtype)
    found["gather_in_place"][group.index] = x.view(-1)
    comm.all_gather(found["gather_in_place"], found["gather_in_place"][group.index], group).wait()
    found["scatter"] = torch.zeros(PART, dtype=x.dtype)
    comm.reduce_scatter(found["scatter"], x, group).wait()
    whole = made_input(comm.rank, degree, dtype).view(degree, PART)
    comm.reduce_scatter(whole[group.index], whole, group).wait()
    found["scatter_in_place"] = whole[group.index].clone()
    found["exchange"] = torch.zeros_like(x)
    comm.all_to_all(found["exchange"], x, group)
    found["received"] = torch.zeros(2, *x.shape, dtype=x.dtype)
    after, before = ranks[(group.index + 1) % degree], ranks[group.index - 1]
    sends = [Message(True, tensor, after, name) for tensor, name in ((x, "first"), (x + 1, "second"))]
    recvs = [
        Message(False, out, before, name) for out, name in zip(found["received"], ("first", "second"), strict=True)
    ]
    for work in comm.post([sends[0], recvs[0], sends[1], recvs[1]]):
        work.wait()
    return found


def expected(rank: int, world_size: int, degree: int, dtype: str) -> dict[str, torch.Tensor]:
    ranks = members(rank, world_size, degree)
    index = ranks.index(rank)
    xs = [made_input(r, degree, dtype) for r in ranks]
    total = xs[0]
    for x in xs[1:]:
        total = total + x  # the promised order
    parts = [x.view(degree, PART)[index] for x in xs]
    scattered = total.view(degree, PART)[index]
    gathered = torch.cat([x.view(-1) for x in xs])
    before = xs[index - 1]
    return {
        "sum": total,
        "max": torch.stack(xs).amax(0),
        "gather": gathered,
        "gather_in_place": gathered.view(degree, -1),
        "scatter": scattered,
        "scatter_in_place": scattered,
        "exchange": torch.cat(parts).view_as(total),
        "received": torch.stack([before, before + 1]),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_values(degree: int, dtype: str) -> None:
    for rank, found in enumerate(run_threads(8, lambda comm: every_operation(comm, degree, dtype))):
        for name, value in expected(rank, 8, degree, dtype).items():
            assert torch.equal(found[name], value), (rank, name)


def test_results_are_copies_and_gather_is_asynchronous() -> None:
    def rank_main(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor]:
        group = comm.group(("dp",), (0, 1))
        x, out = torch.full((2,), float(comm.rank)), torch.zeros(4)
        work = comm.all_gather(out, x, group)
        early = out.clone()
        work.wait()
        x.fill_(-1)
        comm.all_reduce(torch.zeros(1), group).wait()
        return early, out

    results = run_threads(2, rank_main)
    assert results[0][0].tolist() == [0, 0, 0, 0]  # rank 1 had not come yet
    assert [out.tolist() for _, out in results] == [[0, 0, 1, 1]] * 2


def test_two_runs_agree_bit_for_bit_and_take_the_same_turns() -> None:
    def run() -> tuple[list[torch.Tensor], list[int]]:
        turns: list[int] = []

        def rank_main(comm: ThreadComm) -> torch.Tensor:
            group = comm.group(("dp",), tuple(range(8)))
            x = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
            for _ in range(20):
                turns.append(comm.rank)
                comm.all_reduce(x, group).wait()
                x /= 8.1
            return x

        return run_threads(8, rank_main), turns

    (first, first_turns), (second, second_turns) = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first_turns == second_turns


def test_collectives_inside_backward() -> None:
    class SumGradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, comm: ThreadComm) -> torch.Tensor:
            ctx.comm = comm  # type: ignore[attr-defined]
            return x.view_as(x)

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
            comm: ThreadComm = ctx.comm  # type: ignore[attr-defined]
            total = grads[0].clone()
            comm.all_reduce(total, comm.group(("tp",), tuple(range(comm.world_size)))).wait()
            return total, None

    def rank_main(comm: ThreadComm, fail: bool) -> float:
        x = torch.ones(1, requires_grad=True)
        if fail and comm.rank == 3:
            raise ValueError("boom")
        y = SumGradients.apply(x, comm)
        assert isinstance(y, torch.Tensor)
        return torch.autograd.grad(y * (comm.rank + 1), x)[0].item()

    assert run_threads(4, lambda comm: rank_main(comm, False)) == [10.0] * 4
    with pytest.raises(RankError, match="rank 3 raised ValueError: boom"):
        run_threads(4, lambda comm: rank_main(comm, True))


def test_many_ranks_many_collectives() -> None:
    def rank_main(comm: ThreadComm) -> float:
        group = comm.group(("dp",), tuple(range(32)))
        x = torch.ones(64, dtype=torch.float64)
        for _ in range(200):
            comm.all_reduce(x, group).wait()
            x /= 32
        return x.sum().item()

    assert run_threads(32, rank_main) == [64.0] * 32


# How it fails ---------------------------------------------------------------------------------------------------------

Step = Callable[[ThreadComm], Any]


def failure(*ranks: Step, timeout_s: float = 20.0) -> RankError:
    """Run one function per rank and return the error; no thread may be left."""
    with pytest.raises(RankError) as caught:
        run_threads(len(ranks), lambda comm: ranks[comm.rank](comm), timeout_s)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    return caught.value


def reduce(*shape: int, dtype: torch.dtype = torch.float32, op: str = "sum", axis: str = "tp") -> Step:
    return lambda comm: comm.all_reduce(torch.ones(shape, dtype=dtype), comm.group((axis,), (0, 1)), op).wait()


def gather(comm: ThreadComm) -> None:
    comm.all_gather(torch.ones(8), torch.ones(4), comm.group(("tp",), (0, 1))).wait()


def send(peer: int, name: str = "x", size: int = 2, dtype: torch.dtype = torch.float32) -> Message:
    return Message(True, torch.ones(size, dtype=dtype), peer, name)


def recv(peer: int, name: str = "x", size: int = 2) -> Message:
    return Message(False, torch.zeros(size), peer, name)


def post(*batches: list[Message]) -> Step:
    """Post all batches, then wait for all."""
    return lambda comm: [w.wait() for w in [w for batch in batches for w in comm.post(batch)]]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (gather, "rank 1 issued all_gather float32[4]"),
        (reduce(5), "rank 1 issued all_reduce sum float32[5]"),
        (reduce(2, 2), "rank 1 issued all_reduce sum float32[2, 2]"),
        (reduce(4, dtype=torch.float64), "rank 1 issued all_reduce sum float64[4]"),
        (reduce(4, op="max"), "rank 1 issued all_reduce max float32[4]"),
    ],
)
def test_collective_mismatch(other: Step, words: str) -> None:
    text = str(failure(reduce(4), other))
    assert "mismatch in collective #0 on tp (ranks 0, 1): rank 0 issued all_reduce sum float32[4]" in text
    assert words in text


@pytest.mark.parametrize(
    ("message", "what"),
    [(recv(0, "y"), "name"), (recv(0, size=3), "shape"), (Message(False, torch.ones(2).long(), 0, "x"), "dtype")],
)
def test_point_to_point_mismatch(message: Message, what: str) -> None:
    error = failure(post([send(1)]), post([message]))
    assert f"mismatch of {what} in point-to-point: rank 0 issued send 'x' float32[2] to rank 1, rank 1" in str(error)


def test_a_raise_ends_all_and_is_chained() -> None:
    def boom(comm: ThreadComm) -> None:
        raise KeyError("boom")

    error = failure(reduce(4), boom, post([recv(1, "act")]))
    assert error.rank == 1
    assert isinstance(error.__cause__, KeyError)
    assert "rank 1 raised KeyError: 'boom'" in str(error)
    assert "rank 0 waits for all_reduce sum float32[4], #0 on tp (ranks 0, 1); missing: rank 1" in str(error)


def test_a_users_handler_does_not_swallow_the_end() -> None:
    went_on: list[int] = []

    def stubborn(comm: ThreadComm) -> None:
        try:
            reduce(4)(comm)
        except Exception:
            went_on.append(comm.rank)

    failure(stubborn, post([recv(0)]))
    assert went_on == []


TP = ("tp",), (0, 1)
BAD_ARGUMENTS: list[tuple[Step, str]] = [
    (lambda comm: comm.reduce_scatter(torch.ones(2), torch.ones(5), comm.group(*TP)).wait(), "does not split into 2"),
    (lambda comm: comm.all_gather(torch.ones(3), torch.ones(2), comm.group(*TP)), "must have 4 elements"),
    (lambda comm: comm.all_reduce(torch.ones(2, 3).T, comm.group(*TP)).wait(), "not contiguous"),
    (lambda comm: comm.all_reduce(torch.ones(2), comm.group(*TP), "avg").wait(), "'sum' or 'max', not 'avg'"),
    (lambda comm: comm.group(("tp",), (1, 0)), "must be ascending"),
    (lambda comm: comm.post([send(0)]), "rank 0 has no peer 0"),
]


@pytest.mark.parametrize(("step", "words"), BAD_ARGUMENTS, ids=[words for _, words in BAD_ARGUMENTS])
def test_bad_arguments_name_the_rank(step: Step, words: str) -> None:
    text = str(failure(step, reduce(4)))
    assert "rank 0 raised ValueError" in text
    assert words in text


def test_deadlock_names_what_each_rank_waits_for() -> None:
    text = str(failure(reduce(4), reduce(4, axis="dp"), lambda comm: None))
    assert "deadlock: no rank can run" in text
    assert "rank 0 waits for all_reduce sum float32[4], #0 on tp (ranks 0, 1); missing: rank 1" in text
    assert "rank 1 waits for all_reduce sum float32[4], #0 on dp (ranks 0, 1); missing: rank 0" in text
    assert "rank 2 has returned" in text


def test_crossing_sends_hang_apart_and_pass_in_one_batch() -> None:
    text = str(failure(post([send(1)], [recv(1)]), post([send(0)], [recv(0)])))
    assert "rank 0 waits for send 'x' float32[2] to rank 1" in text
    assert "rank 1 waits for send 'x' float32[2] to rank 0" in text
    steps = post([send(1), recv(1)]), post([send(0), recv(0)])
    run_threads(2, lambda comm: steps[comm.rank](comm))


def test_a_batch_waits_for_the_head_of_both_queues() -> None:
    """Rank 1 has posted what rank 0 wants, but behind an operation that rank 2 never meets."""
    text = str(failure(post([recv(1)]), lambda comm: [comm.post([send(2)]), *post([send(0)])(comm)], lambda comm: None))
    assert "rank 1 waits for send 'x' float32[2] to rank 0, behind send 'x' float32[2] to rank 2" in text
    steps = post([recv(1)]), post([send(2)], [send(0)]), post([recv(1)])
    run_threads(3, lambda comm: steps[comm.rank](comm))


def test_operations_of_a_batch_progress_independently() -> None:
    """Rank 0 gets its message although the batch of rank 1 is not complete; but rank 1's next batch must wait."""

    def first(comm: ThreadComm) -> None:
        post([recv(1, "a")])(comm)
        post([send(2, "go")])(comm)

    steps = (
        first,
        post([send(0, "a"), send(2, "b")], [recv(2, "c")]),
        post([recv(0, "go")], [recv(1, "b")], [send(1, "c")]),
    )
    assert len(run_threads(3, lambda comm: steps[comm.rank](comm))) == 3  # a deadlock would have been raised


def test_left_overs_are_an_error() -> None:
    text = str(failure(lambda comm: comm.post([send(1, "act")]), lambda comm: None))
    assert "operations are left unmatched: rank 0: send 'act' float32[2] to rank 1" in text


def test_timeout() -> None:
    def busy(comm: ThreadComm) -> None:
        while True:
            time.sleep(0.01)
            comm.post([])

    text = str(failure(reduce(4), busy, timeout_s=0.1))
    assert "not done after 0.1 s; rank 1 was running" in text
    assert "rank 0 waits for all_reduce" in text
