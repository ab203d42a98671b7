"""`shardwise prove` end to end: true plans, and plans that the code contradicts, module by module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from shardwise.account import comm as account
from shardwise.account.traffic import Traffic
from shardwise.cli import app
from shardwise.collective import Kind, Labels, Phase
from shardwise.model.spec import Cut, Model
from shardwise.plan.layout import parse
from shardwise.prove.compare import Proof
from shardwise.prove.dryrun import prove_rank
from shardwise.prove.record import Recorder
from shardwise.train.bucket import GradientBucket
from shardwise.train.distributed import close_world, open_world
from shardwise.train.ops import _Norm
from shardwise.train.reduction import Start
from tests.support.models import job, tiny

torch.set_num_threads(1)
TINY = str(Path(__file__).parents[2] / "examples" / "tiny.toml")
PATCHED = parse("tp=2 pp=2 dp=2 zero=3 mb=1")


def prove_tiny(rank: int = 0) -> Proof:
    return prove_rank(job(tiny(3), "8xcpu"), PATCHED, rank, tensors="real")


def test_the_example_is_proved() -> None:
    done = CliRunner().invoke(app, ["prove", TINY, "--rank", "first,last", "--json"])
    assert done.exit_code == 0, done.output
    assert "true" in json.dumps(json.loads(done.stdout))


def test_a_ledger_that_lies_ends_with_4_and_names_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction forgets one edge of one op."""
    whole = account.unit_traffic

    def forgetful(model: Model, kind: str, cut: Cut, recompute: str) -> tuple[Traffic, ...]:
        return tuple(t for t in whole(model, kind, cut, recompute) if (t.op, t.phase) != ("mlp.down", Phase.F))

    monkeypatch.setattr(account, "unit_traffic", forgetful)
    done = CliRunner().invoke(app, ["prove", TINY, "--rank", "0"])
    assert done.exit_code == 4
    assert "layers.0.mlp.down" in done.output
    assert "attention.out" not in done.output


def test_code_that_issues_more_than_planned_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = GradientBucket.reduce

    def twice(self: GradientBucket, final: bool) -> list[Start]:
        self.world.all_reduce(self.part, ("dp_shard",), self.bucket.name, Phase.REDUCE)
        return reduce(self, final)

    monkeypatch.setattr(GradientBucket, "reduce", twice)
    proof = prove_tiny()
    assert not proof.ok
    assert not proof.missing
    assert {(c.key.phase, c.kind) for c in proof.extra} == {("reduce", Kind.ALL_REDUCE)}
    assert {d.module for d in proof.differences()} == {"embedding", "layers.0", "layers.1"}


def test_code_that_holds_more_than_planned_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak of one normed activation an op: 1 % is passed, the ledger is still equal."""
    forward, kept = _Norm.forward, list[torch.Tensor]()

    def leaking(*args: object) -> object:
        out = forward(*args)  # type: ignore[arg-type]
        kept.append(out[0].clone())
        return out

    monkeypatch.setattr(_Norm, "forward", staticmethod(leaking))
    proof = prove_tiny()
    assert not proof.differences()
    assert proof.memory_error < -0.01
    assert not proof.ok


def test_a_collective_without_a_label_is_recorded_as_such() -> None:
    """It can match no prediction: a prediction always has its module."""
    labels = Labels()
    comm = open_world("fake", 0, 4, labels=labels)
    recorder = Recorder(labels)
    try:
        group = comm.group(("tp",), (0, 1, 2, 3))
        with recorder:
            dist.all_reduce(torch.zeros(3), group=group.handle)
    finally:
        close_world()
    ((found, count),) = recorder.ledger.items()
    assert (found.key, found.ranks, found.payload_bytes, found.dtype) == (("", "", ""), (0, 1, 2, 3), 12, "float32")
    assert count == 1


def test_an_operation_that_the_ledger_has_no_word_for_is_refused() -> None:
    labels = Labels()
    comm = open_world("fake", 0, 4, labels=labels)
    try:
        group = comm.group(("tp",), (0, 1, 2, 3))
        with Recorder(labels), pytest.raises(RuntimeError, match="no word"):
            dist.broadcast(torch.zeros(3), src=0, group=group.handle)  # type: ignore[arg-type]
    finally:
        close_world()


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0 \.\. 7"):
        prove_tiny(rank)
