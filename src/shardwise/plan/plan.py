"""Plan: a job, the layout chosen for it and how to train it, as one TOML file that needs nothing beside it.

The file embeds the model and the cluster in full; a file written by hand may name both: `model = "llama-3.1-8b"`,
`cluster = "4xcpu"`. Whether the layout is legal is not the file's business: ask `plan.rules.findings`.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import tomli_w

from shardwise.cluster import Cluster, ClusterError, from_dict, to_dict
from shardwise.cluster.convert import structure
from shardwise.model.hf import KEYS, ModelError, catalog, from_config, load_model, to_config
from shardwise.model.spec import Model
from shardwise.plan import layout as layouts
from shardwise.plan.job import PRECISIONS, Job
from shardwise.plan.layout import Layout, LayoutError
from shardwise.plan.stack import SHARDWISE, Stack, StackError, load_stack, under

T = TypeVar("T")

SCHEMA: Final = 1
"""Version of the file's form; a reader refuses the others."""

STDLIB: Final = "python-stdlib"
"""The data that every Python brings along: its own standard library's source, byte by byte."""

MAX_FILE_BYTES: Final = 1 << 18
"""A plan is about 3 kB. Larger files are no plans, and reading them should cost nothing."""

MAX_LINE_BYTES: Final = 1 << 13
"""A dotted key costs the square of its parts to read, and has to end where its line does."""

MAX_SEQ_LEN: Final = 1 << 24
MAX_GLOBAL_BATCH: Final = 1 << 24
MAX_IMBALANCE: Final = 1000
MAX_RESULTS: Final = 64
MAX_UNKNOWN: Final = 20

_HEADER = "# A plan of shardwise: `shardwise show` explains it, `prove` checks it, `train` runs it.\n\n"


class PlanError(ValueError):
    """A file that is no plan; `faults` says all that is wrong: key, what was found, what was wanted."""

    def __init__(self, where: str, faults: list[str]) -> None:
        self.where, self.faults = where, [f"{where}: {fault}" for fault in faults]
        super().__init__("\n".join(self.faults))


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What `train` needs beside job and layout. `data` is "python-stdlib" or a path; AdamW decays matrices only."""

    steps: int = 100
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    data: str = STDLIB


@dataclass(frozen=True, slots=True)
class Plan:
    """What is proved, trained and shown. `results` is what the planner predicted: numbers and texts by name."""

    job: Job
    layout: Layout
    train: TrainSettings | None = None
    results: Mapping[str, Any] | None = None
    schema: int = SCHEMA


# ----------------------------------------------------------------------------------------------------- plan -> file


def to_toml(plan: Plan) -> str:
    """The plan's file, which `parse_plan` reads back to an equal plan."""
    job = plan.job
    tables: dict[str, Any] = {
        "schema": plan.schema,
        "job": _job_table(job),
        "layout": {"text": str(plan.layout)},
    }
    if plan.train is not None:
        tables["train"] = asdict(plan.train)
    if plan.results is not None:
        tables["results"] = dict(plan.results)
    tables["model"] = {"name": job.model.name, **to_config(job.model)}
    tables["cluster"] = to_dict(job.cluster)
    return _HEADER + tomli_w.dumps(tables)


def _job_table(job: Job) -> dict[str, Any]:
    table: dict[str, Any] = {"seq_len": job.seq_len, "global_batch": job.global_batch, "precision": job.precision.name}
    table["stack"] = job.stack.name if _is_known(job.stack) else _stack_table(job.stack)
    return table | ({} if job.imbalance == 1 else {"imbalance": job.imbalance})


def _is_known(stack: Stack) -> bool:
    """Whether the name alone says all of it; a stack from a file goes into the plan whole."""
    try:
        return find_stack(stack.name) == stack
    except (StackError, OSError):
        return False


def _stack_table(stack: Stack) -> dict[str, Any]:
    return {key: value for key, value in asdict(stack).items() if value is not None}


def write(plan: Plan, path: Path) -> None:
    """Write the plan's file: whole or not at all, where `path` is a file or nothing yet. Raises OSError."""
    text = to_toml(plan)
    if path.exists() and not path.is_file():
        # A directory is refused by the system; a device or a pipe is written to, never replaced.
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()  # a link stays a link
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------- file -> plan


def load_plan(path: str | Path) -> Plan:
    """The plan in a file. Raises PlanError with all faults at once, OSError where the system refuses to read."""
    return parse_plan(read_toml(path), str(path))


def load_cluster(spec: str) -> Cluster:
    """`64x8xh100`, or a TOML file with a cluster's tables. Raises ClusterError, PlanError (no TOML) or OSError."""
    if not spec.endswith(".toml"):
        return from_dict(spec)
    try:
        return from_dict(read_toml(spec))
    except ClusterError as error:
        raise ClusterError([f"{spec}: {fault}" for fault in error.faults]) from None


