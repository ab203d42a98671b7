"""Ours, and each of torch's own ways: a training step on the rank that calls it.

Every step is gradients, clipping by one norm over all ranks, and fused AdamW. It returns this rank's share of the
loss: shares sum to the loss over all ranks. Ours counts the step's tokens and sums the loss over ranks as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from beside.models import Llama, Share, loss_of
from shardwise.collective import Labels
from shardwise.plan.plan import TrainSettings
from shardwise.plan.shards import rank_units
from shardwise.train.distributed import DistributedComm
from shardwise.train.optim import OptimizerSettings
from shardwise.train.rank import build_rank, train_step
from shardwise.train.wrap.ddp import ddp

SETTINGS = OptimizerSettings.of(TrainSettings())

Step = Callable[[], torch.Tensor]
Make = Callable[[Share], Step]


def ours(share: Share) -> Step:
    """The runtime that `shardwise train` uses."""
    labels = Labels()
    rank = build_rank(share.job, share.layout, DistributedComm("gloo", labels), labels, settings=SETTINGS)
    ids, targets = share.ids.flatten(1), share.targets.flatten(1)
    world_size = share.layout.world_size

    def step() -> torch.Tensor:
        given = ids if rank.needs_ids else None, targets if rank.needs_targets else None
        return train_step(rank, *given).loss / world_size

    return step


class Optimizer:
    """torch's clipping and AdamW, as ours: 1-D parameters are not decayed."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.parameters, self.group = list(module.parameters()), group
        vectors = [p for p in self.parameters if p.ndim == 1]
        matrices = [p for p in self.parameters if p.ndim > 1]
        self.adamw = torch.optim.AdamW(
            [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}],
            lr=SETTINGS.learning_rate,
            betas=SETTINGS.betas,
            eps=SETTINGS.eps,
            weight_decay=SETTINGS.weight_decay,
            fused=True,
        )

    def step(self) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.group is not None:
            norm.square_()
            dist.all_reduce(norm, group=self.group)
            norm.sqrt_()
        torch.nn.utils.clip_grads_with_norm_(self.parameters, SETTINGS.clip_norm, norm)
        self.adamw.step()
        self.adamw.zero_grad()


def _stepped(module: Callable[..., Any], optimizer: Optimizer, share: Share, finish: Callable[[], object]) -> Step:
    """One micro-batch a step."""
    (ids,), (targets,) = share.ids, share.targets

    def step() -> torch.Tensor:
        loss = loss_of(module(ids), targets)
        loss.backward()
        finish()
        optimizer.step()
        return loss.detach() / share.layout.world_size

    return step


def plain(share: Share) -> Step:
    """No parallelism at all."""
    module = Llama(share.size)
    return _stepped(module, Optimizer(module), share, lambda: None)


def torch_ddp(share: Share) -> Step:
    module = DistributedDataParallel(Llama(share.size), gradient_as_bucket_view=True)
    return _stepped(module, Optimizer(module), share, lambda: None)


def our_ddp(share: Share) -> Step:
    """Our wrapper, around the peer's module."""
    module = ddp(Llama(share.size))
    return _stepped(module, Optimizer(module), share, module.finish_gradient_synchronization)


def torch_fsdp(share: Share) -> Step:
    """Units as ours: the embedding, each layer, the head; the root holds nothing."""
    mesh = init_device_mesh("cpu", (share.layout.world_size,))
    module = Llama(share.size)
    for part in (module.embedding, *module.layers.values()):
        fully_shard(_module(part), mesh=mesh)
    fully_shard(_module(module.head), mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh)
    return _stepped(module, Optimizer(module), share, lambda: None)


def _module(part: nn.Module | None) -> nn.Module:
    assert part is not None
    return part


def torch_tp(share: Share) -> Step:
    """DTensor with sequence parallelism between the products, and the loss over a cut vocabulary."""
    mesh = init_device_mesh("cpu", (share.layout.world_size,))
    module = Llama(share.size)
    parallelize_module(
        module,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head.norm": SequenceParallel(),
            "head.output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for layer in module.layers.values():
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": gathered,
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "mlp": gathered,
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
        parallelize_module(layer, mesh, plan | {name: ColwiseParallel() for name in columns})
    optimizer = Optimizer(module)
    (ids,), (targets,) = share.ids, share.targets

    def step() -> torch.Tensor:
        with loss_parallel():
            loss = loss_of(module(ids), targets)
            loss.backward()
        optimizer.step()
        return _whole(loss.detach()) / share.layout.world_size

    return step


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def torch_pipeline(schedule: type) -> Make:
    """The same units in the same stages on the same ranks, as our plan says."""

    def make(share: Share) -> Step:
        held = rank_units(share.job.model, share.layout, share.rank).stages
        count = share.layout.pp * len(held)
        modules = nn.ModuleList(Llama(share.size, tuple(u.name for u in s.units)) for s in held)
        stages = [PipelineStage(m, s.index, count, torch.device("cpu")) for m, s in zip(modules, held, strict=True)]
        micro_batches = len(share.ids)
        runner = schedule(stages[0] if schedule is Schedule1F1B else stages, micro_batches, loss_fn=loss_of)
        optimizer = Optimizer(modules, dist.group.WORLD)
        first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
        ids, targets = share.ids.flatten(0, 1), share.targets.flatten(0, 1)

        def step() -> torch.Tensor:
            losses: list[torch.Tensor] = []
            given: Iterable[torch.Tensor] = (ids,) if first else ()
            runner.step(*given, **({"target": targets, "losses": losses} if last else {}))
            optimizer.step()
            return torch.stack([x.detach() for x in losses]).mean() if last else torch.zeros(())

        return step

    return make


class Row(NamedTuple):
    """One line of the table. `layout` is ours, its ranks are those of both sides."""

    peer: str
    layout: str
    theirs: Make
    ours: Make = ours


ROWS = (
    Row("no parallelism", "mb=8", plain),
    Row("DistributedDataParallel", "dp=2 mb=4", torch_ddp),
    Row("the same, our wrapper", "dp=2 mb=4", torch_ddp, our_ddp),
    Row("fully_shard", "dp=2 zero=3 mb=4", torch_fsdp),
    Row("DTensor TP + SP", "tp=2 mb=8", torch_tp),
    Row("Schedule1F1B", "pp=4 mb=1", torch_pipeline(Schedule1F1B)),
    Row("ScheduleInterleaved1F1B", "pp=4 schedule=interleaved:2 mb=1", torch_pipeline(ScheduleInterleaved1F1B)),
    Row("ScheduleInterleavedZeroBubble", "pp=4 schedule=zb-h1 mb=1", torch_pipeline(ScheduleInterleavedZeroBubble)),
    Row("ScheduleZBVZeroBubble", "pp=4 schedule=zb-v mb=1", torch_pipeline(ScheduleZBVZeroBubble)),
)
