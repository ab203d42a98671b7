"""What a run is asked beside its plan: what to start or go on from, and where to save."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SAVE_EVERY: Final = 100
KEEP: Final = 2

MANIFEST: Final = "shardwise.json"
_NAME: Final = re.compile(r"step-(\d{9,})")


class OptionError(ValueError):
    """Options that no run can have; `faults` says all that is wrong."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by step: what has a step's name and a manifest."""
    found = [p.parent for p in folder.glob(f"step-*/{MANIFEST}") if _NAME.fullmatch(p.parent.name)]
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    """The checkpoint of the latest step in a folder, if there is any."""
    return max(checkpoints(folder), key=step_of, default=None)


def checkpoint_name(step: int) -> str:
    """Of the folder."""
    return f"step-{step:09d}"


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(checkpoint.name.removeprefix("step-"))


@dataclass(frozen=True, slots=True)
class Options:
    """Of one run, beside the plan's settings. `tokenizer` is a tokenizers file, None for bytes.

    `save` is the folder of checkpoints, one every `save_every` steps and one at the end, of which the last `keep` stay;
    `resume` a checkpoint or a folder of them; `init_from` a safetensors file or a folder of them, the first weights.
    `metrics` is a JSONL file, by default in `save`; `profile` a folder for each rank's trace and its
    memory by category over time.
    """

    tokenizer: Path | None = None
    save: Path | None = None
    save_every: int = SAVE_EVERY
    keep: int = KEEP
    resume: Path | None = None
    metrics: Path | None = None
    profile: Path | None = None
    init_from: Path | None = None

    def __post_init__(self) -> None:
        if self.init_from is not None and self.resume is not None:
            raise OptionError(["--init-from: refused beside --resume, whose checkpoint has the weights; leave one out"])

    @property
    def metrics_file(self) -> Path | None:
        """Where the metrics go, if anywhere."""
        return self.metrics or (self.save and self.save / "metrics.jsonl")