def find_stack(spec: str) -> Stack:
    """Our own stack, a known one by its name, or one from a TOML file. Raises StackError or OSError."""
    return SHARDWISE if spec == SHARDWISE.name else load_stack(spec)


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file's tables. Raises PlanError for what is no small regular UTF-8 TOML file, OSError as the system."""
    where = str(path)
    try:
        # A pipe would block the opening, and a device may have no end.
        with open(path, "rb", opener=_without_waiting) as file:
            kind = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(kind):
                raise PlanError(where, ["not a regular file"])
            content = file.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise PlanError(where, ["a directory; wanted a TOML file"]) from None
    except FileNotFoundError:
        raise PlanError(where, ["no such file"]) from None
    if len(content) > MAX_FILE_BYTES:
        raise PlanError(where, [f"larger than {MAX_FILE_BYTES:,} bytes; wanted a plan or cluster, of a few kB"])
    if max(map(len, content.splitlines()), default=0) > MAX_LINE_BYTES:
        raise PlanError(where, [f"not TOML: a line is longer than {MAX_LINE_BYTES:,} bytes"])
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PlanError(where, [f"not UTF-8 at byte {error.start:,}; wanted a TOML file"]) from None
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise PlanError(where, [f"not TOML: {said}"]) from None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def parse_plan(data: Mapping[str, Any], where: str) -> Plan:
    """The plan that a file's tables describe. Raises PlanError with all faults at once."""
    faults: list[str] = []
    top = _Table(data, "", faults)
    schema = top.data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        fault = f"schema: found {_short(schema)}; wanted {SCHEMA}, the form that this version reads and writes"
        raise PlanError(where, [fault])
    job, layout, train, results = _job(top, Path(where).parent), _layout(top), _train(top), _results(top)
    top.known(("schema", "job", "layout", "model", "cluster", "train", "results"))
    if faults or job is None or layout is None:
        raise PlanError(where, faults)
    return Plan(job, layout, train, results)


class _Table:
    """A table of the file and its key path; faults of all tables go into one list."""

    def __init__(self, data: Mapping[str, Any], path: str, faults: list[str]) -> None:
        self.data, self.path, self.faults = data, path, faults

    def fault(self, key: str, said: str) -> None:
        self.faults.append(f"{self.path}{key}: {said}")

    def table(self, key: str, wanted: str) -> _Table | None:
        """The table under a key; None, with a fault, where there is none."""
        found = self.data.get(key)
        if isinstance(found, dict):
            return _Table(cast("dict[str, Any]", found), f"{self.path}{key}.", self.faults)
        self.fault(key, f"found {_short(found)}; wanted {wanted}")
        return None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.data.get(key, default)
        if type(value) is int and low <= value <= high:
            return value
        self.fault(key, f"found {_short(value)}; wanted a whole number from {low:,} to {high:,}")
        return low

    def number(self, key: str, low: float, high: float, default: float) -> float:
        value = self.data.get(key, default)
        if type(value) in (int, float) and low <= value <= high:
            return float(value)
        self.fault(key, f"found {_short(value)}; wanted a number from {low:g} to {high:g}")
        return default

    def text(self, key: str, wanted: str, default: str | None = None) -> str:
        """A printable text: a file may not send control codes to the terminal that shows it."""
        value = self.data.get(key, default)
        if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 4096:
            return value
        self.fault(key, f"found {_short(value)}; wanted {wanted}")
        return ""

    def known(self, keys: Iterable[str]) -> None:
        """A fault for every key that is none of these, with the nearest one."""
        names = list(dict.fromkeys(keys))
        unknown = [key for key in self.data if key not in names]
        for key in unknown[:MAX_UNKNOWN]:
            near = get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(names)}"
            self.fault(_short(key)[1:-1], f"unknown key; {hint}")
        if len(unknown) > MAX_UNKNOWN:
            self.faults.append(
                f"{self.path.rstrip('.') or 'top level'}: {len(unknown) - MAX_UNKNOWN:,} more unknown keys"
            )

    def take(self, read: Callable[[], T], key: str) -> T | None:
        """What `read` returns, or None with its faults under `key`."""
        try:
            return read()
        except (ModelError, ClusterError, LayoutError, StackError) as error:
            inside = isinstance(self.data.get(key), dict)
            for fault in error.faults:
                # A fault of a value inside a table begins with that value's own key.
                dot = "." if inside and not fault.startswith("unknown key") else ": "
                self.faults.append(f"{self.path}{key}{dot}{fault}")
            return None


def _short(value: object) -> str:
    try:
        text = "nothing" if value is None else repr(value)
    except RecursionError:
        text = "a deep table"
    return text if len(text) <= 40 else text[:37] + "..."


