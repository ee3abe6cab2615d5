"""Write a rank's part of a checkpoint by torch's own writer, and what never changes only once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import warnings
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from orchestrator.common import text
from orchestrator.common.errors import OrchestratorError
from orchestrator.engine.saving.carry import identity_of
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import FileRecord

CHANGING = ""  # in the name of a rank's file with everything else
ALIKE = "alike_"  # in the name of the file with what all ranks have alike
CONSTANT = "constant_"  # and of that with what does not change from one checkpoint to the next
# Code of torch 2.8 and 2.9 says so at each rank's first checkpoint. catch_warnings() would change
# what other threads say, and a thread writes: the filter stays.
warnings.filterwarnings(
    "ignore", "TypedStorage is deprecated", UserWarning, re.escape(FileSystemWriter.__module__)
)


class StagedPlanner(DefaultSavePlanner):
    """Plans by the tensors that train, and writes their copies in host memory."""

    def __init__(self, staged: Mapping[str, Tensor], *, lowest: bool) -> None:
        super().__init__(dedup_save_to_lowest_rank=lowest)
        self.staged = staged

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.staged[write_item.index.fqn]


@dataclass(frozen=True)
class Saved:
    """A published checkpoint of this run, whose constant files the next ones may link."""

    path: Path
    files: Mapping[str, FileRecord]  # of all ranks
    identities: dict[str, tuple[int, ...]]  # of the constant files that this rank has put there
    results: Sequence[WriteResult] = field(default_factory=list)  # of its own one

    def link(self, name: str, to: Path) -> bool:
        """Link a file under another name, unless it was changed or the disk has no such names."""
        try:
            os.link(self.path / name, to, follow_symlinks=False)
            if identity_of(to) == self.identities.get(name):
                return True
            to.unlink()
        except OSError:
            pass
        return False


class Writer(FileSystemWriter):
    """Writes some tensors into files of their own.

    Those that did not change since an earlier checkpoint: their file there is linked.
    Where nodes share no disk, what all ranks have alike (buffers, counters): it is small, every
    node needs it, and none then needs the shards of another for it.
    """

    def __init__(
        self, path: Path, constant: Container[str], before: Saved | None, *, apart: bool
    ) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=False)
        self.directory, self.constant, self.before, self.apart = path, constant, before, apart
        self.results: list[WriteResult] = []  # of what did not change
        self.linked: dict[str, FileRecord] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        items: dict[str, list[WriteItem]] = {CHANGING: [], ALIKE: [], CONSTANT: []}
        for item in plan.items:
            alike = self.apart and item.type != WriteItemType.SHARD
            constant = CONSTANT if item.index.fqn in self.constant else CHANGING
            items[ALIKE if alike else constant].append(item)
        results: list[WriteResult] = []
        for word, own in items.items():
            prefix = type(plan.storage_data)(plan.storage_data.prefix + word)
            part = dataclasses.replace(plan, items=own, storage_data=prefix)
            for left in self.directory.glob(f"{prefix.prefix}*") if word else ():
                left.unlink()  # to write into a link would be to write into an earlier checkpoint
            if not own:
                continue
            if word == CONSTANT:
                self.results = self._link(own) or list(super().write_data(part, planner).wait())
                results += self.results
            else:
                results += super().write_data(part, planner).wait()
        done: Future[list[Any]] = Future()
        done.set_result(results)
        return done

    def _link(self, items: Sequence[WriteItem]) -> list[WriteResult]:
        """Return the results of an earlier checkpoint that holds exactly these, linked here."""
        before = self.before
        if before is None or {r.index for r in before.results} != {item.index for item in items}:
            return []
        for name in {result.storage_data.relative_path for result in before.results}:
            if not before.link(name, self.directory / name):
                return []
            self.linked[name] = before.files[name]
        return list(before.results)

    def digests(self, names: Sequence[str]) -> dict[str, FileRecord]:
        """Sum all files up but the one that is linked, while the disk takes them."""
        new = [name for name in names if name not in self.linked]
        with ThreadPoolExecutor(1) as pool:
            synced = pool.map(sync, [self.directory / name for name in new])
            found = {name: checkpoint_store.digest(self.directory / name) for name in new}
            list(synced)
        return {**self.linked, **found}

    def identities(self) -> dict[str, tuple[int, ...]]:
        """Return what shows later on that the file of what did not change is as it was written."""
        names = {result.storage_data.relative_path for result in self.results}
        return {name: identity_of(self.directory / name) for name in names}


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# -- why a save failed -----------------------------------------------------------------------------


PROBE_BYTES = 1 << 16


@dataclass(frozen=True)
class Trouble:
    """Why a rank could not save: by its own fault, or because another one could not."""

    text: str = ""
    own: bool = False


def trouble_of(
    error: BaseException, directory: Path, index: int, state: Mapping[str, Tensor]
) -> Trouble:
    """Return why a save failed, and whether this rank, the one with this index, was the cause."""
    if problem := disk_problem(directory):
        need = sum(value.numel() * value.element_size() for value in state.values())
        return Trouble(f"{problem}; a checkpoint takes {text.size(need)} in all", own=True)
    own = isinstance(error, CheckpointException) and index in error.failures
    return Trouble(first_cause(error), own)


def disk_problem(directory: Path) -> str:
    """Return what the disk says when it is written to.

    What this save has written is removed with it, so its size counts as free.
    """
    probe = directory / f".probe_{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, bytes(PROBE_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        problem = f"{error.strerror or error} ({directory.parent})"
        with contextlib.suppress(OSError):
            disk = os.statvfs(directory)
            written = sum(512 * path.stat().st_blocks for path in directory.iterdir())
            free, whole = disk.f_bavail * disk.f_frsize + written, disk.f_blocks * disk.f_frsize
            problem += f", {text.size(free)} of {text.size(whole)} free"
            problem += ", no room for another file" if disk.f_files and not disk.f_favail else ""
        return problem
    return ""


def first_cause(error: BaseException) -> str:
    """Return in a line why the first rank failed, without the traces of the others."""
    if isinstance(error, CheckpointException) and error.failures:
        inner = next(iter(error.failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    lines = str(error).strip().splitlines()
    if isinstance(error, OrchestratorError):
        return error.what
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
