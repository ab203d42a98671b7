"""torch's distributed checkpoint, fed by placement records: planners over chunks, and files that carry digests.

The files are torch's own (`FileSystemReader` reads them), beside a manifest of ours. No DTensor: a chunk is a box.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.train.chunks import Chunk, Shape
from shardwise.train.launch import failure_of

Buffers = dict[str, torch.Tensor]
Files = dict[str, tuple[int, str]]
"""File name -> (bytes, SHA-256)."""

WRITTEN = "written"
"""Ends the name of an empty file that says that a rank's part is whole; gone when all are."""


class Fault(Exception):  # noqa: N818 - it carries a text from rank to rank, and always pickles
    """What went wrong on one rank; `kind` is "io", "input" or "fault", and of the last `trace` says where."""

    def __init__(self, kind: str, said: str, trace: str = "") -> None:
        super().__init__(kind, said, trace)
        self.kind, self.said, self.trace = kind, said, trace


def fault_of(error: BaseException) -> Fault:
    """An exception as a fault: of the system where an OSError is among its causes."""
    if isinstance(error, Fault):
        return error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            where = f"{cause.filename}: " if cause.filename else ""
            return Fault("io", f"{where}{cause.strerror or cause}")
        cause = cause.__cause__ or cause.__context__
    failure = failure_of(error)
    return Fault("fault", failure.cause, failure.trace)


