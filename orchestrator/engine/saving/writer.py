"""Writes a rank's part of a checkpoint by torch's writer, and hashes the files on the way."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.futures import Future

from orchestrator.engine.saving.reader import first_cause
from orchestrator.records.checkpoint_manifest import FileRecord

# ALIKE marks the name of the file with values that all ranks have alike, CHANGING that of the rest.
CHANGING = ""
ALIKE = "alike_"
# The size of the pieces that are copied for the hashing thread.
PIECE_BYTES = 4 << 20
# Shorter pieces are hashed by the writing thread. torch writes some 40 of a few bytes for each
# tensor, and a switch to another thread takes longer than to hash one.
SHORT_BYTES = 64 << 10
# torch 2.8 and 2.9 emit this warning at each rank's first checkpoint. The filter is permanent,
# because catch_warnings() in the writing thread would affect the warnings of other threads.
warnings.filterwarnings(
    "ignore", "TypedStorage is deprecated", UserWarning, re.escape(FileSystemWriter.__module__)
)


class StagedPlanner(DefaultSavePlanner):
    """Plans with the tensors of the model, and writes their copies in host memory."""

    def __init__(self, staged: Mapping[str, Tensor], *, lowest: bool) -> None:
        super().__init__(dedup_save_to_lowest_rank=lowest)
        self.staged = staged

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.staged[write_item.index.fqn]


class SummedFile(io.FileIO):
    """A new file, whose sha256 a thread computes while torch prepares and writes the next piece."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        super().__init__(path, "w")
        self.pool, self.sum, self.size = pool, sha256(), 0
        # The pending hash update of the previous piece.
        self.summed = pool.submit(self.sum.update, b"")
        # Kept here, because torch replaces it by another error.
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        whole = memoryview(data).cast("B")
        for start in range(0, len(whole), PIECE_BYTES):
            piece = bytes(whole[start : start + PIECE_BYTES])
            self.summed.result()
            if len(piece) < SHORT_BYTES:
                self.sum.update(piece)
            else:
                self.summed = self.pool.submit(self.sum.update, piece)
            self._write_all(memoryview(piece))
        self.size += len(whole)
        return len(whole)

    def _write_all(self, rest: memoryview) -> None:
        try:
            while rest:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.problem = error
            raise

    def record(self) -> FileRecord:
        self.summed.result()
        return FileRecord(self.size, self.sum.hexdigest())


class SummingFileSystem(FileSystem):
    """Remembers the size and checksum of each file that is written through it."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with ThreadPoolExecutor(1) as pool, SummedFile(Path(path), pool) as stream:
            try:
                yield stream
            except RuntimeError as error:
                raise stream.problem or error from None
            self.records[Path(path).name] = stream.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Hashes the files that it writes.

    With `apart`, where nodes share no disk, values that all ranks have alike (buffers, counters) go
    to a file of their own. It is small and every node needs it, but not the shards beside it.
    """

    def __init__(self, path: Path, *, apart: bool) -> None:
        super().__init__(path, single_file_per_rank=True)
        self.directory, self.apart = path, apart
        self.fs: SummingFileSystem = SummingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        results: list[Any] = []
        for word, alike in ((CHANGING, False), (ALIKE, True)):
            items = [
                item
                for item in plan.items
                if alike == (self.apart and item.type != WriteItemType.SHARD)
            ]
            prefix = type(plan.storage_data)(plan.storage_data.prefix + word)
            part = dataclasses.replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait() if items else []
        done: Future[list[Any]] = Future()
        done.set_result(results)
        return done


# -- why a save failed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Trouble:
    """Why a rank could not save, and if the fault was its own or another rank's."""

    text: str = ""
    own: bool = False


def trouble_of(error: BaseException, directory: Path, index: int) -> Trouble:
    """Return why a save failed, and whether the rank with this index was the cause."""
    own = not isinstance(error, CheckpointException) or index in error.failures
    where = f" ({directory.parent})" if own else ""
    return Trouble(f"{first_cause(error)}{where}", own)
