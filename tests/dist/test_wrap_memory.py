"""What `fsdp` holds and issues: gathered weights, gathers and reductions, counted from below."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise.train.wrap.shards as shards
from shardwise.train.comm import Comm
from shardwise.train.wrap.ddp import ddp
from shardwise.train.wrap.fsdp import fsdp
from shardwise.train.wrap.zero1 import zero1
from tests.dist.pool import run_gloo

torch.set_num_threads(1)
pytestmark = pytest.mark.dist

LAYERS, WIDTH = 6, 8


class Watch:
    """Every gathered buffer by weak reference, every gather and reduction, and when each layer computes."""

    def __init__(self, model: Any) -> None:
        self.units = model.forward.home.engine.units
        self.buffers: list[weakref.ref[torch.UntypedStorage]] = []
        self.events: list[str] = []
        self.most = 0
        self._gather, self._scatter = shards.start_all_gather, shards.ReduceScatter.start

    def __enter__(self) -> Watch:
        def gather(out: torch.Tensor, x: torch.Tensor, ranks: Any) -> Any:
            self.buffers.append(weakref.ref(out.untyped_storage()))
            self.events.append("gather")
            self.most = max(self.most, 1 + sum(unit.buffer is not None or unit.in_flight for unit in self.units))
            return self._gather(out, x, ranks)

        def scatter(x: torch.Tensor, ranks: Any) -> Any:
            self.events.append("reduce")
            return self._scatter(x, ranks)

        shards.start_all_gather = gather
        shards.ReduceScatter.start = scatter
        return self

    def __exit__(self, *_: object) -> None:
        shards.start_all_gather = self._gather
        shards.ReduceScatter.start = self._scatter

    @property
    def alive(self) -> int:
        """Buffers that someone holds, a saved view included, and no collection of garbage needed to free them.

        gloo's own thread lets go of a buffer shortly after it has said that the gather is done.
        """
        deadline = time.monotonic() + 1
        while (count := sum(ref() is not None for ref in self.buffers)) and time.monotonic() < deadline:
            time.sleep(0.001)
        return count


class Stack(nn.Module):
    """Layers in a row; `mode` says how the forward uses them."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        if mode == "frozen":
            for layer in list(self.layers)[1:]:
                layer.requires_grad_(False)

    def part(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for layer in list(self.layers)[first : first + 3]:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (0, 3):
            if self.mode in ("recompute", "reentrant"):
                out: Any = checkpoint(self.part, x, first, use_reentrant=self.mode == "reentrant")
                x = out
            else:
                x = self.part(x, first)
        return x


def watched(comm: Comm, mode: str) -> dict[str, Any]:
    """Counts of the second step."""
    model: Any = fsdp(Stack(mode))
    x = torch.ones(2, WIDTH, requires_grad=True)
    with Watch(model) as watch:
        model(x).square().mean().backward()  # the order is known from here on
        model.finish_gradient_synchronization()
        watch.events, watch.most = [], 0
        loss = model(x).square().mean()
        forward, after_forward, before = watch.events.count("gather"), watch.alive, watch.most
        loss.backward()
        after_backward = watch.alive
        model.finish_gradient_synchronization()
        with torch.no_grad():
            model(x)
        assert watch.alive == 0
    return {
        "forward": forward,
        "gathers": watch.events.count("gather") - LAYERS,
        "reductions": watch.events.count("reduce"),
        "left": (after_forward, after_backward),
        "most": (before, watch.most),
    }


def all_modes(comm: Comm) -> dict[str, dict[str, Any]]:
    return {mode: watched(comm, mode) for mode in ("plain", "frozen", "recompute", "reentrant")}


def test_no_gathered_weight_survives_and_two_at_most_are_there() -> None:
    for found in run_gloo(2, "tests.dist.test_wrap_memory:all_modes"):
        expected = {"forward": LAYERS, "left": (0, 0), "most": (2, 2)}
        assert found["plain"] == {**expected, "gathers": 2 * LAYERS, "reductions": LAYERS}
        assert found["frozen"] == {**expected, "gathers": 2 * LAYERS, "reductions": 1}
        assert found["recompute"] == {**expected, "gathers": 3 * LAYERS, "reductions": LAYERS}
        # The end of each inner backward drops what was gathered ahead: at most one gather more a checkpoint.
        more = found["reentrant"]["gathers"] - 3 * LAYERS
        assert found["reentrant"] == {**expected, "gathers": 3 * LAYERS + more, "reductions": LAYERS}
        assert 0 <= more <= 2


def order(comm: Comm) -> list[str]:
    """Events of a forward whose order is known, with the layers' own marks between them."""
    model: Any = fsdp(Stack("plain"))
    x = torch.ones(2, WIDTH)
    with Watch(model) as watch:
        model(x)
        for i, layer in enumerate(model.layers):
            inner = layer.forward.forward

            def marked(y: torch.Tensor, i: int = i, inner: Any = inner) -> torch.Tensor:
                watch.events.append(f"F{i}")
                return inner(y)

            layer.forward.forward = marked
        watch.events.clear()
        model(x)
    return watch.events


def test_the_next_gather_is_issued_before_a_unit_computes_and_no_earlier() -> None:
    wanted = ["gather"]
    for i in range(LAYERS):
        wanted += ["gather", f"F{i}"] if i < LAYERS - 1 else [f"F{i}"]
    assert run_gloo(2, "tests.dist.test_wrap_memory:order") == [wanted, wanted]


def shared(comm: Comm) -> tuple[int, int, int, bool]:
    """One module three times in a forward: gathers of forward and backward, reductions; and its block as one unit."""
    layer = nn.Linear(WIDTH, WIDTH)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = layer, nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(self.norm(x))))))

    model: Any = fsdp(Loop(), None, (Loop,))
    with Watch(model) as watch:
        model(torch.ones(2, WIDTH)).sum().backward()
        model.finish_gradient_synchronization()
    one_unit = watch.events.count("gather"), watch.events.count("reduce")
    layer = nn.Linear(WIDTH, WIDTH)
    model = fsdp(Loop())
    with Watch(model) as watch:
        model(torch.ones(2, WIDTH)).sum().backward()
        model.finish_gradient_synchronization()
    return *one_unit, watch.events.count("reduce"), watch.alive == 0