def digest(path: Path) -> tuple[int, str]:
    """(bytes, SHA-256) of a file."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), found


def late_ranks(folder: Path, world_size: int) -> list[int]:
    """Ranks that have not written all of their part into the folder of a save under way."""
    return [rank for rank in range(world_size) if not (folder / f"__{rank}_{WRITTEN}").exists()]


# ----------------------------------------------------------------------------------------------------------- planners


class ChunkSavePlanner(SavePlanner):
    """Writes every box of the whole tensors once, of all that hold it by the rank with the least to write so far."""

    def __init__(self, chunks: list[Chunk], shapes: dict[str, Shape], wide: torch.dtype) -> None:
        self.chunks = {_index(c): c for c in chunks}
        self.shapes, self.wide = shapes, wide
        self.buffers: Buffers = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        del storage_meta, is_coordinator
        self.buffers = state_dict

    def create_local_plan(self) -> SavePlan:
        properties = TensorProperties(dtype=self.wide)
        return SavePlan([_write_item(index, c, properties) for index, c in self.chunks.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(_once(all_plans))
        _require_whole(self.shapes, metadata)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.chunks[write_item.index].view(self.buffers)


def _index(chunk: Chunk) -> MetadataIndex:
    return MetadataIndex(chunk.name, torch.Size(chunk.offsets))


def _box(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def _write_item(index: MetadataIndex, chunk: Chunk, properties: TensorProperties) -> WriteItem:
    data = TensorWriteData(_box(chunk), properties, torch.Size(chunk.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _once(plans: list[SavePlan]) -> list[SavePlan]:
    """The same plans, each item left with one of the ranks that hold it."""
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders[item.index].append(rank)
            items[item.index] = item
    load, mine = [0] * len(plans), [list[WriteItem]() for _ in plans]
    for index, ranks in holders.items():
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += items[index].tensor_storage_size() or 0
        mine[writer].append(items[index])
    return [replace(plan, items=chosen) for plan, chosen in zip(plans, mine, strict=True)]


def _require_whole(shapes: dict[str, Shape], metadata: Metadata) -> None:
    """Every element of every tensor is written once. Raises Fault."""
    for name, shape in shapes.items():
        saved = metadata.state_dict_metadata.get(name)
        boxes = saved.chunks if isinstance(saved, TensorStorageMetadata) else []
        held, wanted = sum(box.sizes.numel() for box in boxes), torch.Size(shape).numel()
        if held != wanted:
            raise Fault("fault", f"{name}: the ranks hold {held:,} of {wanted:,} elements")


class ChunkLoadPlanner(LoadPlanner):
    """Reads every box of this rank from whichever boxes were saved. `state_dict` is the flat buffers themselves."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.chunks = {f"{c.buffer}:{c.name}": c for c in chunks}
        self.buffers: Buffers = {}
        self.metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        del is_coordinator
        self.buffers, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for key, chunk in self.chunks.items() for item in self._reads(key, chunk)])

    def _reads(self, key: str, chunk: Chunk) -> list[ReadItem]:
        saved = None if self.metadata is None else self.metadata.state_dict_metadata.get(chunk.name)
        if not isinstance(saved, TensorStorageMetadata):
            raise Fault("input", f"{chunk.name} is not in the checkpoint")
        if tuple(saved.size) != chunk.shape:
            raise Fault("input", f"{chunk.name}: found {list(saved.size)}, wanted {list(chunk.shape)}")
        reads = create_read_items_for_chunk_list(chunk.name, saved, [_box(chunk)])
        if sum(read.lengths.numel() for read in reads) != chunk.numel:
            raise Fault("input", f"{chunk.name}: not all elements at {list(chunk.offsets)} were saved, or some twice")
        # A rank may hold two copies of one box: the destination is named by its buffer as well.
        return [replace(read, dest_index=replace(read.dest_index, fqn=key)) for read in reads]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        del value
        raise Fault("input", f"{read_item.dest_index.fqn}: found bytes, wanted a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        box = self.chunks[read_item.dest_index.fqn].view(self.buffers)
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            box = box.narrow(dim, offset, length)
        return box

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


# -------------------------------------------------------------------------------------------------------------- files


class DigestWriter(StorageWriter):
    """torch's files of each rank, fsynced and digested; `commit` is called on one rank when all of them are whole."""

    def __init__(self, folder: Path, commit: Callable[[Files], None]) -> None:
        self.folder, self.commit = folder, commit
        # What is written is in host memory already. To copy ahead the writer would wait for a stream of the thread's
        # device, which is GPU 0 on every rank, and takes memory there.
        self.files = FileSystemWriter(folder, per_thread_copy_ahead=0)

    def reset(self, checkpoint_id: Any = None) -> None:
        self.files.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.files.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self.files.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return self.files.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = list(self.files.write_data(plan, planner).value())
            for path in sorted(self.folder.glob(f"{plan.storage_data.prefix}*")):
                size, found = digest(path)
                results.append(WriteResult(MetadataIndex(path.name), size, found))
            (self.folder / f"{plan.storage_data.prefix}{WRITTEN}").touch()
        except Exception as error:
            raise fault_of(error) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Runs on one rank. Digests travel among the results; torch's own metadata takes the others."""
        try:
            tensors = [[r for r in rank if not isinstance(r.storage_data, str)] for rank in results]
            self.files.finish(metadata, tensors)
            found: Files = {
                str(r.index.fqn): (r.size_in_bytes, r.storage_data)
                for rank in results
                for r in rank
                if isinstance(r.storage_data, str)
            }
            for path in self.folder.glob(f"__*_{WRITTEN}"):
                path.unlink()
            self.commit(found | {".metadata": digest(self.folder / ".metadata")})
        except Exception as error:
            raise fault_of(error) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return FileSystemWriter.validate_checkpoint_id(checkpoint_id)


class DigestReader(StorageReader):
    """torch's files, held against their digests before anything in them is believed: each by one of the ranks."""

    def __init__(self, folder: Path, files: Files, rank: int, world_size: int) -> None:
        self.folder = folder
        self.mine = dict(sorted(files.items())[rank::world_size])
        self.files = FileSystemReader(folder)

    def reset(self, checkpoint_id: Any = None) -> None:
        self.files.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.files.read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.files.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """No rank reads before all ranks have been here. Raises Fault for a file that is not what was written."""
        for name, wanted in self.mine.items():
            if digest(self.folder / name) != wanted:
                raise Fault("input", f"{self.folder / name}: its content is not what was saved")
        return self.files.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return self.files.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return self.files.read_data(plan, planner)
        except Exception as error:
            raise fault_of(error) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return FileSystemReader.validate_checkpoint_id(checkpoint_id)
