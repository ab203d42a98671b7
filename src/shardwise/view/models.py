"""Models: the catalogue as a list, and one model in detail."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from shardwise.account.compute import CONVENTIONS, describe
from shardwise.model.hf import catalog, load_model, to_config
from shardwise.model.spec import Model
from shardwise.plan.job import PRECISIONS
from shardwise.plan.optimizer import ADAMW
from shardwise.units import format_count, format_flops
from shardwise.view import words
from shardwise.view.tables import plain, section


def listing() -> tuple[Model, ...]:
    """All models of the catalogue."""
    return tuple(map(load_model, catalog()))


def list_page(models: tuple[Model, ...], width: int) -> Group:
    """A line each."""
    wide = width >= 110
    table = plain()
    table.add_column("name", no_wrap=True)
    if wide:
        table.add_column("family", no_wrap=True)
    for head in (
        "parameters",
        "active",
        "layers",
        "hidden",
        "heads",
        *(["experts", "vocabulary"] if wide else ["experts"]),
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for m in models:
        experts = f"{m.experts}/{m.top_k}" if m.experts else "-"
        active = words.format_parameters(m.active_parameters) if m.experts else "-"
        sizes = (str(m.layers), format_count(m.hidden), f"{m.heads}/{m.kv_heads}", experts)
        more = ((m.family,), (format_count(m.vocab),)) if wide else ((), ())
        table.add_row(m.name, *more[0], words.format_parameters(m.parameters), active, *sizes, *more[1])
    note = (
        "heads: of queries/of keys; experts: all/those of a token. In detail: shardwise models NAME. "
        "Models of your own: a config.json, its folder, or sizes as gpt:L=24,h=2304,a=24 or mlp:D=16384,F=53248,L=126."
    )
    return Group(table, Text(), Text(note, "dim"))


def list_data(models: tuple[Model, ...]) -> dict[str, Any]:
    return {"models": [_brief(m) for m in models]}


def _brief(m: Model) -> dict[str, Any]:
    return {
        "name": m.name,
        "family": m.family,
        "parameters": m.parameters,
        "active_parameters": m.active_parameters,
        "layers": m.layers,
        "hidden": m.hidden,
        "heads": m.heads,
        "kv_heads": m.kv_heads,
        "experts": m.experts,
        "experts_per_token": m.top_k,
        "vocabulary": m.vocab,
    }


def page(m: Model, seq_len: int) -> Group:
    """Parameters by kind of unit, sizes, FLOPs a token by every convention."""
    of = describe(m, seq_len)
    active = "" if not m.experts else f", {words.format_parameters(m.active_parameters)} of them meet a token"
    ends = f"embedding {100 * of['embedding_share']:.1f} %, head {100 * of['head_share']:.1f} % of them"
    parts = [
        Text(f"{m.name}: {words.format_parameters(m.parameters)} parameters{active}", "bold"),
        Text(f"{format_count(m.parameters)} parameters; {ends}{'; tied' if m.tied else ''}"),
        Text(_sizes(m)),
        section("Parameters by kind of unit", _kinds(m, of)),
        section(f"FLOPs of training on one token, sequences of {format_count(seq_len)}", _flops(of)),
        Text(),
        Text(_state(m), "dim"),
    ]
    return Group(*parts)


def data(m: Model, seq_len: int) -> dict[str, Any]:
    """The same, and the config in the keys of Hugging Face that says all of it."""
    return {**_brief(m), **describe(m, seq_len), "config": to_config(m)}


def _sizes(m: Model) -> str:
    loops = f", run {m.loops} times" if m.loops > 1 else ""
    said = [
        f"family {m.family}",
        f"{m.layers} layers{loops}",
        f"hidden {format_count(m.hidden)}",
        f"feed-forward {format_count(m.ffn)}",
    ]
    if any(op.kind == "attention" for block in m.blocks for op in block.ops):
        said.append(f"{m.heads} heads over {m.kv_heads} kv heads")
    if m.vocab:
        said.append(f"vocabulary {format_count(m.vocab)}")
    if m.experts:
        said.append(f"{m.experts} experts of {format_count(m.sizes['x'])} rows, {m.top_k} a token")
    return "; ".join(said)


def _kinds(m: Model, of: dict[str, Any]) -> Table:
    table = plain()
    for head in ("unit", "count", "parameters each", "together", "%"):
        table.add_column(head, justify="left" if head == "unit" else "right", no_wrap=True)
    for kind, each in of["kinds"].items():
        together = each["units"] * each["parameters"]
        beside = "+" if kind in m.tail else ""  # heads that predict further tokens count beside the others
        share = f"{beside}{100 * together / of['parameters']:.1f}"
        row = (each["units"], each["parameters"], together)
        table.add_row(kind, *map(format_count, row), share)
    return table


def _flops(of: dict[str, Any]) -> Table:
    table = plain()
    table.add_column("convention", no_wrap=True)
    table.add_column("FLOPs", justify="right", no_wrap=True)
    table.add_column("what it counts", ratio=1)
    for name, flops in of["flops_per_token"].items():
        table.add_row(name, format_flops(flops), CONVENTIONS[name])
    return table


def _state(m: Model) -> str:
    p = PRECISIONS["bf16"]
    each = p.compute_bytes + (2 + len(ADAMW.states)) * p.accumulate_bytes  # gradients, master weights and moments
    parameters = m.parameters + m.tail_parameters
    return (
        f"Weights, gradients and {ADAMW.title}'s state take {each} bytes a parameter in bf16 training, "
        f"{words.over(each * parameters)} in all, before activations, buffers and what the allocator adds: "
        "`shardwise fit` counts those too."
    )
