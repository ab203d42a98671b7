"""How a plan is trained: the recipe beside job and layout, and how the learning rate moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from shardwise.plan.table import Table

STDLIB: Final = "python-stdlib"
"""The data that every Python brings along: its own standard library's source, byte by byte."""

DECAYS: Final = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What `train` needs beside job and layout.

    The learning rate rises linearly over `warmup` steps, then keeps its height or comes down, by `decay`, to `floor`
    times it at the last step: "linear", or "cosine" as of Loshchilov and Hutter (1608.03983), equation 5 with one
    period. `weight_decay` is of matrices alone; `beta1`, `beta2` and `eps` are AdamW's, `momentum` is SGD's. `data` is
    "python-stdlib" or a path.
    """

    steps: int = 100
    learning_rate: float = 3e-4
    warmup: int = 0
    decay: str = "constant"
    floor: float = 0.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    clip_norm: float = 1.0
    seed: int = 0
    data: str = STDLIB

    def learning_rate_at(self, step: int) -> float:
        """Of step 0 .. steps - 1: a function of the step alone, so a run goes on as if it had never stopped."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        down = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}[self.decay]
        return self.learning_rate * (1 - (1 - self.floor) * down)


def read_settings(table: Table) -> TrainSettings:
    """The settings of a table, each by default its own; what is wrong goes into the table's faults."""
    default = TrainSettings()
    settings = TrainSettings(
        steps=table.integer("steps", 1, 1 << 31, default.steps),
        learning_rate=table.number("learning_rate", 0, 100, default.learning_rate),
        warmup=table.integer("warmup", 0, 1 << 31, default.warmup),
        decay=table.choice("decay", DECAYS, default.decay),
        floor=table.number("floor", 0, 1, default.floor),
        weight_decay=table.number("weight_decay", 0, 100, default.weight_decay),
        beta1=table.number("beta1", 0, BELOW_ONE, default.beta1),
        beta2=table.number("beta2", 0, BELOW_ONE, default.beta2),
        eps=table.number("eps", 0, 1, default.eps),
        momentum=table.number("momentum", 0, BELOW_ONE, default.momentum),
        clip_norm=table.number("clip_norm", 1e-12, 1e12, default.clip_norm),
        seed=table.integer("seed", 0, (1 << 63) - 1, default.seed),
        data=table.text("data", f"'{STDLIB}' or a path", default.data),
    )
    table.known(f.name for f in fields(TrainSettings))
    return settings


BELOW_ONE: Final = 0.999999
"""The largest share that an average may keep of its past: at 1 it would never move."""
