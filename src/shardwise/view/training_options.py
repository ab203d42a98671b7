"""The options of `train` beside those that it shares with other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataFile = Annotated[
    str | None, typer.Option("--data", metavar="FILE", help='A text, or a .jsonl with a "text" a line; or the plan\'s.')
]
TokenizerFile = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json; by default a byte is a token.")
]
Save = Annotated[Path | None, typer.Option("--save", metavar="FOLDER", help="Write checkpoints here.")]
SaveEvery = Annotated[
    int, typer.Option("--save-every", metavar="N", min=1, max=1 << 31, help="Steps between checkpoints.")
]
Keep = Annotated[int, typer.Option("--keep", metavar="N", min=1, max=10_000, help="Checkpoints that stay, the last.")]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="FOLDER", help="Go on from this checkpoint, or the last of those in it."),
]
Metrics = Annotated[
    Path | None, typer.Option("--metrics", metavar="FILE", help="A JSON line a step; by default in --save.")
]
Profile = Annotated[
    Path | None, typer.Option("--profile", metavar="FOLDER", help="Trace each rank's first steps, and its memory.")
]
InitFrom = Annotated[
    Path | None,
    typer.Option("--init-from", metavar="PATH", help="First weights: a .safetensors file, or a folder as of the hub."),
]
LearningRate = Annotated[
    float | None,
    typer.Option("--learning-rate", metavar="X", help="The highest; this and the next by default the plan's."),
]
Warmup = Annotated[int | None, typer.Option("--warmup", metavar="N", help="Steps over which the learning rate rises.")]
Decay = Annotated[str | None, typer.Option("--decay", metavar="NAME", help="Then: constant, linear or cosine.")]
Floor = Annotated[float | None, typer.Option("--floor", metavar="X", help="Where it ends, as a share of its highest.")]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of them: the last.", show_default=False)
]
Folder = Annotated[
    Path, typer.Option("-o", "--output", metavar="FOLDER", help="A new folder for safetensors and config.json.")
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="bfloat16, float16, float32 or float64; by default the state's own."),
]