def _job(top: _Table, folder: Path) -> Job | None:
    before = len(top.faults)
    model, cluster = _model(top, folder), _cluster(top)
    table = top.table("job", "a table with seq_len, global_batch, precision")
    if table is None:
        return None
    seq_len = table.integer("seq_len", 1, MAX_SEQ_LEN)
    batch = table.integer("global_batch", 1, MAX_GLOBAL_BATCH)
    precision = table.text("precision", f"one of {', '.join(PRECISIONS)}", default="bf16")
    if precision and precision not in PRECISIONS:
        table.fault("precision", f"found {_short(precision)}; wanted one of {', '.join(PRECISIONS)}")
    stack, imbalance = _stack(table), table.number("imbalance", 1, MAX_IMBALANCE, 1)
    table.known(("seq_len", "global_batch", "precision", "stack", "imbalance"))
    if model is None or cluster is None or stack is None or len(top.faults) > before:
        return None
    return Job(under(model, stack), cluster, seq_len, batch, PRECISIONS[precision], stack, imbalance)


def _stack(table: _Table) -> Stack | None:
    """A known stack by its name, or the values of one; our own where nothing is said, as in older files."""
    found = table.data.get("stack", SHARDWISE.name)
    if isinstance(found, str):
        if found.endswith(".toml") or not found.isprintable():
            table.fault("stack", f"found {_short(found)}; wanted the name of a known stack, or its table")
            return None
        return table.take(lambda: find_stack(found), "stack")
    values = table.table("stack", "the name of a known stack, or a table")
    if values is None:
        return None
    return table.take(lambda: structure(values.data, Stack), "stack")


def _model(top: _Table, folder: Path) -> Model | None:
    """The embedded model; or the one named, from the catalogue or by a path as seen from the plan's folder."""
    found = top.data.get("model")
    if isinstance(found, str):
        return top.take(lambda: load_model(found if found in catalog() else str(folder / found)), "model")
    table = top.table("model", "a table of the model's dimensions, or a name such as 'llama-3.1-8b'")
    if table is None:
        return None
    name = table.text("name", "the model's name")
    model = top.take(lambda: from_config(table.data, name, "model"), "model")
    table.known(("name", *KEYS))
    return model


def _cluster(top: _Table) -> Cluster | None:
    found = top.data.get("cluster")
    if isinstance(found, str):
        return top.take(lambda: from_dict(found), "cluster")
    table = top.table("cluster", "a cluster's tables, or a spelling such as '64x8xh100'")
    if table is None:
        return None
    cluster = top.take(lambda: from_dict(table.data), "cluster")
    if cluster is not None and not all(map(str.isprintable, (cluster.name, cluster.device.name, cluster.device.title))):
        table.fault("name", "holds control characters; wanted printable text")
    return cluster


def _layout(top: _Table) -> Layout | None:
    table = top.table("layout", "a table with text = 'tp=... mb=...'")
    if table is None:
        return None
    text = table.text("text", "the layout's text, such as 'tp=8 pp=16 dp=128 zero=1 mb=1'")
    table.known(("text",))
    return table.take(lambda: layouts.parse(text), "text") if text else None


def _train(top: _Table) -> TrainSettings | None:
    if "train" not in top.data:
        return None
    table = top.table("train", "a table of training settings")
    if table is None:
        return None
    default = TrainSettings()
    settings = TrainSettings(
        steps=table.integer("steps", 1, 1 << 31, default.steps),
        learning_rate=table.number("learning_rate", 0, 100, default.learning_rate),
        weight_decay=table.number("weight_decay", 0, 100, default.weight_decay),
        clip_norm=table.number("clip_norm", 1e-12, 1e12, default.clip_norm),
        seed=table.integer("seed", 0, (1 << 63) - 1, default.seed),
        data=table.text("data", f"'{STDLIB}' or a path", default.data),
    )
    table.known(f.name for f in fields(TrainSettings))
    return settings


def _results(top: _Table) -> dict[str, Any] | None:
    """Predictions are shown, never computed with: any name will do, but only numbers and texts."""
    if "results" not in top.data:
        return None
    table = top.table("results", "a table of numbers and texts")
    if table is None:
        return None
    if len(table.data) > MAX_RESULTS:
        table.fault("", f"{len(table.data)} entries; wanted at most {MAX_RESULTS}")
        return None
    for key, value in table.data.items():
        plain = isinstance(value, (bool, int)) or (isinstance(value, float) and isfinite(value))
        if not key.isprintable() or not (plain or (isinstance(value, str) and value.isprintable())):
            table.fault(_short(key)[1:-1], f"found {_short(value)}; wanted a number or a text")
    return dict(table.data)
