"""What the command line asks: options and files read into a `Request`, all faults at once.

Everything heavy is imported inside the functions: `--help` and a wrong option cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from shardwise.cluster import Device
    from shardwise.plan.job import Precision
    from shardwise.plan.layout import Layout
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
    from shardwise.view.review import Request

    faults = Faults()
    model = faults.take(subject or "MODEL", lambda: load_model(subject))
    if wishes.on is None:
        faults.found.append("--on: missing; the cluster, such as --on 64x8xh100, or a plan file instead of a model")
    cluster = None if wishes.on is None else faults.take("--on", lambda: load_cluster(wishes.on or ""))
    layout = None if wishes.layout is None else faults.take("--layout", lambda: parse(wishes.layout or ""))
    name = wishes.precision or "bf16"
    if name not in PRECISIONS:
        faults.found.append(f"--precision: found {name!r}; wanted one of {', '.join(PRECISIONS)}")
    elif cluster is not None:
        faults.found += unknown_rate(cluster.device, PRECISIONS[name])
    seq_len = read_seq(wishes.seq, faults)
    batch, assumed = read_batch(wishes, seq_len, layout, cluster.world_size if cluster else 1, faults)
    if planning and assumed:
        faults.found.append("--batch-tokens or --batch: missing; it decides which is best, such as --batch-tokens 4M")
    if faults.found or model is None or cluster is None:
        raise InputError(faults.found)
    if wishes.seq is None:
        assumed = (f"--seq {DEFAULT_SEQ}", *assumed)
    return Request(Job(model, cluster, seq_len, batch, PRECISIONS[name]), layout, assumed)


def read_seq(text: str | None, faults: Faults) -> int:
    """Tokens of a sequence; 8K is 8,192, as of every count of tokens."""
    from shardwise.plan.plan import MAX_SEQ_LEN
    from shardwise.units import parse_tokens

    found = DEFAULT_SEQ if text is None else faults.take("--seq", lambda: parse_tokens(text))
    if found is not None and found > MAX_SEQ_LEN:
        faults.found.append(f"--seq: found {found:,}; wanted at most {MAX_SEQ_LEN:,}")
        return DEFAULT_SEQ
    return found or DEFAULT_SEQ


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
        if value is not None and key != "layout":
            faults.found.append(f"--{key.replace('_', '-')}: refused beside {path}, which already says it")
    found = faults.take("", lambda: load_plan(path))
    layout = None if wishes.layout is None else faults.take("--layout", lambda: parse(wishes.layout or ""))
    if faults.found or found is None:
        raise InputError(faults.found)
    if wrong := unknown_rate(found.job.cluster.device, found.job.precision):
        raise InputError([f"{path}: {fault}" for fault in wrong])
    return Request(found.job, layout or found.layout)


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


def legal(asked: Request) -> Layout:
    """The layout asked for. Raises InputError with every rule that it breaks."""
    from shardwise.plan.rules import findings

    assert asked.layout is not None
    broken = findings(asked.layout, asked.job)
    if broken:
        raise InputError([f"{asked.layout}: {finding}" for finding in broken])
    return asked.layout
