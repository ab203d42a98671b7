"""shardwise plans, proves and runs the parallel training of large language models.

The public names are loaded on first use: `import shardwise` costs nothing; only `prove_rank` and the wrappers (`fsdp`,
`ddp`, `zero1`) need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.account.comm import predict_ledger
    from shardwise.account.memory import memory_of
    from shardwise.cluster import Cluster, parse_cluster
    from shardwise.model.hf import load_model
    from shardwise.model.spec import Model
    from shardwise.plan.job import Job
    from shardwise.plan.layout import Layout
    from shardwise.plan.layout import parse as parse_layout
    from shardwise.plan.plan import Plan, load_plan
    from shardwise.plan.rules import findings
    from shardwise.plan.stack import load_stack, under
    from shardwise.prove.dryrun import prove_rank
    from shardwise.search.explain import explain
    from shardwise.search.solve import solve
    from shardwise.search.whynot import why_not
    from shardwise.simulate.step import step_time
    from shardwise.train.wrap.ddp import ddp
    from shardwise.train.wrap.fsdp import fsdp
    from shardwise.train.wrap.zero1 import zero1

    __version__: str

_HOMES = {
    "Model": "model.spec",
    "Cluster": "cluster",
    "Job": "plan.job",
    "Layout": "plan.layout",
    "Plan": "plan.plan",
    "load_model": "model.hf",
    "parse_cluster": "cluster",
    "parse_layout": "plan.layout:parse",
    "load_plan": "plan.plan",
    "findings": "plan.rules",
    "load_stack": "plan.stack",
    "under": "plan.stack",
    "memory_of": "account.memory",
    "predict_ledger": "account.comm",
    "step_time": "simulate.step",
    "solve": "search.solve",
    "explain": "search.explain",
    "why_not": "search.whynot",
    "prove_rank": "prove.dryrun",
    "fsdp": "train.wrap.fsdp",
    "ddp": "train.wrap.ddp",
    "zero1": "train.wrap.zero1",
}
"""Public name -> its module, and its name there where that is another."""

__all__ = [
    "Model",
    "Cluster",
    "Job",
    "Layout",
    "Plan",
    "load_model",
    "parse_cluster",
    "parse_layout",
    "load_plan",
    "findings",
    "load_stack",
    "under",
    "memory_of",
    "predict_ledger",
    "step_time",
    "solve",
    "explain",
    "why_not",
    "prove_rank",
    "fsdp",
    "ddp",
    "zero1",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    module, _, there = _HOMES[name].partition(":")
    return getattr(import_module(f"shardwise.{module}"), there or name)


def _version() -> str:
    """The installed version; a bare source tree on the path has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shardwise")
    except PackageNotFoundError:
        return "unknown (not installed)"


def __dir__() -> list[str]:
    return sorted(__all__)
