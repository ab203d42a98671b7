"""`fsdp` on real gloo ranks, against one process: gradients by name, three AdamW steps, every way to use a weight."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.mesh import Mesh
from shardwise.train.comm import Comm
from shardwise.train.wrap.fsdp import fsdp, sharding
from tests.dist.pool import run_gloo
from tests.dist.test_wrap_models import (
    BATCH,
    HIDDEN,
    VOCAB,
    Plain,
    adamw,
    batches,
    build,
    differences,
    loss_of,
    reference,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.dist


def whole_gradients(model: Any) -> dict[str, torch.Tensor | None]:
    """By name, gathered over the shard ranks by a way that is not the wrapper's own."""
    engine = model.forward.home.engine
    mine = {name: p.grad for name, p in model.named_parameters()}
    shards = [unit.grid.shard for unit in engine.units]
    everyone: list[Any] = [None] * shards[0].size
    dist.all_gather_object(everyone, mine, group=shards[0].group)
    for name, p in model.named_parameters():
        if p.grad is not None and p in engine.slots:
            mine[name] = torch.cat([other[name] for other in everyone])
            assert mine[name].shape == engine.slots[p][0].shape
    return mine


def mesh_of(kind: str) -> Any:
    n = dist.get_world_size()
    return {
        "none": lambda: None,
        "group": lambda: dist.group.WORLD,
        "device": lambda: init_device_mesh("cpu", (n,)),
        "ours": lambda: Mesh((("pp", 1), ("dp_replicate", 1), ("dp_shard", n), ("cp", 1), ("tp", 1))),
        "hsdp": lambda: init_device_mesh("cpu", (2, n // 2)),
        "our hsdp": lambda: Mesh((("dp_replicate", 2), ("dp_shard", n // 2))),
        "copies": lambda: Mesh((("dp_replicate", n), ("dp_shard", 1))),
        "cp": lambda: Mesh((("dp_shard", 1), ("cp", n))),
    }[kind]()


def steps(comm: Comm, name: str, kind: str, how: str = "") -> float:
    """Three steps, ranks built with seeds of their own; the greatest difference from one process.

    `how`: "nested", parts are wrapped first; "whole", the model is one unit, checkpoints and all inside it.
    """
    n, rank = comm.world_size, comm.rank
    model: Any = build(name, seed=rank)
    mesh = mesh_of(kind)
    optimizer = adamw(model.parameters())  # before: parameters stay the objects that they are
    if how == "nested":
        fsdp(model.up, mesh)
        fsdp(model.down, mesh)
    types = (type(model),) if how == "whole" else (nn.Linear, nn.Embedding)
    assert fsdp(model, mesh, types) is model and type(model).__name__ == name
    worst = 0.0
    for ids, wanted in zip(batches(n), reference(name, n), strict=True):
        optimizer.zero_grad()
        loss_of(model, ids[rank * BATCH : (rank + 1) * BATCH]).backward()
        model.finish_gradient_synchronization()
        worst = max(worst, *differences(whole_gradients(model), wanted["grads"]).values())
        optimizer.step()
    state = model.gather_full_state_dict()
    values = reference(name, n)[-1]["values"]
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, state)
    assert all(torch.equal(other[k], state[k]) for other in everyone for k in state)
    return max(worst, *differences({k: state[k] for k in values}, values).values())


MODELS = ("Plain", "Tied", "Direct", "Twice", "Recomputed", "Reentrant", "Attention", "Frozen", "Unused")


def many(comm: Comm, cases: list[tuple[Any, ...]]) -> dict[str, float]:
    return {str(case): steps(comm, *case) for case in cases}


MESHES = [*(("Tied", kind) for kind in ("group", "device", "ours", "copies", "cp")), ("Direct", "none", "nested")]
WHOLE = [(name, "none", "whole") for name in ("Tied", "Recomputed", "Reentrant", "Attention")]


def test_every_model_every_mesh_and_nested_wrapping_equal_one_process() -> None:
    cases = [*((name, "none") for name in MODELS), *MESHES, *WHOLE]
    for found in run_gloo(2, "tests.dist.test_wrap_fsdp:many", cases):
        assert max(found.values()) < 1e-12, found
        assert len(found) == len(cases)


def test_hybrid_sharding_and_more_ranks_than_rows_equal_one_process() -> None:
    cases = [("Tied", "hsdp"), ("Recomputed", "our hsdp"), ("Plain", "none"), ("Plain", "hsdp", "nested")]
    for found in run_gloo(4, "tests.dist.test_wrap_fsdp:many", cases):
        assert max(found.values()) < 1e-12, found


def test_one_rank_equals_one_process() -> None:
    cases = [(name, "none") for name in ("Tied", "Direct", "Recomputed")]
    (found,) = run_gloo(1, "tests.dist.test_wrap_fsdp:many", cases)
    assert max(found.values()) < 1e-12


def against_torch(comm: Comm) -> float:
    """Greatest difference from torch's fully_shard of the same units, in gradients and after a step."""
    from torch.distributed.fsdp import fully_shard  # not above: every rank of every test would import it
    from torch.distributed.tensor import DTensor

    ours: Any = fsdp(build("Twice"))
    theirs = build("Twice")
    for layer in theirs.children():
        fully_shard(layer)
    fully_shard(theirs)
    optimizers = [adamw(model.parameters()) for model in (ours, theirs)]
    worst = 0.0
    for ids in batches(comm.world_size):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, ids[comm.rank * BATCH : (comm.rank + 1) * BATCH]).backward()
        ours.finish_gradient_synchronization()
        shards = {n: None if p.grad is None else cast(DTensor, p.grad).to_local() for n, p in theirs.named_parameters()}
        parts: list[Any] = [None] * comm.world_size
        dist.all_gather_object(parts, shards)
        wanted = {n: None if g is None else torch.cat([part[n] for part in parts]) for n, g in shards.items()}
        worst = max(worst, *differences(whole_gradients(ours), wanted).values())
        for optimizer in optimizers:
            optimizer.step()
    return worst


def test_equals_torch() -> None:
    assert max(run_gloo(2, "tests.dist.test_wrap_fsdp:against_torch")) < 1e-12


# Low precision


class Cast(nn.Module):
    """The same model, cast by hand."""

    def __init__(self, model: Plain, dtype: torch.dtype) -> None:
        super().__init__()
        self.m, self.dtype = model, dtype

    def linear(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        bias = None if layer.bias is None else layer.bias.to(self.dtype)
        return nn.functional.linear(x.to(self.dtype), layer.weight.to(self.dtype), bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        m = self.m
        x = nn.functional.embedding(ids, m.emb.weight.to(self.dtype))
        hidden = torch.tanh(m.norm(self.linear(m.up, x).float()))
        return self.linear(m.head, x + self.linear(m.down, hidden))


class Float(Plain):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        hidden = torch.tanh(self.norm(self.up(x).float()))
        return self.head(x + self.down(hidden))


def low(comm: Comm) -> dict[str, float]:
    return low_of(comm, torch.bfloat16) | {f"float16 {k}": v for k, v in low_of(comm, torch.float16).items()}


def low_of(comm: Comm, dtype: torch.dtype) -> dict[str, float]:
    """Each rank's gradient of the cast model, averaged in float32 by hand, against the shards'."""
    by_hand = build("Plain", dtype=torch.float32)
    model: Any = Float()
    model.load_state_dict(by_hand.state_dict())
    fsdp(model, compute_dtype=dtype)
    cast = Cast(by_hand, dtype)
    ours, theirs = adamw(model.parameters()), adamw(by_hand.parameters())
    found: dict[str, float] = {}
    for step, ids in enumerate(batches(comm.world_size)):
        mine = ids[comm.rank * BATCH : (comm.rank + 1) * BATCH]
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        loss_of(model, mine).backward()
        model.finish_gradient_synchronization()
        loss_of(cast, mine).backward()
        for p in by_hand.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= comm.world_size
        wanted = {name: p.grad for name, p in by_hand.named_parameters()}
        for p in model.parameters():
            assert p.dtype is torch.float32 and p.grad is not None and p.grad.dtype is torch.float32
        found |= {f"{step} {k}": v for k, v in differences(whole_gradients(model), wanted).items()}
        ours.step()
        theirs.step()
        found |= {
            f"{step} v {k}": v for k, v in differences(model.gather_full_state_dict(), by_hand.state_dict()).items()
        }
    return found


def test_low_precision_equals_casting_by_hand_to_the_bit() -> None:
    for found in run_gloo(2, "tests.dist.test_wrap_fsdp:low"):
        assert max(found.values()) == 0, found


def halves(comm: Comm) -> None:
    """A bfloat16 module: its own dtype computes, shards are float32; output_dtype for what cannot mix."""
    model: Any = fsdp(build("Plain", dtype=torch.bfloat16), output_dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    loss_of(model, batches(1)[0]).backward()
    model.finish_gradient_synchronization()
    assert seen == [torch.bfloat16]
    assert model.up.weight.dtype is torch.float32 and model.up.weight.grad is not None
    assert model.up.weight.grad.dtype is torch.float32
    model = fsdp(build("Plain", dtype=torch.float32), None, (nn.Linear, nn.Embedding), torch.bfloat16, torch.float32)
    assert model(batches(1)[0]).dtype is torch.float32


def test_dtypes_of_shards_and_outputs() -> None:
    run_gloo(2, "tests.dist.test_wrap_fsdp:halves")


# What users do


def accumulated(comm: Comm) -> None:
    """Rows 6, 21 and 30 of the known failures: under hybrid sharding every micro-batch counts, a tied weight counts
    once in the norm, and the norm is one on all ranks."""
    n, rank = comm.world_size, comm.rank
    model: Any = fsdp(build("Tied"), mesh_of("hsdp"))
    plain = build("Tied")
    for ids in batches(n, 3):
        loss_of(model, ids[rank * BATCH : (rank + 1) * BATCH]).backward()
        loss_of(plain, ids).backward()
    model.finish_gradient_synchronization()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    assert max(differences(whole_gradients(model), wanted).values()) < 1e-12
    norm = model.clip_grad_norm_(0.1)
    assert torch.allclose(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-12, atol=0)
    norms: list[Any] = [None] * n
    dist.all_gather_object(norms, norm.item())
    assert len(set(norms)) == 1


def test_accumulation_and_clipping_under_hybrid_sharding() -> None:
    run_gloo(4, "tests.dist.test_wrap_fsdp:accumulated")


def uses(comm: Comm) -> None:
    """Names, accumulation, clipping, saving and loading, thawing, evaluation."""
    rank, n = comm.rank, comm.world_size
    model: Any = fsdp(build("Plain"))
    plain: Any = build("Plain")
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [type(model), type(model.up)] == [Plain, nn.Linear] and isinstance(model.up.weight, nn.Parameter)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model.up.weight.shape == ((5, 5), (4, 5))[rank]

    ids = batches(n, 2)
    for part in ids:  # two backwards, one finish
        loss_of(model, part[rank * BATCH : (rank + 1) * BATCH]).backward()
        loss_of(plain, part).backward()
    model.finish_gradient_synchronization()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    assert max(differences(whole_gradients(model), wanted).values()) < 1e-12
    norm = model.clip_grad_norm_(0.1)
    assert torch.allclose(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-12, atol=0)
    assert max(differences(whole_gradients(model), wanted).values()) < 1e-12

    with torch.no_grad():
        assert torch.equal(model(ids[0]), plain(ids[0]))
    with torch.inference_mode():
        assert torch.equal(model(ids[0]), plain(ids[0]))
    model.eval()
    assert torch.equal(model(ids[0]).detach(), plain(ids[0]).detach())

    other: Any = fsdp(build("Plain", seed=9))
    other.load_full_state_dict(model.gather_full_state_dict())
    assert torch.equal(other(ids[0]), model(ids[0]))
    state = {k: v for k, v in plain.state_dict().items() if k != "up.bias"}
    with pytest.raises(ValueError, match=r"up.bias is missing.*nope is not in.*head.bias: found \[2\], wanted \[1\]"):
        other.load_full_state_dict({**state, "nope": torch.ones(1), "head.bias": torch.ones(2)})

    for p in (model.up.weight, plain.up.weight, model.norm.bias, plain.norm.bias):  # freeze, then thaw
        p.requires_grad_(False)
    for thawed in (False, True):
        for p in (model.up.weight, plain.up.weight, model.norm.bias, plain.norm.bias):
            p.requires_grad_(thawed)
        model.zero_grad()
        plain.zero_grad()
        loss_of(model, ids[0][rank * BATCH : (rank + 1) * BATCH]).backward()
        model.finish_gradient_synchronization()
        loss_of(plain, ids[0]).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        assert (wanted["up.weight"] is None) is not thawed
        assert max(differences(whole_gradients(model), wanted).values()) < 1e-12


def test_what_users_do() -> None:
    run_gloo(2, "tests.dist.test_wrap_fsdp:uses")


class Raising(Plain):
    fails = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.up(self.emb(ids))
        if self.fails:
            raise ArithmeticError("on purpose")
        return self.head(self.down(self.norm(x)))


def faults(comm: Comm) -> None:
    """What must be refused, and that the module is usable after it."""
    ids = batches(1)[0]
    model: Any = fsdp(Raising().double())
    for _ in range(2):
        loss_of(model, ids).backward()
        model.finish_gradient_synchronization()
    before = whole_gradients(model)
    model.fails = True  # in the middle of a forward that has prefetched
    with pytest.raises(ArithmeticError):
        model(ids)
    model.fails = False
    model.emb.weight.register_hook(lambda _: None)
    out = loss_of(model, ids)
    handle = out.register_hook(lambda _: (_ for _ in ()).throw(ArithmeticError("in backward")))
    with pytest.raises(ArithmeticError):
        out.backward()
    handle.remove()
    model.zero_grad()
    loss_of(model, ids).backward()
    model.finish_gradient_synchronization()
    halved = {k: None if g is None else g / 2 for k, g in before.items()}
    assert max(differences(whole_gradients(model), halved).values()) < 1e-12

    class Fail(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def raising(_: torch.Tensor) -> torch.Tensor:
                raise ArithmeticError("half way")

            x.register_hook(raising)
            return x

    whole = model.norm
    model.norm = nn.Sequential(whole, Fail())  # head and down are reduced by then, the norm's gradient is not
    with pytest.raises(ArithmeticError):
        loss_of(model, ids).backward()
    model.norm = whole
    model.zero_grad()
    loss_of(model, ids).backward()
    model.finish_gradient_synchronization()
    assert max(differences(whole_gradients(model), halved).values()) < 1e-12

    kept = model.emb.weight  # a shard, read outside of any forward
    with pytest.raises(RuntimeError, match=r"emb.weight: a loss was computed from this rank's shard"):
        (model.up(ids.new_ones(1, HIDDEN).double()).sum() + kept.sum()).backward()
    model.finish_gradient_synchronization()
    model.zero_grad()
    with model.full_parameters():
        assert model.emb.weight.shape == (VOCAB, HIDDEN)
        model.emb.weight.square().sum().backward()
    model.finish_gradient_synchronization()
    value = model.gather_full_state_dict()["emb.weight"]
    assert torch.allclose(whole_gradients(model)["emb.weight"], 2 * value, rtol=1e-12)  # type: ignore[arg-type]

    optimizer = adamw(model.parameters())
    optimizer.zero_grad()
    loss = loss_of(model, ids)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss.backward()
    model.finish_gradient_synchronization()
    optimizer.zero_grad()
    loss_of(model, ids).backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="before finish_gradient_synchronization"):
        model(ids)
    model.finish_gradient_synchronization()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(model(ids).sum(), model.norm.weight, create_graph=True)
    refusals(model)


def refusals(model: Any) -> None:
    with pytest.raises(TypeError, match="gather_full_state_dict"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match="gather_full_state_dict"):
        pickle.dumps(model)
    with pytest.raises(ValueError, match="from the inside out"):
        fsdp(model.up)
    bad = nn.ModuleList([nn.Embedding(4, 2, max_norm=1.0), nn.Embedding(4, 2, sparse=True), nn.LSTM(2, 2)])
    with pytest.raises(ValueError, match=r"max_norm.*sparse=False.*LSTM keeps its weights in a list"):
        fsdp(bad, None, (nn.Embedding, nn.LSTM))
    with pytest.raises(ValueError, match=r"weight, bias: no values yet"):
        fsdp(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"the mesh has 3 ranks, the open process group 2"):
        fsdp(nn.Linear(2, 2), Mesh((("dp_shard", 3),)))
    with pytest.raises(TypeError, match="not wrapped by fsdp"):
        sharding(nn.Linear(2, 2))
    assert set(sharding(model).gather_full_state_dict()) == set(model.gather_full_state_dict())
    with pytest.raises(ValueError, match=r"different parameters: weight \[2, 2\] float32 and weight \[3, 2\] float32"):
        fsdp(nn.Linear(2, 2 + dist.get_rank()))


def test_faults_are_named_and_leave_a_usable_module() -> None:
    run_gloo(2, "tests.dist.test_wrap_fsdp:faults")


def test_no_process_group_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        fsdp(nn.Linear(2, 2))
