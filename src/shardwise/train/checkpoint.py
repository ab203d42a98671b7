"""Checkpoints: `FOLDER/step-000000200`, whole or not there, from which any other layout goes on.

Saving is asynchronous: the step waits for a copy of the state alone. The files are written into a hidden folder beside
the others, which gets its name when every rank's files, their digests and the manifest are on disk. Only a folder with
a manifest is a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_chunks
from torch.distributed.checkpoint.state_dict_saver import async_save

from shardwise.train.chunks import buffers, chunks, saved_shapes
from shardwise.train.distributed import CommError
from shardwise.train.options import KEEP, MANIFEST, checkpoint_name, checkpoints, newest, step_of
from shardwise.train.rank import Rank
from shardwise.train.storage import (
    ChunkLoadPlanner,
    ChunkSavePlanner,
    DigestReader,
    DigestWriter,
    Fault,
    Files,
    digest,
    fault_of,
    late_ranks,
)

FORMAT = 1
METADATA = ".metadata"
MAX_MANIFEST_BYTES = 1 << 26
"""A rank takes about 100 bytes of it."""

_PARTIAL = re.compile(r"\.step-\d{9,}\.[0-9a-f]{8}\.partial")
_FILE = re.compile(r"__\d+_\d+\.distcp|\.metadata")

Identity = dict[str, Any]
"""What a state belongs to, as JSON values by name: it can only go on where all of them are the same."""


@dataclass(frozen=True, slots=True)
class About:
    """What is said of a state beside its tensors: what it belongs to, and, for the reader, how it was trained."""

    identity: Identity
    settings: dict[str, Any]


class CheckpointError(ValueError):
    """No checkpoint, another run's, or a damaged one; `faults` says all that is wrong. Found before a rank starts."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class CheckpointFailed(RuntimeError):  # noqa: N818 - says what happened
    """Saving or loading failed on `rank`, at `step`: every rank raises it alike. `kind` as of `storage.Fault`."""

    def __init__(self, what: str, rank: int, step: int, fault: Fault) -> None:
        super().__init__(f"{what}: {fault.said}")
        self.rank, self.step, self.kind, self.trace = rank, step, fault.kind, fault.trace


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole one, as its manifest describes it."""

    folder: Path
    step: int
    layout: str
    identity: Identity
    files: Files


# ------------------------------------------------------------------------------------------------------------- folders


def open_folder(folder: Path, step: int) -> None:
    """Make the folder to save into. Raises CheckpointError where it holds later steps of another run, or OSError."""
    found = newest(folder)
    if found is not None and step_of(found) > step:
        raise CheckpointError(
            [f"--save {folder}: holds {found.name}, this run starts at step {step:,}: --resume it, or save elsewhere"]
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", str(folder))


def find_checkpoint(path: Path, identity: Identity | None = None) -> Checkpoint:
    """The checkpoint in `path`, or the newest of those in it; with an identity, one that goes on as that. Raises
    CheckpointError with all that is wrong."""
    folder = path if (path / MANIFEST).is_file() else newest(path)
    if folder is None:
        said = "no checkpoint in it" if path.exists() else "no such folder"
        raise CheckpointError([f"{path}: {said}; wanted a folder with {MANIFEST}, or of such folders"])
    found = _read_manifest(folder)
    differences = [] if identity is None else list(_differences(found.identity, identity))
    damage = _damage(found)
    if differences or damage:
        others = [p for p in checkpoints(folder.parent) if p != folder]
        hints = [f"an earlier one is there: {others[-1]}"] if others and damage else []
        if identity is not None and found.identity.get("optimizer") != identity.get("optimizer"):
            hints.append(f"its weights alone can go on: shardwise export {folder} -o DIR, then --init-from DIR")
        raise CheckpointError([f"{folder}: {fault}" for fault in (*differences, *damage)] + hints)
    return found


def _read_manifest(folder: Path) -> Checkpoint:
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError([f"{path}: larger than {MAX_MANIFEST_BYTES:,} bytes; wanted a manifest"])
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise CheckpointError([f"{path}: format {data['format']!r}; this version reads {FORMAT}"])
        files = {str(name): (int(size), str(found)) for name, (size, found) in data["files"].items()}
        if METADATA not in files or not all(map(_FILE.fullmatch, files)):
            raise ValueError("its files are no checkpoint's")
        return Checkpoint(folder, int(data["step"]), str(data["layout"]), dict(data["identity"]), files)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError([f"{path}: no manifest of a checkpoint ({type(error).__name__}: {error})"]) from None


def _differences(found: Identity, wanted: Identity) -> Iterator[str]:
    for name in dict.fromkeys((*wanted, *found)):
        if found.get(name) != wanted.get(name):
            yield f"saved with {name} {found.get(name)!r}; this run has {wanted.get(name)!r}"


def _damage(of: Checkpoint) -> list[str]:
    """What can be seen without reading the tensors: their digests are the ranks' to check."""
    faults = []
    for name, (size, _) in of.files.items():
        path = of.folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != size:
            faults.append(f"{name} has {path.stat().st_size:,} bytes, {size:,} were saved")
    if not faults and digest(of.folder / METADATA) != of.files[METADATA]:
        faults.append(f"{METADATA}: its content is not what was saved")
    return faults


