"""What an optimizer keeps beside the weights: the memory account, the runtime and the checkpoints all read it here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Of one optimizer, what has to be known to count it; its mathematics is the runtime's (`train/optim.py`)."""

    name: str
    title: str
    states: tuple[str, ...]
    """tensors of every parameter beside its master copy, in the accumulation dtype, by torch's names"""
    counter_bytes: int
    """of the step counter of each flat view"""
    passes: int
    """how often one step reads or writes an element of the master copy, the gradient or a state"""


ADAMW: Final = OptimizerSpec("adamw", "AdamW", ("exp_avg", "exp_avg_sq"), counter_bytes=4, passes=7)
"""Loshchilov and Hutter (1711.05101): one kernel reads master, gradient and both moments and writes three of them."""

MOMENTUM: Final = OptimizerSpec("sgd-momentum", "SGD with momentum", ("momentum_buffer",), counter_bytes=0, passes=9)
"""Sutskever et al. (2013) as torch.optim.SGD has it: decay into the gradient, gradient into the buffer, buffer into the
weights, each a kernel of two reads and a write."""

SGD: Final = OptimizerSpec("sgd", "SGD", (), counter_bytes=0, passes=6)
"""The first and the last of these kernels."""

OPTIMIZERS: Final = {spec.name: spec for spec in (ADAMW, MOMENTUM, SGD)}
