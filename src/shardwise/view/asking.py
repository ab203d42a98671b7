"""What the command line asks: options and files read into a `Request`, all faults at once.

Everything heavy is imported inside the functions: `--help` and a wrong option cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from shardwise.cluster import Device
    from shardwise.model.spec import Model
    from shardwise.plan.job import Precision
    from shardwise.plan.layout import Layout
    from shardwise.plan.optimizer import OptimizerSpec
    from shardwise.plan.plan import Plan
    from shardwise.plan.stack import Stack
    from shardwise.search.limits import Limits
    from shardwise.view.review import Request

T = TypeVar("T")

DEFAULT_SEQ: Final = 8192


class InputError(ValueError):
    """What was asked cannot be; like every error of bad input, `faults` says all that is wrong."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__("\n".join(self.faults))


@dataclass(frozen=True, slots=True)
class Wishes:
    """The options that describe a job and a layout, as typed."""

    on: str | None = None
    seq: str | None = None
    batch: int | None = None
    batch_tokens: str | None = None
    precision: str | None = None
    layout: str | None = None
    stack: str | None = None
    imbalance: float | None = None
    mfu: str | None = None
    optimizer: str | None = None


@dataclass(frozen=True, slots=True)
class SearchWishes:
    """The options that hold a search to some layouts, as typed, and the critical batch."""

    pin: Sequence[str] | None = None
    forbid: Sequence[str] | None = None
    runnable: bool = False
    critical_batch: str | None = None


class Planning(NamedTuple):
    """What `plan` is asked: the layout of the request is the one that `--why-not` names."""

    asked: Request
    limits: Limits
    critical_batch_tokens: int | None


class Faults:
    """Collects what is wrong while the rest is still read, so that all is said at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def take(self, option: str, read: Callable[[], T]) -> T | None:
        """What `read` returns, or None and its faults."""
        try:
            return read()
        except ValueError as error:
            faults: list[str] = getattr(error, "faults", [str(error)])
            self.found += [f"{option}: {fault}" if option else fault for fault in faults]
            return None


def read_request(subject: str, wishes: Wishes, planning: bool = False) -> Request:
    """The job and the layout that the command line or a plan file asks for. Raises InputError with all faults."""
    if subject.endswith(".toml"):
        if planning:
            raise InputError(
                [f"{subject}: a plan already; wanted a model: a catalogue name, a config.json or its folder"]
            )
        return read_plan_request(subject, wishes)
    from shardwise.model.hf import load_model
    from shardwise.plan.job import PRECISIONS, Job
    from shardwise.plan.layout import parse
    from shardwise.plan.plan import load_cluster
    from shardwise.plan.stack import under
    from shardwise.view.review import Request

    faults = Faults()
    model = faults.take(subject or "MODEL", lambda: load_model(subject))
    if wishes.on is None:
        faults.found.append("--on: missing; the cluster, such as --on 64x8xh100, or a plan file instead of a model")
    cluster = None if wishes.on is None else faults.take("--on", lambda: load_cluster(wishes.on or ""))
    option = "--why-not" if planning else "--layout"
    layout = None if wishes.layout is None else faults.take(option, lambda: parse(wishes.layout or ""))
    stack = read_stack(wishes.stack, faults)
    name = wishes.precision or "bf16"
    if name not in PRECISIONS:
        faults.found.append(f"--precision: found {name[:40]!r}; wanted one of {', '.join(PRECISIONS)}")
    elif cluster is not None:
        faults.found += unknown_rate(cluster.device, PRECISIONS[name])
    seq_len = read_seq(wishes.seq, model, faults)
    batch, assumed = read_batch(wishes, seq_len, layout, cluster.world_size if cluster else 1, faults)
    if planning and assumed:
        faults.found.append("--batch-tokens or --batch: missing; it decides which is best, such as --batch-tokens 4M")
    imbalance, mfu = read_imbalance(wishes.imbalance, model, faults), read_convention(wishes.mfu, faults)
    optimizer = read_optimizer(wishes.optimizer, faults)
    if faults.found or model is None or cluster is None or stack is None:
        raise InputError(faults.found)
    if wishes.seq is None:
        assumed = (f"--seq {seq_len}", *assumed)
    job = Job(under(model, stack), cluster, seq_len, batch, PRECISIONS[name], stack, imbalance, optimizer)
    return Request(job, layout, (*assumed, *without_effect(wishes.layout, layout)), mfu)


def without_effect(text: str | None, layout: Layout | None) -> list[str]:
    """What of a layout's text says nothing, and why: equal layouts have one text."""
    asked = [word.rstrip(",;") for word in (text or "").split() if word.startswith("zero=")]
    if layout is None or layout.zero or not asked or asked[0] == "zero=0":
        return []
    return [f"{asked[0]} has no effect, dp_shard x cp is 1: no two ranks hold the same state"]