# -------------------------------------------------------------------------------------------------------------- saving


@dataclass(frozen=True, slots=True)
class AllRanks:
    """A gloo group of all ranks, for checkpoints alone: a save runs beside the step's collectives."""

    group: dist.ProcessGroup
    timeout_s: float

    @staticmethod
    def make(timeout_s: float) -> AllRanks:
        """To be made before any other group, while every rank has made equally many."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="checkpoint")
        return AllRanks(cast("dist.ProcessGroup", group), timeout_s)


class Saver:
    """Saves one rank's part of the checkpoints in a folder, one at a time. Every rank calls the same methods."""

    def __init__(self, rank: Rank, folder: Path, about: About, among: AllRanks, keep: int = KEEP) -> None:
        self.rank, self.folder, self.about, self.keep = rank, folder, about, keep
        self.among = among
        self.chunks = chunks(rank.states, rank.layout, rank.world.rank)
        self.shapes = saved_shapes(rank.job)
        self._pending: tuple[int, Path, Future[Any]] | None = None
        self._news: Path | None = None
        token = [secrets.token_hex(4)]
        if rank.world.rank == 0:
            _remove_partial(folder)
        dist.broadcast_object_list(token, src=0, group=among.group)
        self._token = token[0]

    def start(self, step: int) -> None:
        """Copy the state as it is after `step` steps, and write the copy while training goes on."""
        self.finish()
        partial = self._hidden(step)
        future = async_save(
            cast("dict[str, Any]", buffers(self.rank.states)),
            storage_writer=DigestWriter(partial, lambda files: self._commit(partial, step, files)),
            planner=ChunkSavePlanner(self.chunks, self.shapes, self.rank.wide),
            process_group=self.among.group,
        )
        self._pending = step, partial, cast("Future[Any]", future)

    def check(self) -> None:
        """Raise what has become of the save under way, if it has failed."""
        if self._pending is not None and self._pending[2].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if there is one. Raises CheckpointFailed, or CommError after the timeout."""
        if self._pending is None:
            return
        (step, partial, future), self._pending = self._pending, None
        with _named(f"saving into {self.folder}", step, self.rank.world.rank):
            try:
                future.result(self.among.timeout_s)
            except (FutureTimeout, RuntimeError) as error:
                late = late_ranks(partial, dist.get_world_size())
                said = f"waited {self.among.timeout_s:g} s for ranks {late}" if late else "all ranks have written"
                raise RuntimeError(f"{said}: {error or 'not done'}") from error
        self._news = self.folder / checkpoint_name(step)

    def news(self) -> str | None:
        """The checkpoint that has become whole since this was last asked, if one has."""
        news, self._news = self._news, None
        return None if news is None else str(news)

    def _commit(self, partial: Path, step: int, files: Files) -> None:
        """Runs on one rank when all files are whole."""
        for name, (size, _) in files.items():
            if not (partial / name).is_file() or (partial / name).stat().st_size != size:
                raise Fault(
                    "io", f"{partial / name}: rank 0 does not see it whole; all ranks must save into one folder"
                )
        content = {
            "format": FORMAT,
            "step": step,
            "layout": str(self.rank.layout),
            "torch": torch.__version__,
            "identity": self.about.identity,
            "settings": self.about.settings,
            "files": files,
        }
        with (partial / MANIFEST).open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync(partial)
        partial.rename(self.folder / checkpoint_name(step))
        sync(self.folder)
        for old in checkpoints(self.folder)[: -self.keep]:
            hidden = self._hidden(step_of(old))
            old.rename(hidden)  # what is half removed is no checkpoint
            shutil.rmtree(hidden, ignore_errors=True)

    def _hidden(self, step: int) -> Path:
        """The folder of a checkpoint that is not whole, yet or any more."""
        return self.folder / f".{checkpoint_name(step)}.{self._token}.partial"


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove_partial(folder: Path) -> None:
    """What a run that was cut off has left."""
    for path in folder.glob(".step-*.partial"):
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _named(what: str, step: int, rank: int) -> Iterator[None]:
    """Name rank, step and cause of what distributed checkpoint raises: it collects the failures of all ranks."""
    try:
        yield
    except CheckpointException as error:
        first = min(error.failures)
        raise CheckpointFailed(what, first, step, fault_of(error.failures[first][0])) from None
    except RuntimeError as error:
        failed: Any = CommError(f"rank {rank}: {what}: {error}")
        failed.step = step
        raise failed from error


# ------------------------------------------------------------------------------------------------------------- loading


def load(rank: Rank, checkpoint: Checkpoint, among: AllRanks) -> None:
    """Set weights, optimizer state and step count of one rank; all call it. Raises CheckpointFailed or CommError."""
    here = rank.world.rank
    held = chunks(rank.states, rank.layout, here)
    with _named(f"loading {checkpoint.folder}", checkpoint.step, here):
        load_chunks(
            cast("dict[str, Any]", buffers(rank.states)),
            storage_reader=DigestReader(checkpoint.folder, checkpoint.files, here, dist.get_world_size()),
            planner=ChunkLoadPlanner(held),
            process_group=among.group,
        )
    for state in rank.states.values():
        state.publish()
    rank.optimizer.set_steps(checkpoint.step)
