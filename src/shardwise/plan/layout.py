"""Layout: the degrees and choices of one parallel training run, and its one text form.

tp=8 pp=16 dp=128 zero=1 schedule=interleaved:2 mb=1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise import schedule as schedules
from shardwise.mesh import AXES, Mesh

KEYS = ("tp", "sp", "pp", "dp", "dp_replicate", "dp_shard", "zero", "schedule", "split", "mb", "recompute")
ZERO = (0, 1, 3)
RECOMPUTE = ("none", "full")
MAX_DEGREE = 1 << 24
DEFAULT_SCHEDULE = "1f1b"
"""Also the one that a single stage takes."""

_HINTS = {
    "fsdp": "fsdp is dp_shard (x context parallel): write dp_shard=N zero=3",
    "cp": "context parallelism is not supported yet",
    "ep": "expert parallelism is not supported yet",
    "etp": "expert parallelism is not supported yet",
    "order": "the mesh order is pp, dp_replicate, dp_shard, tp; choosing another is not supported yet",
}


class LayoutError(ValueError):
    """A layout text that cannot be read; `faults` says all that is wrong with it."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees and choices. `dp_replicate * dp_shard` data-parallel ranks; ZeRO shards over `dp_shard`.

    `split` is the number of layers of each stage, empty for the default; `mb` the sequences of a micro-batch. Equal
    layouts compare equal: ZeRO over one rank is no ZeRO, sequence parallelism over one rank none. Raises LayoutError
    for values that no layout has.
    """

    tp: int = 1
    sp: bool = False
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int = 0
    schedule: str = DEFAULT_SCHEDULE
    split: tuple[int, ...] = ()
    mb: int = 1
    recompute: str = "none"

    def __post_init__(self) -> None:
        numbers = {key: int(getattr(self, key)) for key in ("tp", "pp", "dp_replicate", "dp_shard", "mb")}
        faults = [f"{key}={n}: wanted 1 or more" for key, n in numbers.items() if n < 1]
        if self.zero not in ZERO:
            faults.append(f"zero={self.zero}: wanted one of {', '.join(map(str, ZERO))}")
        if self.recompute not in RECOMPUTE:
            faults.append(f"recompute={self.recompute}: wanted one of {', '.join(RECOMPUTE)}")
        if self.zero == 0 and self.dp_shard > 1:
            faults.append(_shards_nothing(self.dp_replicate, self.dp_shard))
        try:
            schedules.parse(self.schedule)
        except ValueError as error:
            faults.append(f"schedule={self.schedule[:40]}: {error}")
        if faults:
            raise LayoutError(faults)
        object.__setattr__(self, "zero", self.zero if self.dp_shard > 1 else 0)
        object.__setattr__(self, "sp", self.sp and self.tp > 1)

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def mesh(self) -> Mesh:
        return Mesh(tuple((axis, int(getattr(self, axis))) for axis in AXES))

    @property
    def stages(self) -> int:
        return self.pp * schedules.virtual_stages(self.schedule)

    @property
    def shards(self) -> int:
        """Parts into which ZeRO cuts the model state: 1 without it."""
        return self.dp_shard if self.zero else 1

    def __str__(self) -> str:
        parts: list[str] = []

        def add(key: str, value: object, default: object) -> None:
            if value != default:
                parts.append(f"{key}={value}")

        add("tp", self.tp, 1)
        add("sp", int(self.sp), int(self.tp > 1))
        add("pp", self.pp, 1)
        if self.dp_replicate > 1 and self.dp_shard > 1:
            parts += [f"dp_replicate={self.dp_replicate}", f"dp_shard={self.dp_shard}"]
        else:
            add("dp", self.dp, 1)
        add("zero", self.zero, 0)
        add("schedule", self.schedule, DEFAULT_SCHEDULE)
        add("split", ",".join(map(str, self.split)), "")
        parts.append(f"mb={self.mb}")
        add("recompute", self.recompute, "none")
        return " ".join(parts)


class _Words:
    """The `key=value` words of a layout text, with every fault collected."""

    def __init__(self, text: str) -> None:
        self.faults: list[str] = []
        self.values: dict[str, str] = {}
        for word in text.split():
            key, equals, value = word.rstrip(",;").partition("=")
            if not equals or not value:
                self.faults.append(f"{word!r}: wanted key=value, for example tp=8")
            elif key in _HINTS:
                self.faults.append(f"{key}=: {_HINTS[key]}")
            elif key not in KEYS:
                self.faults.append(f"{key}=: no such key; the keys are {' '.join(KEYS)}")
            elif key in self.values:
                self.faults.append(f"{key}=: given twice")
            else:
                self.values[key] = value

    def integer(self, key: str, default: int, lowest: int = 1) -> int:
        text = self.values.get(key)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 12 and lowest <= int(text) <= MAX_DEGREE):
            self.faults.append(f"{key}={text[:40]}: wanted a whole number from {lowest} to {MAX_DEGREE:,}")
            return default
        return int(text)

    def choice(self, key: str, known: tuple[str, ...], default: str) -> str:
        text = self.values.get(key, default)
        if text not in known:
            self.faults.append(f"{key}={text[:40]}: wanted one of {', '.join(known)}")
            return default
        return text


def parse(text: str) -> Layout:
    """The layout that `text` spells. Raises LayoutError with all faults at once."""
    words = _Words(text)
    if "mb" not in words.values:
        words.faults.append("mb=: missing; write the sequences of a micro-batch, for example mb=1")
    tp = words.integer("tp", 1)
    if words.values.get("zero") == "2":
        words.faults.append("zero=2: not supported yet; zero=1 keeps whole gradients, zero=3 shards everything")
        words.values["zero"] = "1"
    zero = int(words.choice("zero", tuple(map(str, ZERO)), "0"))
    replicate, shard = _data_parallel(words, zero)
    name = words.values.get("schedule", DEFAULT_SCHEDULE)
    try:
        schedules.parse(name)
    except ValueError as error:
        words.faults.append(f"schedule={name[:40]}: {error}")
        name = DEFAULT_SCHEDULE
    layout = Layout(
        tp=tp,
        sp=words.choice("sp", ("0", "1"), "1" if tp > 1 else "0") == "1",
        pp=words.integer("pp", 1),
        dp_replicate=replicate,
        dp_shard=shard,
        zero=zero,
        schedule=name,
        split=_split(words),
        mb=words.integer("mb", 1),
        recompute=words.choice("recompute", RECOMPUTE, "none"),
    )
    if words.faults:
        raise LayoutError(words.faults)
    return layout


def _shards_nothing(replicate: int, shard: int) -> str:
    return f"zero=0 shards nothing over dp_shard={shard}: write dp={replicate * shard}, or zero=1 or 3"


def _data_parallel(words: _Words, zero: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard): `dp=N` is the one that the ZeRO level uses."""
    given = {"dp_replicate", "dp_shard"} & set(words.values)
    if "dp" in words.values:
        if given:
            words.faults.append(f"dp=: refused beside {' and '.join(sorted(given))}, which already say it")
        dp = words.integer("dp", 1)
        return (1, dp) if zero else (dp, 1)
    replicate, shard = words.integer("dp_replicate", 1), words.integer("dp_shard", 1)
    if not zero and shard > 1:
        words.faults.append(_shards_nothing(replicate, shard))
        return replicate * shard, 1
    return replicate, shard


def _split(words: _Words) -> tuple[int, ...]:
    text = words.values.get("split", "")
    if not text:
        return ()
    parts = text.split(",")
    if len(parts) > 4096 or not all(p.isascii() and p.isdigit() and len(p) < 7 for p in parts):
        words.faults.append(f"split={text[:40]}: wanted the layers of each stage, for example split=7,8,8,7")
        return ()
    return tuple(map(int, parts))


@lru_cache(maxsize=4096)
def default_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: the stages that get one layer fewer are the outermost, the last one first.

    The ends hold the embedding and the head beside their layers; the head costs more than the embedding.
    """
    short = -layers % stages
    full = -(-layers // stages)
    at_end = (short + 1) // 2
    return tuple(full - (s < short - at_end or s >= stages - at_end) for s in range(stages))


def split_of(layout: Layout, layers: int) -> tuple[int, ...]:
    """Layers of each stage, in the order of the stages."""
    return layout.split or default_split(layers, layout.stages)
