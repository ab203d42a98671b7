"""Every optimizer through the whole step: parity with one process, the proof at every ZeRO level, checkpoints."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.account.memory import memory_of
from shardwise.plan.job import Job
from shardwise.plan.layout import parse
from shardwise.plan.optimizer import ADAMW, MOMENTUM, OPTIMIZERS, SGD, OptimizerSpec
from shardwise.plan.rules import findings
from shardwise.prove.dryrun import Tensors, prove_rank
from shardwise.train.checkpoint import CheckpointError, find_checkpoint
from shardwise.train.threads import run_threads
from tests.dist.test_checkpoint import saved_and_loaded, work
from tests.support.models import job, tiny
from tests.support.parity import assert_parity, run_rank

pytestmark = pytest.mark.dist

torch.set_num_threads(1)

OTHERS = [pytest.param(spec, id=spec.name) for spec in (SGD, MOMENTUM)]
EVERY = [pytest.param(spec, id=spec.name) for spec in OPTIMIZERS.values()]


def made(text: str, spec: OptimizerSpec, precision: str = "fp64") -> Job:
    layout = parse(text)
    found = replace(job(tiny(4, tied=True), f"{layout.world_size}xcpu", precision=precision), optimizer=spec)
    assert not findings(layout, found)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "tp=2 pp=2 dp=2 zero=1 mb=1",
        "dp_replicate=2 dp_shard=2 zero=3 mb=1",
        "pp=2 dp=2 zero=2 schedule=dualpipe mb=1",
        "tp=2 sp=0 mb=2",
    ],
)
@pytest.mark.parametrize("spec", OTHERS)
def test_three_steps_equal_one_process(spec: OptimizerSpec, text: str) -> None:
    layout, asked = parse(text), made(text, spec)
    traces = run_threads(layout.world_size, lambda comm: run_rank(comm, asked, layout, masked=True))
    assert_parity(traces, asked, masked=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("spec", EVERY)
def test_the_account_is_proved_at_every_level(spec: OptimizerSpec, zero: int, precision: str) -> None:
    """Predicted and measured peak; a state that the account forgot, or counted twice, is 10 to 30 % of it."""
    text = f"tp=2 dp=4 zero={zero} mb=1"
    asked, layout = made(text, spec, precision), parse(text)
    kinds: tuple[Tensors, ...] = ("meta", "real") if zero in (0, 3) else ("meta",)
    for tensors in kinds:
        proof = prove_rank(asked, layout, 0, tensors=tensors)
        assert not proof.differences()
        assert abs(proof.memory_error) <= 0.001, f"{tensors}: {proof.predicted_peak_bytes} {proof.measured_peak_bytes}"


@pytest.mark.parametrize("zero", range(4))
def test_a_state_costs_its_shard_and_nothing_else(zero: int) -> None:
    """Measured by the dry run alone: from SGD to momentum one float32 buffer a parameter of the shard, to AdamW two
    and a counter for each flat view."""
    text = f"dp=4 zero={zero} mb=1"
    layout = parse(text)
    proofs = [prove_rank(made(text, spec, "bf16"), layout, 1) for spec in (SGD, MOMENTUM, ADAMW)]
    none, one, two = (proof.measured_peak_bytes for proof in proofs)
    model = tiny(4, tied=True)
    # Every matrix has a multiple of four rows; the norms' 32 elements are cut in four as well.
    assert one - none == 4 * model.parameters // (4 if zero else 1)
    views = 2 * model.layers + 2  # vectors and matrices of a layer; embedding; the head's norm
    assert two - one == one - none + 4 * views


@pytest.mark.parametrize(("stack", "stated"), [("megatron", 12), ("llm-foundry", 14), ("torchtitan", 0)])
def test_another_softwares_state_is_less_by_the_states_that_are_not_there(stack: str, stated: int) -> None:
    """A stack states what it holds under AdamW, whose two states are float32: SGD has neither, momentum one."""
    from shardwise.plan.stack import load_stack

    found: dict[str, int] = {}
    layout = parse("mb=1")
    for spec in (SGD, MOMENTUM, ADAMW):
        asked = replace(job(tiny(2), "1xh100", precision="bf16"), optimizer=spec, stack=load_stack(stack))
        found[spec.name] = memory_of(asked, layout)[0].proved["optimizer"]
    n = tiny(2).parameters
    assert found["sgd-momentum"] - found["sgd"] == 4 * n
    if stated:
        assert found["adamw"] == stated * n
    assert found["adamw"] - found["sgd-momentum"] == 4 * n + (0 if stated else 4 * (2 * 2 + 1 + 2))


@pytest.mark.slow
@pytest.mark.parametrize("spec", OTHERS)
def test_state_goes_on_bit_equal_on_another_layout(spec: OptimizerSpec, tmp_path: Path) -> None:
    def of(text: str) -> Any:
        asked, layout = work(text, 3, True)
        return replace(asked, optimizer=spec), layout

    wanted, found = saved_and_loaded(of("pp=2 dp=2 zero=1 mb=1"), of("tp=2 dp=2 zero=3 mb=1"), tmp_path)
    assert {name.rpartition("/")[2] for name in wanted[0]} == {"weight", *spec.states}
    for name, value in wanted[0].items():
        assert value.abs().max() > 0
        assert torch.equal(found[0][name], value), f"{name} is not what was saved"
    for name, value in wanted[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-9, atol=1e-12, msg=f"{name} after the next step")


def test_another_optimizers_checkpoint_is_refused_with_the_way_round(tmp_path: Path) -> None:
    folder = tmp_path / "step-000000001"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"")
    files = {".metadata": [0, hashlib.sha256(b"").hexdigest()]}
    content = {"format": 1, "step": 1, "layout": "mb=1", "identity": {"optimizer": "adamw"}, "files": files}
    (folder / "shardwise.json").write_text(json.dumps(content))
    assert find_checkpoint(folder, {"optimizer": "adamw"}).step == 1
    with pytest.raises(CheckpointError) as error:
        find_checkpoint(folder, {"optimizer": "sgd"})
    assert error.value.faults == [
        f"{folder}: saved with optimizer 'adamw'; this run has 'sgd'",
        f"its weights alone can go on: shardwise export {folder} -o DIR, then --init-from DIR",
    ]
