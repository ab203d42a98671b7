"""The schedules by name. A new schedule is one file and one entry in `_families`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardwise.schedule.closed_form import Array
from shardwise.schedule.passes import add_p2p
from shardwise.schedule.table import Row, Schedule


@dataclass(frozen=True, slots=True)
class _Family:
    generate: Callable[[int, int, int], Schedule]
    span: Callable[[Array, Array, Array, Array, int, float], Array]
    saturation: Callable[[int], int] | None  # of pp; None: there is none
    split: bool = False


@lru_cache(maxsize=1)
def _families() -> dict[str, _Family]:
    # Imported on first use: `python -m shardwise.schedule.gpipe` would otherwise import its own module twice.
    from shardwise.schedule import gpipe, interleaved, one_f_one_b, zero_bubble

    return {
        "gpipe": _Family(gpipe.generate, gpipe.span, None),
        "1f1b": _Family(one_f_one_b.generate, one_f_one_b.span, one_f_one_b.saturation),
        "interleaved": _Family(interleaved.generate, interleaved.span, interleaved.saturation),
        "zb-h1": _Family(zero_bubble.generate, zero_bubble.span, zero_bubble.saturation, split=True),
    }


NAMES = ("gpipe", "1f1b", "interleaved:V", "zb-h1")
"""What a plan may say; V is the number of stages on a rank, such as interleaved:2."""


def parse(name: str) -> tuple[str, int]:
    """(family, stages on a rank): ("interleaved", 4) of "interleaved:4". Raises ValueError for an unknown name."""
    family, colon, virtual = name.partition(":")
    if family == "interleaved" and virtual.isascii() and virtual.isdigit() and int(virtual) > 0:
        return family, int(virtual)
    if family in _families() and family != "interleaved" and not colon:
        return family, 1
    raise ValueError(f"unknown schedule {name!r}; known: {', '.join(NAMES)} (V stages on a rank, as in interleaved:2)")


@lru_cache(maxsize=64)
def build(name: str, pp: int, micro_batches: int) -> Schedule:
    """`generate`, remembered."""
    return generate(name, pp, micro_batches)


def generate(name: str, pp: int, micro_batches: int) -> Schedule:
    """The schedule's table. Raises ValueError for an unknown name or a size below 1."""
    family, virtual = parse(name)
    if pp < 1 or micro_batches < 1:
        raise ValueError(f"{name} needs at least one stage and one micro-batch, not pp={pp}, m={micro_batches}")
    return _families()[family].generate(pp, micro_batches, virtual)


@lru_cache(maxsize=64)
def rows(name: str, pp: int, micro_batches: int) -> tuple[Row, ...]:
    """The rows with their point-to-point operations, remembered."""
    return add_p2p(build(name, pp, micro_batches))


def virtual_stages(name: str) -> int:
    """Stages (chunks) on a rank."""
    return parse(name)[1]


def splits_weight_gradient(name: str) -> bool:
    """Whether B and W are separate actions."""
    return _families()[parse(name)[0]].split


def period(name: str, pp: int) -> int:
    """Micro-batches after which the steady state repeats: interleaving takes them in groups of pp."""
    return pp if parse(name)[0] == "interleaved" else 1


def saturation(name: str, pp: int) -> int | None:
    """From this many micro-batches on, `period` more add no state to the live profile; None: in flight grows with m."""
    of_pp = _families()[parse(name)[0]].saturation
    return None if of_pp is None else of_pp(pp)


def capped(name: str, pp: int, micro_batches: int) -> int:
    """The fewest micro-batches with the live profile of `micro_batches`, as far as `saturation` and `period` say."""
    enough, step = saturation(name, pp), period(name, pp)
    if enough is None or micro_batches <= enough:
        return micro_batches
    return enough + (micro_batches - enough) % step


def span(
    name: str,
    pp: int,
    micro_batches: npt.ArrayLike,
    f: npt.ArrayLike,
    b: npt.ArrayLike,
    w: npt.ArrayLike,
    p2p_s: float = 0.0,
) -> Array:
    """Closed form of the seconds from the first to the last action, where no queue holds up a message.

    `f b w` [..., stages] are seconds of each stage (with BW taking b + w), `micro_batches` [...] broadcasts with the
    leading dims, `p2p_s` is one transfer. Equal stages: exact where the docstrings say so. Raises ValueError if the
    number of stages is not pp * virtual.
    """
    family, virtual = parse(name)
    f, b, w, m = (np.asarray(x, dtype=np.float64) for x in (f, b, w, micro_batches))
    if f.shape[-1] != pp * virtual:
        raise ValueError(f"{name} on pp={pp} has {pp * virtual} stages, not {f.shape[-1]}")
    return _families()[family].span(f, b, w, m, pp, p2p_s)
