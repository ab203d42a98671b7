"""The parity harness: any layout on any backend against plain torch in one process, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from shardwise.collective import Labels
from shardwise.mesh import DATA
from shardwise.model.spec import Model
from shardwise.plan.job import Job
from shardwise.plan.layout import Layout
from shardwise.plan.shards import Record, logical_name
from shardwise.train.comm import Comm
from shardwise.train.initial import initial_values
from shardwise.train.optim import OptimizerSettings
from shardwise.train.rank import Rank, build_rank, gradients
from shardwise.train.unit import UnitState
from tests.support import plain

STEPS = 3
SETTINGS = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5)
TOLERANCE = 1e-10

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trace:
    """What one run shows of each step: losses, norms, raw gradients of every step, and the parameters at the end."""

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    gradients: list[Tensors]
    parameters: Tensors


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: this box of the whole, from this rank."""

    name: str
    box: tuple[slice, ...]
    value: torch.Tensor


@dataclass(frozen=True)
class RankTrace:
    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    gradients: list[list[Piece]]
    parameters: list[list[Piece]]


@lru_cache(maxsize=8)
def batches(vocab: int, seq_len: int, batch: int, masked: bool) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """(ids, targets) [b, s] of each step. `masked`: the sequences have very unequal numbers of valid tokens."""
    generator = torch.Generator().manual_seed(7)
    out: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(STEPS):
        tokens = torch.randint(vocab, (batch, seq_len + 1), generator=generator)
        ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if masked:
            valid = torch.arange(seq_len) < torch.tensor([seq_len, 1, 0, 9])[torch.arange(batch) % 4, None]
            targets = targets.masked_fill(~valid, -100)
        out.append((ids, targets))
    return tuple(out)


def whole_weights(model: Model, seed: int = 0) -> Tensors:
    """Initial weights of one process, in float64."""
    weights: Tensors = {}
    for unit in model.units():
        for p in unit.block.parameters:
            shape = tuple(model.dims[d] for d in p.dims)
            record = Record(logical_name(model, unit, p), shape, shape, p.tp_dim, False, shape[0], 0)
            weights[record.name] = initial_values(model, record, 0, seed)
    return weights


def torchs(name: str, weights: Iterable[torch.Tensor], s: OptimizerSettings = SETTINGS) -> torch.optim.Optimizer:
    """torch's optimizer of that name over whole parameters; vectors are not decayed."""
    every = list(weights)
    vectors, matrices = [w for w in every if w.ndim == 1], [w for w in every if w.ndim > 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
    if name == "adamw":
        return torch.optim.AdamW(
            groups,
            lr=s.learning_rate,
            betas=s.betas,
            eps=s.eps,
            weight_decay=s.weight_decay,
            fused=False,
            foreach=False,
        )
    momentum = s.momentum if name == "sgd-momentum" else 0.0
    return torch.optim.SGD(groups, lr=s.learning_rate, momentum=momentum, weight_decay=s.weight_decay, foreach=False)


@lru_cache(maxsize=8)
def one_process(model: Model, seq_len: int, batch: int, masked: bool, optimizer_name: str = "adamw") -> Trace:
    """Plain torch: autograd end to end, torch's clipping and optimizer."""
    weights = {n: w.clone().requires_grad_() for n, w in whole_weights(model).items()}
    optimizer = torchs(optimizer_name, weights.values())
    trace = Trace([], [], [], {})
    for ids, targets in batches(model.vocab, seq_len, batch, masked):
        optimizer.zero_grad()
        loss = plain.loss(model, weights, ids, targets)
        loss.backward()
        trace.losses.append(loss.detach())
        trace.gradients.append({n: w.grad.clone() for n, w in weights.items() if w.grad is not None})
        trace.norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), SETTINGS.clip_norm))
        optimizer.step()
    trace.parameters.update({n: w.detach() for n, w in weights.items()})
    return trace


