"""Plan: a job, the layout chosen for it and how to train it, as one TOML file that needs nothing beside it.

The file embeds the model and the cluster in full; a file written by hand may name both: `model = "llama-3.1-8b"`,
`cluster = "4xcpu"`. Whether the layout is legal is not the file's business: ask `plan.rules.findings`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Final

import tomli_w

from shardwise.cluster import Cluster, ClusterError, from_dict, to_dict
from shardwise.cluster.convert import structure
from shardwise.files import FileError, read_small
from shardwise.model.hf import KEYS, catalog, from_config, load_model, to_config
from shardwise.model.spec import Model
from shardwise.plan import layout as layouts
from shardwise.plan.job import PRECISIONS, Job
from shardwise.plan.layout import Layout
from shardwise.plan.optimizer import ADAMW, OPTIMIZERS
from shardwise.plan.settings import TrainSettings, read_settings
from shardwise.plan.stack import SHARDWISE, Stack, StackError, load_stack, under
from shardwise.plan.table import Table, short

SCHEMA: Final = 1
"""Version of the file's form; a reader refuses the others."""

MAX_FILE_BYTES: Final = 1 << 18
"""A plan is about 3 kB. Larger files are no plans, and reading them should cost nothing."""

MAX_LINE: Final = 1 << 13
"""A dotted key costs the square of its parts to read, and has to end where its line does."""

MAX_SEQ_LEN: Final = 1 << 24
MAX_GLOBAL_BATCH: Final = 1 << 24
MAX_IMBALANCE: Final = 1000
MAX_RESULTS: Final = 64

_HEADER = "# A plan of shardwise: `shardwise show` explains it, `prove` checks it, `train` runs it.\n\n"


class PlanError(ValueError):
    """A file that is no plan; `faults` says all that is wrong: key, what was found, what was wanted."""

    def __init__(self, where: str, faults: list[str]) -> None:
        self.where, self.faults = where, [f"{where}: {fault}" for fault in faults]
        super().__init__("\n".join(self.faults))


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
    table: dict[str, Any] = {"seq_len": job.seq_len, "global_batch": job.global_batch}
    table |= {"precision": job.precision.name, "optimizer": job.optimizer.name}
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
        content = read_small(path, "a plan, a cluster or a stack, as a TOML file", MAX_FILE_BYTES)
    except FileNotFoundError:
        raise PlanError(where, ["no such file"]) from None
    except FileError as error:
        raise PlanError(where, [str(error)]) from None
    if max(map(len, content.split("\n"))) > MAX_LINE:
        raise PlanError(where, [f"not TOML: a line is longer than {MAX_LINE:,} characters"])
    try:
        return tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise PlanError(where, [f"not TOML: {said}"]) from None


def parse_plan(data: Mapping[str, Any], where: str) -> Plan:
    """The plan that a file's tables describe. Raises PlanError with all faults at once."""
    faults: list[str] = []
    top = Table(data, "", faults)
    schema = top.data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        fault = f"schema: found {short(schema)}; wanted {SCHEMA}, the form that this version reads and writes"
        raise PlanError(where, [fault])
    job, layout, train, results = _job(top, Path(where).parent), _layout(top), _train(top), _results(top)
    top.known(("schema", "job", "layout", "model", "cluster", "train", "results"))
    if faults or job is None or layout is None:
        raise PlanError(where, faults)
    return Plan(job, layout, train, results)


def _job(top: Table, folder: Path) -> Job | None:
    before = len(top.faults)
    model, cluster = _model(top, folder), _cluster(top)
    table = top.table("job", "a table with seq_len, global_batch, precision")
    if table is None:
        return None
    seq_len = table.integer("seq_len", 1, MAX_SEQ_LEN)
    batch = table.integer("global_batch", 1, MAX_GLOBAL_BATCH)
    precision = table.choice("precision", tuple(PRECISIONS), "bf16")
    optimizer = table.choice("optimizer", tuple(OPTIMIZERS), ADAMW.name)
    stack, imbalance = _stack(table), table.number("imbalance", 1, MAX_IMBALANCE, 1)
    table.known(("seq_len", "global_batch", "precision", "optimizer", "stack", "imbalance"))
    if model is None or cluster is None or stack is None or len(top.faults) > before:
        return None
    kinds = PRECISIONS[precision], stack, imbalance, OPTIMIZERS[optimizer]
    return Job(under(model, stack), cluster, seq_len, batch, *kinds)


def _stack(table: Table) -> Stack | None:
    """A known stack by its name, or the values of one; our own where nothing is said, as in older files."""
    found = table.data.get("stack", SHARDWISE.name)
    if isinstance(found, str):
        if found.endswith(".toml") or not found.isprintable():
            table.fault("stack", f"found {short(found)}; wanted the name of a known stack, or its table")
            return None
        return table.take(lambda: find_stack(found), "stack")
    values = table.table("stack", "the name of a known stack, or a table")
    if values is None:
        return None
    return table.take(lambda: structure(values.data, Stack), "stack")


def _model(top: Table, folder: Path) -> Model | None:
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


def _cluster(top: Table) -> Cluster | None:
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


def _layout(top: Table) -> Layout | None:
    table = top.table("layout", "a table with text = 'tp=... mb=...'")
    if table is None:
        return None
    text = table.text("text", "the layout's text, such as 'tp=8 pp=16 dp=128 zero=1 mb=1'")
    table.known(("text",))
    return table.take(lambda: layouts.parse(text), "text") if text else None


def _train(top: Table) -> TrainSettings | None:
    if "train" not in top.data:
        return None
    table = top.table("train", "a table of training settings")
    return None if table is None else read_settings(table)


def _results(top: Table) -> dict[str, Any] | None:
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
            table.fault(short(key)[1:-1], f"found {short(value)}; wanted a number or a text")
    return dict(table.data)