def test_a_module_called_several_times_is_reduced_once() -> None:
    assert run_gloo(2, "tests.dist.test_wrap_memory:shared") == [(2, 1, 1, True)] * 2


def saved(comm: Comm) -> tuple[int, int]:
    """Bytes that autograd holds between forward and backward, with recomputation and without."""
    held: list[int] = []
    for mode in ("plain", "recompute"):
        model: Any = fsdp(Stack(mode))
        alive: list[weakref.ref[torch.Tensor]] = []

        for layer in model.layers:
            layer.register_forward_hook(lambda m, i, o, alive=alive: alive.append(weakref.ref(i[0])))
        loss = model(torch.ones(2, WIDTH, requires_grad=True)).sum()
        held.append(sum(ref() is not None for ref in alive))
        loss.backward()
        model.finish_gradient_synchronization()
    return held[0], held[1]


def test_recomputation_outside_of_units_still_frees_activations() -> None:
    """Hooks on saved tensors nest; those of a checkpoint around the units must see what the units save."""
    for plain, recomputed in run_gloo(2, "tests.dist.test_wrap_memory:saved"):
        assert plain == LAYERS and recomputed <= 2  # the inputs of the two parts, held by the checkpoints


def bytes_held(comm: Comm) -> list[int]:
    """Row 22 of the known failures: parameters, gradients and optimizer state after a step, by strategy."""
    found: list[int] = []
    for kind in ("ddp", "zero1", "fsdp"):
        model: Any = Stack("plain")
        model = fsdp(model) if kind == "fsdp" else ddp(model)
        make = zero1 if kind == "zero1" else lambda params, kind, **settings: kind(params, **settings)
        optimizer = make(model.parameters(), torch.optim.AdamW, lr=0.1)
        model(torch.ones(2, WIDTH)).sum().backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        tensors = [t for p in model.parameters() for t in (p, p.grad)]
        tensors += [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        found.append(sum(t.numel() * t.element_size() for t in tensors))
    return found


def test_each_stage_holds_what_it_should() -> None:
    whole = 4 * LAYERS * WIDTH**2
    assert run_gloo(2, "tests.dist.test_wrap_memory:bytes_held") == [[4 * whole, 3 * whole, 2 * whole]] * 2
