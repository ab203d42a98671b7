"""ZeRO-1 (Rajbhandari et al. 2020, 5.1): every rank steps a part of the parameters, and holds their state alone.

Parameters are dealt out whole, the largest first, each to the rank with the fewest numbers so far: an optimizer that
needs a whole parameter (Muon, Adafactor) works, and each parameter's update is bit for bit what one process computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, overload

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.train.wrap.collectives import AnyMesh, data_ranks, pieces, start_broadcast, unflatten

PIECE_BYTES = 2**20
"""Small parameters of one owner travel together, up to this; larger ones go alone, without a copy."""

IN_FLIGHT = 4
"""Broadcasts under way; one of several parameters holds a copy of them."""

APART = ("params", "param_names")
"""Entries of a group that are not settings."""


def zero1(params: Any, optimizer_class: type[Optimizer], *, mesh: AnyMesh = None, **settings: Any) -> Zero1:
    """An optimizer of `optimizer_class` whose state is dealt out over the ranks.

    `params`: what torch's optimizers take (tensors, named tensors or groups; a generator too). `settings`: the
    optimizer's own, such as lr. `mesh`: a shardwise Mesh, a DeviceMesh of one dim, a ProcessGroup, or None for the
    world. Gradients have to be equal on all ranks before `step`, as `ddp` makes them.
    Raises RuntimeError where no process group is open, ValueError for an optimizer whose step needs a closure.
    """
    return Zero1(params, optimizer_class, mesh, settings)


class Zero1(Optimizer):
    """A torch Optimizer over all parameters; `local` is the one over this rank's, and does the work.

    `param_groups` are live: what a scheduler writes there holds from the next step. `state` is this rank's.
    """

    def __init__(self, params: Any, kind: type[Optimizer], mesh: AnyMesh, settings: dict[str, Any]) -> None:
        if needs_closure(kind):
            raise ValueError(f"{kind.__name__} calls its closure several times, which ranks cannot do apart")
        self.ranks = data_ranks(mesh)
        self.local: Optimizer | None = None
        self._owner: dict[torch.Tensor, int] = {}
        self._load = [0] * self.ranks.size
        super().__init__(params, dict(settings))
        groups = [self._own(group) for group in self.param_groups]
        self.local = kind(groups, **settings)
        self.defaults = self.local.defaults
        self._take_defaults()

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a group, as torch takes it."""
        for p in sorted(group["params"], key=lambda p: -p.numel()):
            place = min(range(self.ranks.size), key=self._load.__getitem__)
            self._owner[p] = place
            self._load[place] += p.numel()
        return {**_settings(group), "params": self._mine(group)}

    def _mine(self, group: dict[str, Any]) -> list[torch.Tensor]:
        return [p for p in group["params"] if self._owner[p] == self.ranks.index]

    def _take_defaults(self) -> None:
        """Settings that the caller left out are the optimizer's own."""
        local = self._local()
        for group, part in zip(self.param_groups, local.param_groups, strict=True):
            for key, value in _settings(part).items():
                group.setdefault(key, value)
        self.state = local.state

    def _local(self) -> Optimizer:
        if self.local is None:
            raise RuntimeError("the optimizer is used before it is built")
        return self.local

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; every rank adds the same group."""
        super().add_param_group(param_group)
        if self.local is not None:
            self.local.add_param_group(self._own(self.param_groups[-1]))
            self._take_defaults()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Call `closure` once, step this rank's parameters, send them to the others. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        local = self._local()
        for group, part in zip(self.param_groups, local.param_groups, strict=True):
            part.update(_settings(group))
        local.step()
        for group, part in zip(self.param_groups, local.param_groups, strict=True):
            group.update(_settings(part))
        self._publish()
        return loss

    @torch.no_grad()
    def _publish(self) -> None:
        """Every trainable parameter from its owner: large ones in place, small ones of one owner together."""
        kinds: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    kinds.setdefault((self._owner[p], p.dtype, p.device), []).append(p.detach())
        flying: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
        for (owner, _, _), same in kinds.items():
            for piece in pieces(same, PIECE_BYTES):
                alone = len(piece) == 1 and piece[0].is_contiguous()
                mine = owner == self.ranks.index
                if alone:
                    flat = piece[0]
                elif mine:
                    flat = torch.cat([p.reshape(-1) for p in piece])
                else:
                    flat = piece[0].new_empty(sum(p.numel() for p in piece))
                flying.append((start_broadcast(flat, self.ranks, owner), flat, [] if alone or mine else piece))
                if len(flying) > IN_FLIGHT:
                    _land(*flying.pop(0))
        for flight in flying:
            _land(*flight)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in the form of the optimizer without sharding, on every rank, tensors on the CPU.

        Collective: call it on all ranks, save it on one.
        """
        places = self._places()
        local = {places[p]: _to_cpu(state) for p, state in self._local().state.items()}
        parts: list[Any] = [local]
        if self.ranks.size > 1:
            parts = [None] * self.ranks.size
            dist.all_gather_object(parts, local, group=self.ranks.group)
        state = {place: part[place] for part in parts for place in part}
        packed = super().state_dict()
        return {**packed, "state": dict(sorted(state.items()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a whole state: of this class on any number of ranks, or of the optimizer without sharding."""
        local = self._local()
        super().load_state_dict({**state_dict, "state": {}})
        order = {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        packed = local.state_dict()
        for group, part in zip(packed["param_groups"], self.param_groups, strict=True):
            group.update(_settings(part))
        mine = [p for group in local.param_groups for p in group["params"]]
        states = {i: keys[order[id(p)]] for i, p in enumerate(mine)}
        packed["state"] = {i: state_dict["state"][key] for i, key in states.items() if key in state_dict["state"]}
        local.load_state_dict(packed)
        self.state = local.state

    def _places(self) -> dict[torch.Tensor, int]:
        return {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def __getstate__(self) -> NoReturn:
        raise TypeError("a sharded optimizer cannot be copied or pickled: use state_dict()")


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in APART}


def _to_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _land(work: dist.Work, flat: torch.Tensor, into: Iterable[torch.Tensor]) -> None:
    work.wait()
    unflatten(flat, into)


def needs_closure(kind: type[Optimizer]) -> bool:
    """Whether `step` cannot be called without one, as LBFGS's."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