def local_data(job: Job, layout: Layout, rank: Rank, tokens: torch.Tensor) -> torch.Tensor:
    """This data-parallel rank's rows of [b, s] as [micro-batches, T]: the loop's order, by plain indexing."""
    d, m = rank.world.index(*DATA), job.micro_batches(layout)
    rows = tokens.view(m, layout.dp, layout.mb * job.seq_len)
    return rows[:, d].contiguous()


def run_rank(comm: Comm, job: Job, layout: Layout, masked: bool, labels: Labels | None = None) -> RankTrace:
    """Three steps of one rank, with everything that it holds after each."""
    rank = build_rank(job, layout, comm, labels or Labels(), settings=SETTINGS)
    trace = RankTrace([], [], [], [])
    for ids, targets in batches(job.model.vocab, job.seq_len, job.global_batch, masked):
        local_ids = local_data(job, layout, rank, ids) if rank.needs_ids else None
        local_targets = local_data(job, layout, rank, targets) if rank.needs_targets else None
        result = gradients(rank, local_ids, local_targets)
        trace.gradients.append([p for s in rank.states.values() for p in pieces(s, s.gradient_shard)])
        rank.optimizer.step(result.norm)
        trace.losses.append(result.loss.clone())
        trace.norms.append(result.norm.clone())
        trace.parameters.append([p for s in rank.states.values() for p in pieces(s, s.master)])
    return trace


def pieces(state: UnitState, shard: torch.Tensor) -> list[Piece]:
    """The boxes of the whole tensors that a flat shard holds, padding left out."""
    out: list[Piece] = []
    tp = state.world.index("tp")
    for r in state.storage.records:
        rows, *others = r.box(tp)
        first = min(rows.start + state.index * r.rows, rows.stop)
        box = slice(first, min(first + r.rows, rows.stop)), *others
        flat = shard[r.offset : r.offset + r.shard_numel].view(r.rows, *r.shape[1:])
        held = tuple(slice(s.stop - s.start) for s in box)
        out.append(Piece(r.name, box, flat[held].clone()))
    return out


def assemble(per_rank: list[list[Piece]], like: Tensors) -> Tensors:
    """Whole tensors from all ranks' pieces. Every element is covered, and copies of one box are bit-equal."""
    out = {n: torch.full_like(t, float("nan")) for n, t in like.items()}
    for held in per_rank:
        for p in held:
            here = out[p.name][p.box]
            seen = ~here.isnan()
            assert torch.equal(here[seen], p.value[seen]), f"{p.name}: replicas differ"
            out[p.name][p.box] = p.value
    for name, t in out.items():
        assert not t.isnan().any(), f"{name}: some elements belong to no rank"
    return out


def assert_close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """max |difference| <= 1e-10 * max(1, max |wanted|)"""
    worst = (found - wanted).abs().max().item()
    limit = TOLERANCE * max(1.0, wanted.abs().max().item())
    assert worst <= limit, f"{what}: differs by {worst:.3g}, allowed {limit:.3g}"


def assert_parity(traces: list[RankTrace], job: Job, masked: bool) -> None:
    """Loss, every gradient by name before clipping, norm, and parameters after three steps; replicas bit-equal."""
    wanted = one_process(job.model, job.seq_len, job.global_batch, masked, job.optimizer.name)
    for step in range(STEPS):
        for rank, t in enumerate(traces):
            assert_close(t.losses[step], wanted.losses[step], f"loss of step {step} on rank {rank}")
            assert_close(t.norms[step], wanted.norms[step], f"norm of step {step} on rank {rank}")
            assert torch.equal(t.norms[step], traces[0].norms[step]), f"norms of step {step} differ between ranks"
        found = assemble([t.gradients[step] for t in traces], wanted.gradients[step])
        for name, gradient in found.items():
            assert_close(gradient, wanted.gradients[step][name], f"gradient of {name} in step {step}")
        assemble([t.parameters[step] for t in traces], wanted.parameters)
    parameters = assemble([t.parameters[-1] for t in traces], wanted.parameters)
    for name, value in parameters.items():
        assert_close(value, wanted.parameters[name], f"{name} after {STEPS} steps")
