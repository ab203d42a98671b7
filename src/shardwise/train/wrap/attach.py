"""How a module is made to compute with gathered parameters while its class, its names and its parameters stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn

from shardwise.train.wrap.engine import Engine
from shardwise.train.wrap.shards import Slot, Unit

NO_COPY = "a sharded module cannot be copied or pickled: save gather_full_state_dict() and wrap a new module"


class Home:
    """What wrapped modules refer to: wrapping again around them moves their units to another engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(NO_COPY)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_COPY)


class Window(dict[str, Any]):
    """A module's `_parameters`. Listing it gives the shards; an attribute read gives what can be computed with."""

    def __init__(self, parameters: dict[str, Any], home: Home) -> None:
        super().__init__(parameters)
        self.home = home

    def __getitem__(self, name: str) -> Any:
        return self.home.engine.read(super().__getitem__(name))

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(NO_COPY)


class Forward:
    """A module's `forward` with its units gathered around it, inputs and outputs in the dtypes asked for."""

    def __init__(
        self,
        forward: Callable[..., Any],
        home: Home,
        units: Sequence[Unit] = (),
        input_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self.forward, self.home, self.units = forward, home, units
        self.input_dtype, self.output_dtype = input_dtype, output_dtype
        self.__wrapped__ = forward  # for inspect.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.home.engine
        with engine.using(self.units) if self.units else engine.scope():
            if self.input_dtype is not None:
                args, kwargs = cast_floats((args, kwargs), self.input_dtype)
            out = self.forward(*args, **kwargs)
        return out if self.output_dtype is None else cast_floats(out, self.output_dtype)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor in it as `dtype`; looks into tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        entries = cast(dict[Any, Any], value)
        return {key: cast_floats(item, dtype) for key, item in entries.items()}
    if isinstance(value, tuple | list):
        items = [cast_floats(item, dtype) for item in cast(Sequence[Any], value)]
        fields: Any = getattr(type(value), "_fields", None)
        return type(value)(*items) if fields else type(value)(items)
    return value


def open_window(module: nn.Module, home: Home) -> None:
    """Let attribute reads of the module's own parameters go through the engine."""
    module.__dict__["_parameters"] = Window(dict(module._parameters.items()), home)


def homes(module: nn.Module) -> list[Home]:
    """Of modules inside that are wrapped already, each once."""
    forwards = [m.__dict__.get("forward") for m in module.modules()]
    windows = [m._parameters for m in module.modules()]
    return list(dict.fromkeys(x.home for x in (*forwards, *windows) if isinstance(x, Forward | Window)))


def units_of(module: nn.Module, slots: dict[nn.Parameter, tuple[Slot, Unit]]) -> list[Unit]:
    """Units that hold the parameters inside `module`, each once."""
    return list(dict.fromkeys(slots[p][1] for p in module.parameters() if p in slots))
