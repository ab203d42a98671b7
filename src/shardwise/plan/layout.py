"""Layout: the degrees and choices of one parallel training run, and its one text form.

tp=8 pp=16 dp=128 zero=1 schedule=interleaved:2 mb=1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise import schedule as schedules
from shardwise.mesh import AXES, EXPERT_AXES, Mesh

ZERO = (0, 1, 2, 3)
CP_KINDS = ("ring", "ulysses", "gather")
"""Context parallelism: K and V go round a ring (zigzag halves), heads are exchanged for tokens, or K and V are
gathered."""

RECOMPUTED = ("norm", "act", "core")
"""What may be computed again in the backward by itself: norms, activations, the core of attention (Korthikanti et al.
2205.05198, section 5)."""

ORDERS = ("pp", "dp")
"""What lies outermost: pipeline stages, or the replicas of data parallelism (each within a data centre of its own)."""

MAX_DEGREE = 1 << 24
DEFAULT_SCHEDULE = "1f1b"
"""Also the one that a single stage takes."""


KEYS = (
    *("tp", "sp", "cp", "cp_kind", "pp", "ep", "etp", "dp", "dp_replicate", "dp_shard", "zero"),
    *("schedule", "split", "mb", "recompute", "order"),
)

_HINTS = {
    "fsdp": "fsdp is dp_shard (x context parallel): write dp_shard=N zero=3",
    "edp": "expert-data parallelism is what ep and etp leave: dp_shard x cp x tp / (ep x etp)",
    "vpp": "virtual stages belong to the schedule: write schedule=interleaved:V",
    "mbs": "write mb=N",
    "gbs": "the global batch is no part of a layout: --batch",
    "ga": "accumulation follows from the batch: batch / (dp x mb)",
}


class LayoutError(ValueError):
    """A layout text that cannot be read; `faults` says all that is wrong with it."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees and choices. `dp_replicate * dp_shard` data-parallel ranks; ZeRO shards over `dp_shard * cp`, routed
    experts over `edp`.

    `split` is the number of layers of each stage, empty for the default; `mb` the sequences of a micro-batch;
    `recompute` none, full, or some of RECOMPUTED. Equal layouts compare equal: ZeRO over one rank is no ZeRO, sequence
    parallelism over one rank none. Raises LayoutError for values that no layout has.
    """

    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_kind: str = CP_KINDS[0]
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int = 0
    schedule: str = DEFAULT_SCHEDULE
    split: tuple[int, ...] = ()
    mb: int = 1
    recompute: str = "none"
    order: str = ORDERS[0]

    def __post_init__(self) -> None:
        degrees = ("tp", "cp", "pp", "ep", "etp", "dp_replicate", "dp_shard", "mb")
        numbers = {key: int(getattr(self, key)) for key in degrees}
        faults = [f"{key}={n}: wanted 1 or more" for key, n in numbers.items() if n < 1]
        if self.zero == 0 and self.dp_shard > 1:
            faults.append(shards_nothing(self.dp_replicate, self.dp_shard))
        for key, known in (("zero", ZERO), ("cp_kind", CP_KINDS), ("order", ORDERS)):
            if getattr(self, key) not in known:
                faults.append(f"{key}={str(getattr(self, key))[:40]}: wanted one of {', '.join(map(str, known))}")
        try:
            schedules.parse(self.schedule)
        except ValueError as error:
            faults.append(f"schedule={self.schedule[:40]}: {error}")
        try:
            object.__setattr__(self, "recompute", recompute_text(self.recompute))
        except LayoutError as error:
            faults += error.faults
        if faults:
            raise LayoutError(faults)
        object.__setattr__(self, "zero", self.zero if self.dp_shard * self.cp > 1 else 0)
        object.__setattr__(self, "sp", self.sp and self.tp > 1)
        object.__setattr__(self, "cp_kind", self.cp_kind if self.cp > 1 else CP_KINDS[0])
        object.__setattr__(self, "order", self.order if self.pp > 1 and self.dp_replicate > 1 else ORDERS[0])

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def mesh(self) -> Mesh:
        return self._mesh(AXES, 1)

    @property
    def edp(self) -> int:
        """Expert-data parallel ranks over which experts' state may be cut; the rules make it whole."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp) if self.zero else 1

    @property
    def expert_replicas(self) -> int:
        """Ranks with the same part of the experts' state: what is left of the stage's ranks."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp) // max(1, self.edp)

    @property
    def expert_mesh(self) -> Mesh:
        """The ranks as routed experts see them; without ZeRO all copies are one axis, `edp`, unless replicas lie
        outermost."""
        if self.zero:
            return self._mesh(EXPERT_AXES, self.edp)
        return self._mesh(EXPERT_AXES, self.expert_replicas // (self.dp if self.order == "dp" else 1))

    def _mesh(self, axes: tuple[str, ...], edp: int) -> Mesh:
        names = ("dp_replicate", *(a for a in axes if a != "dp_replicate")) if self.order == "dp" else axes
        merged = "edp" in axes and not self.zero and self.order != "dp"
        degrees = {"edp": max(1, edp), **({"dp_replicate": 1} if merged else {})}
        return Mesh(tuple((a, degrees[a] if a in degrees else int(getattr(self, a))) for a in names))

    @property
    def stages(self) -> int:
        return self.pp * schedules.virtual_stages(self.schedule)

    @property
    def shards(self) -> int:
        """Parts into which ZeRO cuts the dense model state: 1 without it."""
        return self.dp_shard * self.cp if self.zero else 1

    @property
    def recomputes(self) -> frozenset[str]:
        """What of RECOMPUTED is computed again; empty under none and full."""
        return frozenset(() if self.recompute in ("none", "full") else self.recompute.split(","))

    def __str__(self) -> str:
        parts: list[str] = []

        def add(key: str, value: object, default: object) -> None:
            if value != default:
                parts.append(f"{key}={value}")

        add("tp", self.tp, 1)
        add("sp", int(self.sp), int(self.tp > 1))
        add("cp", self.cp, 1)
        add("cp_kind", self.cp_kind, CP_KINDS[0])
        add("pp", self.pp, 1)
        add("ep", self.ep, 1)
        add("etp", self.etp, 1)
        if self.dp_replicate > 1 and (self.dp_shard > 1 or self.zero):
            add("dp_replicate", self.dp_replicate, 1)
            add("dp_shard", self.dp_shard, 1)
        else:
            add("dp", self.dp, 1)
        add("zero", self.zero, 0)
        add("schedule", self.schedule, DEFAULT_SCHEDULE)
        add("split", ",".join(map(str, self.split)), "")
        parts.append(f"mb={self.mb}")
        add("recompute", self.recompute, "none")
        add("order", self.order, ORDERS[0])
        return " ".join(parts)


def recompute_text(text: str) -> str:
    """The one spelling of a set of recomputed operations: names in the order of RECOMPUTED. Raises LayoutError."""
    if text in ("none", "full"):
        return text
    names = text.split(",")
    if unknown := [n for n in names if n not in RECOMPUTED]:
        wanted = f"wanted none, full, or some of {','.join(RECOMPUTED)}"
        raise LayoutError([f"recompute={text[:40]}: no {unknown[0][:40]!r}; {wanted}"])
    return ",".join(n for n in RECOMPUTED if n in names)


def shards_nothing(replicate: int, shard: int) -> str:
    """What is wrong with shards that no ZeRO level makes."""
    return f"zero=0 shards nothing over dp_shard={shard}: write dp={replicate * shard}, or zero=1 or more"


class _Words:
    """The `key=value` words of a layout text, with every fault collected."""

    def __init__(self, text: str) -> None:
        self.faults: list[str] = []
        self.values: dict[str, str] = {}
        for word in text.split():
            key, equals, value = word.rstrip(",;").partition("=")
            if not equals or not value:
                self.faults.append(f"{_shown(word)}: wanted key=value, for example tp=8")
            elif key in _HINTS:
                self.faults.append(f"{key}=: {_HINTS[key]}")
            elif key not in KEYS:
                self.faults.append(f"{_shown(key)}: no such key; the keys are {' '.join(KEYS)}")
            elif key in self.values:
                self.faults.append(f"{key}=: given twice")
            else:
                self.values[key] = value
        if len(self.faults) > 10:
            self.faults = [*self.faults[:10], f"and {len(self.faults) - 10} more"]

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


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def parse(text: str) -> Layout:
    """The layout that `text` spells. Raises LayoutError with all faults at once."""
    words = _Words(text)
    if "mb" not in words.values:
        words.faults.append("mb=: missing; write the sequences of a micro-batch, for example mb=1")
    tp, cp = words.integer("tp", 1), words.integer("cp", 1)
    zero = int(words.choice("zero", tuple(map(str, ZERO)), "0"))
    replicate, shard = _data_parallel(words, zero)
    fields = {
        "tp": tp,
        "sp": words.choice("sp", ("0", "1"), "1" if tp > 1 else "0") == "1",
        "cp": cp,
        "cp_kind": words.choice("cp_kind", CP_KINDS, CP_KINDS[0]),
        "pp": words.integer("pp", 1),
        "ep": words.integer("ep", 1),
        "etp": words.integer("etp", 1),
        "dp_replicate": replicate,
        "dp_shard": shard,
        "zero": zero,
        "schedule": _schedule(words),
        "split": _split(words),
        "mb": words.integer("mb", 1),
        "recompute": _recompute(words),
        "order": words.choice("order", ORDERS, ORDERS[0]),
    }
    if words.faults:
        raise LayoutError(words.faults)
    return Layout(**fields)  # type: ignore[arg-type]


def _schedule(words: _Words) -> str:
    name = words.values.get("schedule", DEFAULT_SCHEDULE)
    try:
        schedules.parse(name)
    except ValueError as error:
        words.faults.append(f"schedule={name[:40]}: {error}")
        return DEFAULT_SCHEDULE
    return name


def _recompute(words: _Words) -> str:
    try:
        return recompute_text(words.values.get("recompute", "none"))
    except LayoutError as error:
        words.faults += error.faults
        return "none"


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
        words.faults.append(shards_nothing(replicate, shard))
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
