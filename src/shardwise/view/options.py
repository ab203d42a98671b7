"""Arguments and options of the commands, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Subject = Annotated[str, typer.Argument(metavar="MODEL", help="A catalogue name, a config.json or its folder.")]
Shown = Annotated[str, typer.Argument(metavar="MODEL|PLAN.toml", help="A model as for plan, or a plan file.")]
PlanFile = Annotated[str, typer.Argument(metavar="PLAN.toml", help="A plan file.")]
On = Annotated[str | None, typer.Option("--on", metavar="CLUSTER", help="64x8xh100, 8xh100, 4xcpu, or a TOML file.")]
Seq = Annotated[str | None, typer.Option("--seq", metavar="TOKENS", help="Tokens of a sequence; 8K by default.")]
Batch = Annotated[
    int | None, typer.Option("--batch", metavar="SEQUENCES", min=1, max=1 << 24, help="Sequences of a step.")
]
BatchTokens = Annotated[
    str | None, typer.Option("--batch-tokens", metavar="TOKENS", help="Tokens of a step, such as 4M.")
]
PrecisionName = Annotated[
    str | None, typer.Option("--precision", metavar="P", help="bf16 (default), fp8, fp16, bf16-pure, fp32 or fp64.")
]
OptimizerName = Annotated[
    str | None,
    typer.Option(
        "--optimizer", metavar="NAME", help="adamw (default), sgd-momentum or sgd: 2, 1 or 0 states a parameter."
    ),
]
StackName = Annotated[
    str | None,
    typer.Option("--stack", metavar="NAME", help="Under whose software: megatron, torchtitan, .., or a TOML file."),
]
Imbalance = Annotated[
    float | None,
    typer.Option("--imbalance", metavar="X", help="Routed tokens of the fullest rank over the mean; 1 by default."),
]
LayoutText = Annotated[str | None, typer.Option("--layout", metavar="TEXT", help='Such as "tp=8 pp=2 dp=4 mb=1".')]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN.toml", help="Write the best plan here.")]
Kept = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="PLAN.toml", help="Write this layout's plan here.")
]
Pins = Annotated[
    list[str] | None, typer.Option("--pin", metavar="KEY=VALUE", help='Only such layouts: --pin "tp=8 pp=4".')
]
Forbids = Annotated[
    list[str] | None,
    typer.Option("--forbid", metavar="KEY[=VALUE]", help="No such layouts: --forbid cp --forbid zero=3."),
]
OnlyRunnable = Annotated[bool, typer.Option("--runnable", help="Only what `prove` and `train` take today.")]
CriticalBatch = Annotated[
    str | None,
    typer.Option("--critical-batch", metavar="TOKENS", help="The gradient noise scale: adds the time to a loss."),
]
WhyNot = Annotated[
    str | None, typer.Option("--why-not", metavar="LAYOUT", help="What speaks against this layout, in numbers.")
]
MfuName = Annotated[
    str | None,
    typer.Option("--mfu", metavar="NAME", help="Count model FLOPs as exact, megatron, palm, narayanan, 6n."),
]
AllStacks = Annotated[bool, typer.Option("--stacks", help="Also what the layout takes under the other stacks.")]
AllLevels = Annotated[bool, typer.Option("--levels", help="Also what the layout takes at every ZeRO level.")]
Named = Annotated[str | None, typer.Argument(metavar="[NAME]", help="One of them, in detail.")]
Stages = Annotated[int, typer.Option("--pp", metavar="N", min=1, max=1024, help="Pipeline ranks.")]
MicroBatches = Annotated[int, typer.Option("--micro-batches", metavar="N", min=1, max=20_000, help="Of a step.")]
ScoreFile = Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A CSV table of published runs.")]
Csv = Annotated[bool, typer.Option("--csv", help="As torch.distributed.pipelining reads it.")]
ShownRank = Annotated[
    int, typer.Option("--rank", metavar="RANK", min=0, help="Global rank whose communication is shown.")
]
Ranks = Annotated[
    list[str] | None,
    typer.Option("--rank", metavar="RANKS", help="Global ranks, such as 0,8 or first,middle,last; 0 by default."),
]
Steps = Annotated[
    int | None, typer.Option("--steps", metavar="N", min=1, max=1 << 31, help="Steps; by default the plan's.")
]
Json = Annotated[bool, typer.Option("--json", help="The same content for programs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected failure.")]
