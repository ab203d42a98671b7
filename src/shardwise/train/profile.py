"""`--profile`: a Chrome trace of a few steps of each rank, and what its memory was made of.

The ranges in the trace are the labels that the runtime sets anyway: `Labels.watch` opens one for each, and is there
only while steps are recorded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.collective import Labels
from shardwise.results import GRADIENTS, OPTIMIZER, PARAMETERS, TABLES
from shardwise.train import timeline
from shardwise.train.rank import Rank
from shardwise.train.release import Releasing
from shardwise.view import memory

PROFILED: Final = 3
"""Steps in a trace, after a first one that warms up, where there are as many."""

_NAME: Final = re.compile(r"rank-\d+(\.json|-memory\.json|-memory\.svg)")
"""Of the files of a profile: the Chrome trace, the memory timeline for programs, and its picture."""


class ProfileFailed(RuntimeError):  # noqa: N818 - says what happened
    """A profile could not be written."""

    kind = "io"


def open_folder(folder: Path) -> None:
    """Make the folder, without the profiles of an earlier run. Raises OSError where none could be written."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", str(folder))
    for path in folder.glob("rank-*"):
        if _NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)  # another process of the run may be doing the same


@contextmanager
def profiled(folder: Path | None, rank: Rank, steps: range) -> Iterator[Callable[[], None]]:
    """Write the three files of this rank; the value is to be called after each step.

    A run that fails leaves the profile of the steps it did record, the broken one among them. Raises ProfileFailed
    where the files cannot be written.
    """
    if folder is None:
        yield lambda: None
        return
    recording = _Recording(folder, rank, steps)
    try:
        yield recording.advance
    except BaseException:
        with suppress(Exception):  # the run's own failure is what is told
            recording.finish(broken=True)
        raise
    recording.finish()


class _Recording:
    """Waits for its steps, records them, writes them."""

    def __init__(self, folder: Path, rank: Rank, steps: range) -> None:
        self.folder, self.rank, self.steps = folder, rank, steps
        self.first = steps.start + (len(steps) > 1)
        self.step = steps.start
        self.meanings: dict[str, timeline.Meaning] = {}
        self.range: AbstractContextManager[object] | None = None
        self.held: timeline.Held = {}
        self.comm = rank.world.comm
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if rank.device.type == "cuda" else [])]
        self.profiler = profile(activities=activities, profile_memory=True, acc_events=True)
        self._begin()

    def advance(self) -> None:
        """A step is done."""
        self.step += 1
        if self.range is not None:
            if self.step < min(self.first + PROFILED, self.steps.stop):
                self.range.__exit__(None, None, None)
                self._open_step()
            else:
                self.finish()
        else:
            self._begin()

    def _begin(self) -> None:
        if self.step == self.first < self.steps.stop:
            self.profiler.prepare_trace()
            self.held = _held(self.rank)
            self.profiler.start_trace()
            self.rank.world.labels.watch = self._watch
            if self.rank.device.type == "cpu":
                self.rank.world.comm = Releasing(self.comm)
            self._open_step()

    def _open_step(self) -> None:
        name = f"{timeline.STEP} {self.step + 1}"
        self.meanings[name] = timeline.Meaning(timeline.STEP)
        self.range = record_function(name)
        self.range.__enter__()

    def _watch(self, labels: Labels) -> AbstractContextManager[object]:
        name = timeline.name_of(labels)
        self.meanings[name] = timeline.Meaning.of(labels)
        return record_function(name)

    def finish(self, broken: bool = False) -> None:
        """Write what is recorded, if that has not been done. `broken`: the last step did not end."""
        if self.range is None:
            return
        self.rank.world.labels.watch, self.rank.world.comm = None, self.comm
        self.range.__exit__(None, None, None)
        self.range = None
        self.profiler.stop_trace()
        try:
            self._write(broken)
        except OSError as error:
            where = error.filename or self.folder
            raise ProfileFailed(f"--profile: {where}: {error.strerror or error}") from error

    def _write(self, broken: bool) -> None:
        path = self.folder / f"rank-{self.rank.world.rank}.json"
        content = self._trace(_beside(path))
        events: list[dict[str, Any]] = content["traceEvents"]
        found = timeline.read(events, self.meanings, self.held, _device(self.rank.device), broken)
        steps = [e for e in events if e.get("name") == found.steps[0].name and e.get("cat") == "user_annotation"]
        events += found.counters(steps[0]["ts"], steps[0]["pid"])
        title = f"rank {self.rank.world.rank} of {self.rank.layout.world_size}, {self.rank.layout}"
        _write(path, json.dumps(content, separators=(",", ":")))
        _write(path.with_name(f"{path.stem}-memory.json"), json.dumps({"rank": self.rank.world.rank} | found.data()))
        _write(path.with_name(f"{path.stem}-memory.svg"), memory.picture(found, title))

    def _trace(self, path: Path) -> dict[str, Any]:
        """As torch writes it, read back."""
        try:
            self.profiler.export_chrome_trace(str(path))
            return json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except (ValueError, RuntimeError, FileNotFoundError) as error:  # torch tells of no full disk
            raise OSError(28, "torch's trace did not become whole: is the disk full?", str(path.parent)) from error
        finally:
            for left in (path, path.with_name(f"{path.name}.tmp")):  # torch's own name of what is not whole yet
                left.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _write(path: Path, content: str) -> None:
    """The file is there when it is whole."""
    beside = _beside(path)
    try:
        beside.write_text(content, encoding="utf-8")
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _device(device: torch.device) -> tuple[int, int]:
    """Type and index as a trace has them."""
    return timeline.CPU if device.type == "cpu" else (1, device.index or 0)


def _held(rank: Rank) -> timeline.Held:
    """What lives from the first step to the last. Master weights that are the weights themselves count as these."""
    found: dict[int, tuple[str, int]] = {}

    def hold(category: str, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None and tensor.untyped_storage().nbytes():
                storage = tensor.untyped_storage()
                found.setdefault(storage.data_ptr(), (category, storage.nbytes()))

    for state in rank.states.values():
        hold(PARAMETERS, state.weights)
        hold(OPTIMIZER, state.master, *state.moments.values())
        hold(GRADIENTS, state.gradient, state.gradient_shard)
    for module in rank.executor.modules.values():
        hold(TABLES, *module.context.rope)
    return found
