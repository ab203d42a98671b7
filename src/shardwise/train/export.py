"""A checkpoint's weights in Hugging Face's form, by one process, whatever layout wrote them.

The folder is written beside its place and renamed when all of it is on disk: it is whole or not there.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwise.model.hf import from_config
from shardwise.model.read import ModelError
from shardwise.model.spec import Model
from shardwise.train.checkpoint import METADATA, Checkpoint, CheckpointError, find_checkpoint, sync
from shardwise.train.chunks import MASTER, Chunk, whole_shapes
from shardwise.train.hf_weights import save_weights
from shardwise.train.options import OptionError
from shardwise.train.storage import ChunkLoadPlanner, Fault, digest

DTYPES = ("bfloat16", "float16", "float32", "float64")

OnTensor = Callable[[str, int, int], None]
"""Called with (parameter, how many are written, of how many)."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the weights that `checkpoint` had after `step` steps, in `files` of `folder`."""

    checkpoint: str
    step: int
    folder: str
    files: tuple[str, ...]
    total_bytes: int
    parameters: int
    dtype: str


def export(path: Path, folder: Path, dtype: str | None = None, on_tensor: OnTensor | None = None) -> Exported:
    """Write the weights of a checkpoint, or of the newest in `path`, into a new folder, as `dtype` or as they are.

    Raises OptionError, CheckpointError or WeightsError with all that is wrong, OSError as the system.
    """
    _check(folder, dtype)
    found = find_checkpoint(path)
    whole = _Whole(found, _model_of(found), dtype, on_tensor)
    target = folder.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        files = save_weights(whole.model, whole.read, partial, context=found.identity.get("seq_len"))
        total = sum(file.stat().st_size for file in files)
        for file in (*partial.iterdir(), partial):
            sync(file)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    names = tuple(file.name for file in files)
    kind = str(whole.dtype).removeprefix("torch.")
    return Exported(str(found.folder), found.step, str(folder), names, total, whole.model.parameters, kind)


def _check(folder: Path, dtype: str | None) -> None:
    faults: list[str] = []
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        faults.append(f"--output {folder}: is there already; wanted a new folder, or an empty one")
    if dtype is not None and dtype not in DTYPES:
        faults.append(f"--dtype: found {dtype[:40]!r}; wanted one of {', '.join(DTYPES)}")
    if faults:
        raise OptionError(faults)


def _model_of(found: Checkpoint) -> Model:
    """The model whose config the checkpoint belongs to."""
    config = {k.removeprefix("model."): v for k, v in found.identity.items() if k.startswith("model.")}
    try:
        return from_config(config, found.folder.name, str(found.folder))
    except ModelError as error:
        raise CheckpointError([f"{found.folder}: {fault}" for fault in error.faults]) from None


class _Whole:
    """Reads whole parameters, one at a time: the files are held against their digests first."""

    def __init__(self, found: Checkpoint, model: Model, dtype: str | None, on_tensor: OnTensor | None) -> None:
        for name, wanted in found.files.items():
            if name != METADATA and digest(found.folder / name) != wanted:  # that one's was looked at already
                raise CheckpointError([f"{found.folder / name}: its content is not what was saved"])
        self.model, self.on_tensor = model, on_tensor
        self.shapes = whole_shapes(model)
        self.reader = FileSystemReader(found.folder)
        self.metadata: Metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self.stored = self._stored()
        self.dtype: torch.dtype = self.stored if dtype is None else getattr(torch, dtype)
        self.done: set[str] = set()

    def _stored(self) -> torch.dtype:
        """The dtype of the master copies, which is one."""
        first = self.metadata.state_dict_metadata.get(f"{next(iter(self.shapes))}/{MASTER}")
        if not isinstance(first, TensorStorageMetadata) or first.properties.dtype is None:
            raise CheckpointError([f"{self.reader.path}: no weights in it"])
        return first.properties.dtype

    def read(self, name: str) -> torch.Tensor:
        """The parameter, of its whole shape."""
        shape = self.shapes[name]
        flat = torch.empty(prod(shape), dtype=self.stored)
        box = Chunk(f"{name}/{MASTER}", shape, (0,) * len(shape), shape, "whole", 0, shape)
        planner = ChunkLoadPlanner([box])
        planner.set_up_planner({"whole": flat}, self.metadata, is_coordinator=True)
        try:
            plan = self.reader.prepare_local_plan(planner.create_local_plan())
        except Fault as fault:
            raise CheckpointError([f"{self.reader.path}: {fault.said}"]) from None
        self.reader.read_data(plan, planner).wait()
        self.done.add(name)
        if self.on_tensor is not None:
            self.on_tensor(name, len(self.done), len(self.shapes))
        return flat.view(shape).to(self.dtype)