def read_stack(name: str | None, faults: Faults) -> Stack | None:
    """The software stack whose figures are wanted: our own where none is named."""
    from shardwise.plan.plan import find_stack
    from shardwise.plan.stack import SHARDWISE

    return SHARDWISE if name is None else faults.take("--stack", lambda: find_stack(name))


def read_optimizer(name: str | None, faults: Faults) -> OptimizerSpec:
    """What keeps how much beside the weights: AdamW where none is named."""
    from shardwise.plan.optimizer import ADAMW, OPTIMIZERS

    if name is not None and name not in OPTIMIZERS:
        faults.found.append(f"--optimizer: found {name[:40]!r}; wanted one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS.get(name or "", ADAMW)


def read_imbalance(value: float | None, model: Model | None, faults: Faults) -> float:
    """Routed copies on the fullest rank over the mean."""
    from shardwise.plan.plan import MAX_IMBALANCE

    if value is None:
        return 1.0
    if not 1 <= value <= MAX_IMBALANCE:
        said = "the fullest rank's routed tokens over the mean"
        faults.found.append(f"--imbalance: found {value:g}; wanted {said}, from 1 to {MAX_IMBALANCE:,}")
        return 1.0
    if model is not None and not model.experts and value > 1:
        faults.found.append(f"--imbalance: {model.name} has no routed experts; leave it out")
    return value


def read_planning(subject: str, wishes: Wishes, held: SearchWishes) -> Planning:
    """What `plan` is asked. Raises InputError with all faults."""
    from shardwise.search.limits import read_limits
    from shardwise.units import parse_tokens

    faults = Faults()
    asked = faults.take("", lambda: read_request(subject, wishes, planning=True))
    limits = faults.take("", lambda: read_limits(held.pin or (), held.forbid or (), held.runnable))
    critical = None
    if held.critical_batch is not None:
        critical = faults.take("--critical-batch", lambda: parse_tokens(held.critical_batch or ""))
    if faults.found or asked is None or limits is None:
        raise InputError(faults.found)
    return Planning(asked, limits, critical)


def read_seq(text: str | None, model: Model | None, faults: Faults) -> int:
    """Tokens of a sequence, 8K by default; no more than a model has learned positions for."""
    from shardwise.plan.plan import MAX_SEQ_LEN
    from shardwise.units import parse_tokens

    most = MAX_SEQ_LEN if model is None else model.sizes.get("P", MAX_SEQ_LEN)
    default = min(DEFAULT_SEQ, most)
    found = default if text is None else faults.take("--seq", lambda: parse_tokens(text))
    if found is not None and found > most:
        why = "" if model is None or most == MAX_SEQ_LEN else f", the learned positions of {model.name}"
        faults.found.append(f"--seq: found {found:,}; wanted at most {most:,}{why}")
        return default
    return found or default


def unknown_rate(device: Device, precision: Precision) -> list[str]:
    """A fault if the device's data do not say how fast it computes in the precision's dtype."""
    if precision.compute in device.peak_flops:
        return []
    known = ", ".join(device.peak_flops)
    return [f"precision {precision.name}: peak_flops of {device.name} has no {precision.compute}; it has {known}"]


def read_batch(
    wishes: Wishes, seq_len: int, layout: Layout | None, devices: int, faults: Faults
) -> tuple[int, tuple[str, ...]]:
    """(sequences of a step, what was assumed for want of an option)."""
    from shardwise.plan.job import batch_from_tokens
    from shardwise.units import parse_tokens

    text = wishes.batch_tokens
    if text is not None:
        if wishes.batch is not None:
            faults.found.append("--batch: refused beside --batch-tokens, which already says it")
        read = faults.take("--batch-tokens", lambda: batch_from_tokens(parse_tokens(text), seq_len))
        return read or 1, ()
    if wishes.batch is not None:
        return wishes.batch, ()
    if layout is not None:
        return layout.dp * layout.mb, (f"--batch {layout.dp * layout.mb}, one micro-batch a data-parallel rank",)
    return devices, (f"--batch {devices}, one sequence a data-parallel rank where every device is one",)


def read_plan_request(path: str, wishes: Wishes) -> Request:
    """A plan file's job and layout; only the layout may be asked for otherwise."""
    from shardwise.plan.layout import parse
    from shardwise.plan.plan import load_plan
    from shardwise.view.review import Request

    faults = Faults()
    for key, value in asdict(wishes).items():
        if value is not None and key not in ("layout", "mfu"):
            faults.found.append(f"--{key.replace('_', '-')}: refused beside {path}, which already says it")
    found = faults.take("", lambda: load_plan(path))
    layout = None if wishes.layout is None else faults.take("--layout", lambda: parse(wishes.layout or ""))
    mfu = read_convention(wishes.mfu, faults)
    if faults.found or found is None:
        raise InputError(faults.found)
    if wrong := unknown_rate(found.job.cluster.device, found.job.precision):
        raise InputError([f"{path}: {fault}" for fault in wrong])
    assumed = tuple(without_effect(wishes.layout, layout))
    return Request(found.job, layout or found.layout, assumed, mfu, found.train)


def read_recipe(path: str, **given: object) -> Plan:
    """A plan file's plan, its training settings with what was given in their place; None is not given. Raises
    InputError with all faults, those of the options by their names."""
    from shardwise.plan.plan import load_plan
    from shardwise.plan.settings import TrainSettings, read_settings
    from shardwise.plan.table import Table

    faults = Faults()
    found = faults.take("", lambda: load_plan(path))
    settings = TrainSettings() if found is None or found.train is None else found.train
    wrong: list[str] = []
    given = {key: value for key, value in given.items() if value is not None}
    settings = read_settings(Table(asdict(settings) | given, "--", wrong))
    said = (fault.partition(":") for fault in wrong)
    faults.found += [option.replace("_", "-") + colon + wanted for option, colon, wanted in said]
    if faults.found or found is None:
        raise InputError(faults.found)
    return replace(found, train=settings)


def read_model(spec: str, seq: str | None) -> tuple[Model, int]:
    """A model and the sequence length for its FLOPs. Raises InputError with all faults."""
    from shardwise.model.hf import load_model

    faults = Faults()
    model = faults.take(spec or "MODEL", lambda: load_model(spec))
    seq_len = read_seq(seq, model, faults)
    if model is None or faults.found:
        raise InputError(faults.found)
    return model, seq_len


def read_convention(name: str | None, faults: Faults) -> str:
    """The convention of model FLOPs, the exact one where none is named."""
    from shardwise.account.compute import CONVENTIONS

    if name is not None and name not in CONVENTIONS:
        faults.found.append(f"--mfu: found {name[:40]!r}; wanted one of {', '.join(CONVENTIONS)}")
    return name or "exact"


def read_ranks(texts: Sequence[str], world_size: int) -> list[int]:
    """Global ranks: numbers, or first, middle, last. Raises InputError with all that are none."""
    named = {"first": 0, "middle": world_size // 2, "last": world_size - 1}
    words = [word.strip() for text in texts for word in text.split(",")]
    ranks = [named[w] if w in named else int(w) if w.isascii() and w.isdigit() and len(w) < 10 else -1 for w in words]
    wrong = [w for w, rank in zip(words, ranks, strict=True) if not 0 <= rank < world_size]
    if wrong:
        limits = f"wanted a rank from 0 to {world_size - 1:,}, or first, middle, last"
        raise InputError([f"--rank: found {word[:40]!r}; {limits}" for word in wrong])
    return list(dict.fromkeys(ranks))


def read_output(path: Path | None) -> None:
    """Refuse a name under which the other commands would not know the file for a plan."""
    if path is not None and path.suffix != ".toml" and (path.is_file() or path.is_dir() or not path.exists()):
        raise InputError([f"--output: found {str(path)!r}; wanted a file whose name ends in .toml, such as plan.toml"])


def read_table(path: Path | None) -> None:
    """Refuse a table that is not there."""
    if path is not None and not path.exists():
        raise InputError([f"{path}: no such file; wanted a CSV table of published runs"])


def legal(asked: Request) -> Layout:
    """The layout asked for. Raises InputError with every rule that it breaks."""
    from shardwise.plan.rules import findings

    assert asked.layout is not None
    broken = findings(asked.layout, asked.job)
    if broken:
        raise InputError([f"{asked.layout}: {finding}" for finding in broken])
    return asked.layout


def runnable(asked: Request) -> Layout:
    """The layout asked for, if our own runtime runs it. Raises InputError with every rule that forbids it."""
    from shardwise.plan.runs import runs_here

    layout = legal(asked)
    broken = runs_here(layout, asked.job)
    if broken:
        hint = "planned only; `shardwise plan ... --runnable` ranks the layouts that `prove` and `train` take"
        raise InputError([*(f"{layout}: {finding}" for finding in broken), hint])
    return layout
