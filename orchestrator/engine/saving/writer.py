"""Writes a rank's part of a checkpoint by torch's writer, and hashes the files on the way."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.futures import Future

from orchestrator.engine.saving.reader import first_cause
from orchestrator.records.checkpoint_manifest import FileRecord

T = TypeVar("T")
# ALIKE marks the name of the file with values that all ranks have alike, CHANGING that of the rest.
CHANGING = ""
ALIKE = "alike_"
# A part of a state takes at least PART_BYTES, and a rank has at most MOST_PARTS.
MOST_PARTS = 4
PART_BYTES = 64 << 20
# Collects the short writes of torch, some 40 for each tensor. Longer ones go past it.
BUFFER_BYTES = 1 << 20
# Shorter writes are hashed at once: a switch to another thread takes longer.
SHORT_BYTES = 64 << 10
# torch 2.8 and 2.9 emit this warning at each rank's first checkpoint. The filter is permanent,
# because catch_warnings() in the writing thread would affect the warnings of other threads.
warnings.filterwarnings(
    "ignore", "TypedStorage is deprecated", UserWarning, re.escape(FileSystemWriter.__module__)
)


def spread_items(items: Iterable[T], size: Callable[[T], int]) -> list[list[T]]:
    """Divide items into a few parts of about as many bytes, for a thread each."""
    ordered = sorted(items, key=size, reverse=True)
    count = min(MOST_PARTS, len(ordered), 1 + sum(map(size, ordered)) // PART_BYTES)
    return [ordered[first::count] for first in range(count)]


class StagedPlanner(DefaultSavePlanner):
    """Plans with the tensors of the model, and writes their copies in host memory."""

    def __init__(self, staged: Mapping[str, Tensor], *, lowest: bool) -> None:
        super().__init__(dedup_save_to_lowest_rank=lowest)
        self.staged = staged

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.staged[write_item.index.fqn]


class SummedFile(io.FileIO):
    """A new file. A thread computes the sha256 of what this one writes, at the same time."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        super().__init__(path, "w")
        self.pool, self.sum, self.size = pool, sha256(), 0
        # Kept here, because torch replaces it by another error.
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        rest, size = memoryview(data), len(data)
        summed = self.pool.submit(self.sum.update, rest) if size > SHORT_BYTES else None
        try:
            while rest:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.problem = error
            raise
        finally:
            # The memory is torch's, and may be freed after this call.
            self.sum.update(data) if summed is None else summed.result()
        self.size += size
        return size


class SummingFileSystem(FileSystem):
    """Remembers the size and checksum of each file that is written through it."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with ThreadPoolExecutor(1) as pool, SummedFile(Path(path), pool) as file:
            stream = io.BufferedWriter(file, BUFFER_BYTES)
            try:
                yield stream
            except RuntimeError as error:
                raise file.problem or error from None
            if not stream.closed:
                # torch syncs `.metadata` while its end is still in the buffer.
                stream.flush()
                os.fsync(file.fileno())
            # torch renames `.metadata.tmp` afterwards.
            self.records[Path(path).name.removesuffix(".tmp")] = FileRecord(
                file.size, file.sum.hexdigest()
            )


class Writer(FileSystemWriter):
    """Hashes the files that it writes.

    With `apart`, where nodes share no disk, values that all ranks have alike (buffers, counters) go
    to a file of their own. It is small and every node needs it, but not the shards beside it.
    """

    def __init__(self, path: Path, *, apart: bool) -> None:
        super().__init__(path, single_file_per_rank=True)
        self.directory, self.apart = path, apart
        self.fs: SummingFileSystem = SummingFileSystem()

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[Any]]:
        """Write the parts into files of their own, at the same time."""
        parts, written = [], Future[list[Any]]()
        for word, alike in ((CHANGING, False), (ALIKE, True)):
            items = (
                item
                for item in plan.items
                if alike == (self.apart and item.type != WriteItemType.SHARD)
            )
            for number, some in enumerate(
                spread_items(items, lambda item: planner.resolve_data(item).nbytes)
            ):
                name = f"{plan.storage_data.prefix}{word}{f'{number}_' if number else ''}"
                parts.append(
                    dataclasses.replace(
                        plan, items=some, storage_data=type(plan.storage_data)(name)
                    )
                )
        write = super().write_data
        with ThreadPoolExecutor(2 * MOST_PARTS) as pool:
            written.set_result(
                [
                    result
                    for results in pool.map(lambda part: write(part, planner).wait(), parts)
                    for result in results
                ]
            )
        return written


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
