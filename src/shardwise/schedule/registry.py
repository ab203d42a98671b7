"""The schedules by name. A new schedule is one file and one entry in `_families`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.schedule.closed_form import Array, Busy
from shardwise.schedule.passes import add_p2p
from shardwise.schedule.table import Placement, Row, Schedule, in_turn


class About(NamedTuple):
    """A schedule in one sentence, and the paper that it comes from."""

    summary: str
    source: str


@dataclass(frozen=True, slots=True)
class _Family:
    about: About
    generate: Callable[[int, int, int], Schedule]  # pp, micro-batches, stages of a copy on a rank
    span: Callable[[Busy, Array, int], Array]  # micro-batches, stages of a copy on a rank
    transfers: Callable[[int, Array, int], Array]  # pp, micro-batches, stages of a copy on a rank
    saturation: Callable[[int], int] | None  # of pp; None: there is none
    split: bool = False
    virtual: int | None = 1  # None: the name says it
    copies: int = 1
    overlaps: bool = False
    even: bool = False  # pp must be
    places: Callable[[int, int], Placement] = in_turn  # pp, stages of a copy on a rank


_Span: TypeAlias = Callable[[Busy, Array], Array]
_Transfers: TypeAlias = Callable[[int, Array], Array]
_ZERO_BUBBLE, _DEEPSEEK = "Qi et al. 2401.10241", "DeepSeek-V3 2412.19437"


def _fixed(
    span: _Span, transfers: _Transfers
) -> tuple[Callable[[Busy, Array, int], Array], Callable[[int, Array, int], Array]]:
    """Closed forms for the one number of stages on a rank that a schedule has."""
    return (lambda busy, m, _: span(busy, m)), (lambda pp, m, _: transfers(pp, m))


def _of_one_stage() -> dict[str, _Family]:
    from shardwise.schedule import gpipe, one_f_one_b
    from shardwise.schedule import zero_bubble as h1
    from shardwise.schedule import zero_bubble_h2 as h2

    says = {
        "gpipe": About("All forwards, then all backwards: every micro-batch is in flight.", "Huang et al. 1811.06965"),
        "1f1b": About(
            "One forward, one backward: p - r micro-batches in flight on rank r.", "Narayanan et al. 2006.09503"
        ),
        "zb-h1": About("1F1B whose weight gradients fill bubbles: p in flight on every rank.", _ZERO_BUBBLE),
        "zb-h2": About("ZB-H1 without idle time inside the step: 2p - 1 in flight.", _ZERO_BUBBLE),
    }
    forms = {
        "gpipe": (gpipe.generate, *_fixed(gpipe.span, gpipe.transfers), None),
        "1f1b": (one_f_one_b.generate, *_fixed(one_f_one_b.span, one_f_one_b.transfers), one_f_one_b.saturation),
        "zb-h1": (h1.generate, *_fixed(h1.span, h1.transfers), h1.saturation),
        "zb-h2": (h2.generate, *_fixed(h2.span, h2.transfers), h2.saturation),
    }
    return {name: _Family(says[name], *form, split=name.startswith("zb")) for name, form in forms.items()}


@lru_cache(maxsize=1)
def _families() -> dict[str, _Family]:
    # Imported on first use: `python -m shardwise.schedule.gpipe` would otherwise import its own module twice.
    from shardwise.schedule import dualpipe as both_ends
    from shardwise.schedule import dualpipe_v as half
    from shardwise.schedule import interleaved, v_shape
    from shardwise.schedule import zero_bubble_v as zb_v

    loop = About("1F1B with V stages on each rank: a bubble V times shorter.", "Narayanan et al. 2104.04473")
    v = About("Two stages a rank in a V: no idle time inside the step, p in flight.", _ZERO_BUBBLE)
    two = About("Micro-batches from both ends, on two copies of the weights; F hides B's all-to-all.", _DEEPSEEK)
    cut = About("DualPipe cut in half: two stages a rank in a V, one copy of the weights.", _DEEPSEEK)
    looped = interleaved.generate, interleaved.span, interleaved.transfers, interleaved.saturation
    of_v = zb_v.generate, *_fixed(zb_v.span, v_shape.transfers), zb_v.saturation
    of_two = both_ends.generate, *_fixed(both_ends.span, both_ends.transfers), both_ends.saturation
    of_half = half.generate, *_fixed(half.span, v_shape.transfers), half.saturation
    return {
        **_of_one_stage(),
        "interleaved": _Family(loop, *looped, virtual=None),
        "zb-v": _Family(v, *of_v, split=True, virtual=2, places=v_shape.placement),
        "dualpipe": _Family(two, *of_two, split=True, copies=2, overlaps=True, even=True, places=both_ends.placement),
        "dualpipe-v": _Family(cut, *of_half, split=True, virtual=2, overlaps=True, places=v_shape.placement),
    }


NAMES = ("gpipe", "1f1b", "interleaved:V", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")
"""What a plan may say; V is the number of stages on a rank, 1 to 9999, such as interleaved:2."""


def parse(name: str) -> tuple[str, int]:
    """(family, stages of one copy on a rank): ("interleaved", 4) of "interleaved:4", ("zb-v", 2).

    Raises ValueError for an unknown name.
    """
    word, colon, number = name.partition(":")
    found = _families().get(word)
    if found is not None and found.virtual is not None and not colon:
        return word, found.virtual
    if found is not None and found.virtual is None and re.fullmatch(r"0*[1-9][0-9]{0,3}", number):
        return word, int(number)
    raise ValueError(
        f"unknown schedule {name!r}{_meant(name)}; known: {', '.join(NAMES)} (V stages on a rank, as in interleaved:2)"
    )


def _meant(name: str) -> str:
    """A guess at what was meant by a misspelt name."""
    plain = {known.partition(":")[0].replace("-", ""): known for known in NAMES}
    near = get_close_matches(name.partition(":")[0].lower().translate({ord(c): None for c in "-_ "}), plain, n=1)
    return f", did you mean {plain[near[0]].replace(':V', ':2')}?" if near else ""


def about(name: str) -> About:
    """What a schedule is, for a listing; also of the names in NAMES."""
    return _families()[parse(name.replace(":V", ":1"))[0]].about


@lru_cache(maxsize=64)
def build(name: str, pp: int, micro_batches: int) -> Schedule:
    """`generate`, remembered."""
    return generate(name, pp, micro_batches)


def generate(name: str, pp: int, micro_batches: int) -> Schedule:
    """The schedule's table. Raises ValueError for an unknown name or sizes that it has no table for."""
    wrong = fault(name, pp, micro_batches)
    if wrong:
        raise ValueError("; ".join(wrong))
    family, virtual = parse(name)
    return _families()[family].generate(pp, micro_batches, virtual)


