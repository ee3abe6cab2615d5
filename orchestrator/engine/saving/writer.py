"""Write a rank's part of a checkpoint by torch's own writer, and what never changes only once."""

from __future__ import annotations

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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

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
        """Give a file another name, unless it was changed or the disk has no such names."""
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
