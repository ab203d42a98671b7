"""Copied kv heads, padding and looped layers in checkpoints and in Hugging Face's files: each logical element once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.collective import Labels
from shardwise.plan.layout import parse
from shardwise.plan.rules import findings
from shardwise.plan.runs import runs_here
from shardwise.train.comm import Comm
from shardwise.train.hf_weights import SINGLE, open_weights, save_weights
from shardwise.train.rank import build_rank
from shardwise.train.threads import run_threads
from tests.dist.test_checkpoint import goes_on
from tests.support.models import job, tiny
from tests.support.parity import whole_weights

torch.set_num_threads(1)


def work(text: str, **sizes: Any) -> Any:
    layout = parse(text)
    made = job(tiny(hidden=36, ffn=24, vocab=21, kv_heads=2, **sizes), f"{layout.world_size}xcpu")
    assert not [*findings(layout, made), *runs_here(layout, made)]
    return made, layout


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "copies and padding to another tp": ("tp=4 mb=2", "tp=2 dp=2 zero=1 mb=1", {"layers": 2, "tied": True}),
    "from none to both, over a pipeline": ("dp=2 zero=3 mb=1", "tp=4 pp=2 mb=1", {"layers": 2, "tied": True}),
    "two ranks of a head to four": ("tp=4 sp=0 mb=2", "tp=8 mb=1", {"layers": 1}),
    "a looped block": ("tp=2 mb=2", "dp=4 zero=3 mb=1", {"layers": 1, "loops": 3}),
}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("saved_by", "loaded_by", "sizes"), CASES.values(), ids=CASES.keys())
def test_any_layout_goes_on_from_any_other(saved_by: str, loaded_by: str, sizes: Any, tmp_path: Path) -> None:
    goes_on(work(saved_by, **sizes), work(loaded_by, **sizes), tmp_path)


@pytest.mark.parametrize("sizes", [{"layers": 2}, {"layers": 2, "tied": True}, {"layers": 1, "loops": 3}], ids=str)
@pytest.mark.parametrize("text", ["tp=8 mb=1", "tp=4 dp=2 zero=3 mb=1"])
def test_files_hold_what_the_model_has_and_every_rank_its_part(text: str, sizes: Any, tmp_path: Path) -> None:
    """Of 21 rows in parts of 3 the last of eight ranks reads none. What is loaded is bit-equal to what is drawn.

    A looped model takes the tensors of the layers that it has once, without the config: that has no loops.
    """
    made, layout = work(text, **sizes)
    weights = whole_weights(made.model)
    once, _ = work(text, **sizes | {"loops": 1})
    save_weights(once.model, weights.__getitem__, tmp_path)
    stored = load_file(tmp_path / SINGLE)
    assert sum(t.numel() for t in stored.values()) == made.model.parameters
    assert stored["model.embed_tokens.weight"].shape == (21, 36)
    opened = open_weights(made.model, tmp_path / SINGLE)

    def rank(comm: Comm) -> None:
        drawn, read = (build_rank(made, layout, comm, Labels(), seed=seed) for seed in (0, None))
        for name, state in read.states.items():
            state.load({r.name: opened.local(r, read.world.index("tp")) for r in state.storage.records})
            assert torch.equal(state.master, drawn.states[name].master)

    run_threads(layout.world_size, rank)