def fault(name: str, pp: int, micro_batches: int) -> tuple[str, str] | None:
    """(what is wrong, the nearest sizes that work) where a schedule has no table; None where it has one."""
    family = _families()[parse(name)[0]]
    if pp < 1 or micro_batches < 1:
        return (
            f"{name} needs at least one rank and one micro-batch, not pp={pp}, m={micro_batches}",
            "use pp=1, m=1 or more",
        )
    if family.even and pp % 2:
        near = f"pp={pp - 1} or pp={pp + 1}" if pp > 1 else "pp=2"
        return f"{name} feeds micro-batches from both ends: pp={pp} must be even", f"use {near}"
    return None


def possible(name: str, pp: int, micro_batches: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """[...] for which numbers of micro-batches [...] `fault` finds nothing."""
    counts = np.asarray(micro_batches)
    return (counts >= 1) & (fault(name, pp, 1) is None)


@lru_cache(maxsize=64)
def rows(name: str, pp: int, micro_batches: int) -> tuple[Row, ...]:
    """The rows with their point-to-point operations, remembered."""
    return add_p2p(build(name, pp, micro_batches))


def placement(name: str, pp: int) -> Placement:
    """[copy][stage] -> pipeline rank, of any number of micro-batches."""
    family, virtual = parse(name)
    return _families()[family].places(pp, virtual)


def virtual_stages(name: str) -> int:
    """Stages of one copy of the weights on a rank."""
    return parse(name)[1]


def copies(name: str) -> int:
    """How often the weights are held: a rank has `virtual_stages` of each copy."""
    return _families()[parse(name)[0]].copies


def splits_weight_gradient(name: str) -> bool:
    """Whether B and W are separate actions, of some micro-batches at least."""
    return _families()[parse(name)[0]].split


def overlaps(name: str) -> bool:
    """Whether an F and a BW run as one (`pairs`)."""
    return _families()[parse(name)[0]].overlaps


def period(name: str, pp: int) -> int:
    """Micro-batches after which the steady state repeats: interleaving takes them in groups of pp, copies in turn."""
    return pp if parse(name)[0] == "interleaved" else copies(name)


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


def rank_span(
    name: str,
    pp: int,
    micro_batches: npt.ArrayLike,
    f: npt.ArrayLike,
    b: npt.ArrayLike,
    w: npt.ArrayLike,
    p2p_s: float | Array = 0.0,
    *,
    ranks: npt.ArrayLike | None = None,
) -> Array:
    """Closed form of the seconds from the first to the last action, where no queue holds up a message.

    `f b w` [..., run] are seconds of one micro-batch on all stages of one rank (BW takes b + w; of both copies, where
    there are two, though a micro-batch passes one of them), for runs of equal neighbours; `ranks` [run] counts the
    ranks of each, by default one. `micro_batches` [...] and `p2p_s` [...], one transfer, broadcast with the leading
    dims. The docstrings of the schedules say where it is exact. Raises ValueError if the ranks are not pp.
    """
    family, virtual = parse(name)
    times = [np.asarray(x, dtype=np.float64) for x in (f, b, w)]
    m, runs = np.asarray(micro_batches, dtype=np.float64), max(x.shape[-1] for x in times)
    counts = (1,) * runs if ranks is None else tuple(np.asarray(ranks, dtype=np.int64).tolist())
    if len(counts) != runs or sum(counts) != pp or min(counts) < 1:
        raise ValueError(f"{name} on pp={pp}: {runs} runs of ranks, of {counts}, are {sum(counts)} ranks")
    lead = np.broadcast_shapes(m.shape, *(x.shape[:-1] for x in times))
    flat = [np.broadcast_to(x, (*lead, runs)).reshape(-1, runs).T for x in times]
    count, each = np.broadcast_to(m, lead).reshape(-1), _families()[family].span
    seconds = np.empty_like(count)
    for first in range(0, len(count), _BLOCK):
        part = slice(first, first + _BLOCK)
        f_part, b_part, w_part = (x[:, part] for x in flat)
        seconds[part] = each(Busy(f_part, b_part, w_part, counts), count[part], virtual)
    return seconds.reshape(lead) + transfers(name, pp, m) * p2p_s


_BLOCK = 2048
"""Pipelines that are evaluated together: few enough for their intermediate arrays to stay in the cache."""


def transfers(name: str, pp: int, micro_batches: npt.ArrayLike) -> Array:
    """How many transfers the closed form counts as exposed: [...]."""
    family, virtual = parse(name)
    return _families()[family].transfers(pp, np.asarray(micro_batches, dtype=np.float64), virtual)


def span(
    name: str,
    pp: int,
    micro_batches: npt.ArrayLike,
    f: npt.ArrayLike,
    b: npt.ArrayLike,
    w: npt.ArrayLike,
    p2p_s: float = 0.0,
) -> Array:
    """`rank_span` of the seconds of each stage: `f b w` [..., stages].

    Raises ValueError if the number of stages is not pp * virtual.
    """
    held = _held(name, pp)
    totals: list[Array] = []
    for x in (np.asarray(x, dtype=np.float64) for x in (f, b, w)):
        if x.shape[-1] != held.shape[1]:
            raise ValueError(f"{name} on pp={pp} has {held.shape[1]} stages, not {x.shape[-1]}")
        totals.append(x if len(held) == held.shape[1] and copies(name) == 1 else x @ held.T)
    return rank_span(name, pp, micro_batches, totals[0], totals[1], totals[2], p2p_s)


@lru_cache(maxsize=1024)
def _held(name: str, pp: int) -> Array:
    """[rank, stage] how many copies of the stage the rank holds."""
    copies_of = placement(name, pp)
    held = np.zeros((pp, len(copies_of[0])))
    for copy in copies_of:
        held[list(copy), range(len(copy))] += 1
    return held
