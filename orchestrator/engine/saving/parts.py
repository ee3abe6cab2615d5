"""Save one checkpoint onto the disks of several nodes: each has its part, and perhaps others'.

All nodes have the same manifest, which lists the files of all. They show up under their names once
every node has its own described, so that none is published without the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from orchestrator.common.errors import JobFailed, OrchestratorError
from orchestrator.common.files import AS_USUAL, replace
from orchestrator.engine.ranks.ranks import Ranks, gather
from orchestrator.engine.saving import carry
from orchestrator.engine.saving.carry import Errand, identity_of
from orchestrator.engine.saving.reader import METADATA
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import FileRecord, Manifest

WRITER = re.compile(r"__([0-9]+)_")
CHANGING = ""  # in the name of a rank's file with everything else
ALIKE = "alike_"  # in the name of the file with what all ranks have alike
CONSTANT = "constant_"  # and of that with what does not change from one checkpoint to the next
# Code of torch 2.8 and 2.9 says so at each rank's first checkpoint. catch_warnings() would change
# what other threads say, and a thread writes: the filter stays.
warnings.filterwarnings(
    "ignore", "TypedStorage is deprecated", UserWarning, re.escape(FileSystemWriter.__module__)
)


@dataclass(frozen=True)
class Written:
    """A file of the checkpoint before, as it was when it was published, and what is where in it."""

    path: Path
    identity: tuple[int, ...]
    record: FileRecord
    results: Sequence[WriteResult] = ()

    def link(self, to: Path) -> bool:
        """Give the file another name, if nobody has touched it and the disk has such names."""
        try:
            os.link(self.path, to, follow_symlinks=False)
            if identity_of(to) == self.identity:
                return True
            to.unlink()
        except OSError:
            pass
        return False


@dataclass(frozen=True)
class Before:
    """An earlier checkpoint of this run: what the next ones may link of it."""

    changeless: Written | None = None  # this rank's file with what does not change
    copies: Mapping[str, Written] = field(default_factory=dict)  # and copies of other ranks'
    files: Mapping[str, FileRecord] = field(default_factory=dict)  # of all ranks


class Writer(FileSystemWriter):
    """Write some tensors into files of their own.

    Those that did not change since the checkpoint before: if they have a file there, it is linked.
    Where nodes share no disk, what all ranks have alike (buffers, counters): it is small, every
    node needs it, and none then needs the shards of another for it.
    """

    def __init__(
        self, path: Path, constant: Container[str], before: Written | None, *, apart: bool
    ) -> None:
        super().__init__(path, single_file_per_rank=True)
        self.constant, self.before, self.apart = constant, before, apart
        self.directory = path
        self.results: list[WriteResult] = []  # of those that did not change
        self.known: dict[str, FileRecord] = {}  # of the file that is linked

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        items: dict[str, list[WriteItem]] = {CHANGING: [], ALIKE: [], CONSTANT: []}
        for item in plan.items:
            alike = self.apart and item.type != WriteItemType.SHARD
            constant = CONSTANT if item.index.fqn in self.constant else CHANGING
            items[ALIKE if alike else constant].append(item)
        plans = {word: apart_as(word, plan, own) for word, own in items.items()}
        results = list(super().write_data(plans[CHANGING], planner).wait())
        if items[ALIKE]:
            results += super().write_data(plans[ALIKE], planner).wait()
        if items[CONSTANT]:
            for left in self.directory.glob(f"{plans[CONSTANT].storage_data.prefix}*"):
                left.unlink()  # to write into a link would be to write into the checkpoint before
            before = self._linked({item.index for item in items[CONSTANT]})
            if before is not None:
                self.results, self.known = list(before.results), {before.path.name: before.record}
            else:
                self.results = list(super().write_data(plans[CONSTANT], planner).wait())
        done: Future[list[Any]] = Future()
        done.set_result([*results, *self.results])
        return done

    def _linked(self, wanted: set[MetadataIndex]) -> Written | None:
        before = self.before
        if before is None or {result.index for result in before.results} != wanted:
            return None
        return before if before.link(self.directory / before.path.name) else None

    def digests(self, names: Sequence[str]) -> dict[str, FileRecord]:
        """Read all files but the one that is linked: its digest is that of before."""
        return {
            name: self.known.get(name) or checkpoint_store.digest(self.directory / name)
            for name in names
        }

    def written(self, final: Path, records: Mapping[str, FileRecord]) -> Written | None:
        """Describe the file of those that did not change, for the next checkpoint."""
        for name in {result.storage_data.relative_path for result in self.results}:
            identity = identity_of(self.directory / name)
            return Written(final / name, identity, records[name], self.results)
        return None


def apart_as(word: str, plan: SavePlan, items: list[WriteItem]) -> SavePlan:
    prefix = type(plan.storage_data)(plan.storage_data.prefix + word)
    return dataclasses.replace(plan, items=items, storage_data=prefix)


@dataclass(frozen=True)
class Place:
    """The directory of a checkpoint that is being written, and who writes it."""

    partial: Path
    directory: Path
    ranks: Ranks
    group: dist.ProcessGroup | None
    publishes: bool  # the first rank of its node


def publish(
    place: Place,
    step: int,
    progress: Any,
    files: Mapping[str, FileRecord],
    save: str,
    trusting: Callable[[int], contextlib.AbstractContextManager[None]],
) -> Manifest:
    """Describe and publish the parts of all nodes, or of none. Every rank calls it; rank 0 knows
    the files and the progress. trusting() raises where the state is not to be published."""
    ranks = place.ranks
    box: list[Any] = [None]
    if ranks.rank == 0:
        try:
            hosts = {name: ranks.nodes[writer_of(name)][1] for name in files if name != METADATA}
            manifest = Manifest(step, time.time(), progress, ranks.world, files, save, hosts)
            box = [(manifest, (place.partial / METADATA).read_bytes())]
        except (OSError, JobFailed) as error:
            box = [str(error)]
    dist.broadcast_object_list(box, 0, place.group)
    if isinstance(box[0], str):
        raise JobFailed(box[0])
    manifest, metadata = cast("tuple[Manifest, bytes]", box[0])
    members = set(ranks.neighbours)
    names = [METADATA, *(name for name in manifest.hosts if writer_of(name) in members)]

    def describe() -> None:
        if ranks.rank:
            replace(place.partial / METADATA, metadata, AS_USUAL)
        checkpoint_store.describe(place.partial, place.directory, manifest, names)

    def put_in_place() -> None:
        checkpoint_store.put_in_place(place.partial, place.directory, step)

    for action in (describe, put_in_place):
        problem = ""
        try:
            with trusting(step):
                if place.publishes:
                    action()
        except (OSError, OrchestratorError) as error:
            problem = str(error)
        if trouble := next((text for text in gather(problem, place.group) if text), ""):
            raise JobFailed(trouble)
    return manifest


def writer_of(name: str) -> int:
    """Tell which rank has written a file, as torch names it."""
    match = WRITER.match(name)
    if match is None:
        raise JobFailed(f"torch has written {name}, and no rank has this name")
    return int(match[1])


def keep_copies(
    place: Place, manifest: Manifest, copies: int, before: Mapping[str, Written]
) -> tuple[dict[str, Written], str]:
    """Give the files of each node to the nodes after it; say why one could not be kept.

    Of what this rank was given before it links what is the same again. It returns what the next
    checkpoints may link.
    """
    final, rank = checkpoint_store.final(place.directory, manifest.step), place.ranks.rank
    errands = errands_of(manifest.files, place.ranks.nodes, copies)
    constant = [errand for errand in errands if errand.target == rank and CONSTANT in errand.name]
    linked = {
        errand.name
        for errand in constant
        if (known := before.get(errand.name)) is not None
        and known.record == errand.record
        and known.link(final / errand.name)
    }
    there = gather(linked, place.group)
    errands = [errand for errand in errands if errand.name not in there[errand.target]]

    def path(errand: Errand) -> Path:
        return final / errand.name

    problems = carry.carry(errands, rank, place.group, path, path)
    copied = {}
    for errand in constant:
        with contextlib.suppress(OSError):
            copied[errand.name] = Written(path(errand), identity_of(path(errand)), errand.record)
    host = place.ranks.nodes[rank][1]
    trouble = next((f"{errand.name} on {host}: {text}" for errand, text in problems.items()), "")
    return copied, next((problem for problem in gather(trouble, place.group) if problem), "")


def errands_of(
    files: Mapping[str, FileRecord], nodes: Sequence[tuple[int, str]], copies: int
) -> list[Errand]:
    """Send each rank's files to a rank of the next node, and of those after it.

    What all ranks have alike goes to every node.
    """
    members = carry.of_nodes(nodes)
    order = sorted(members)
    errands = []
    for name, record in files.items():
        if name == METADATA:
            continue  # every node has it
        writer = writer_of(name)
        node = nodes[writer][0]
        local = members[node].index(writer)
        most = len(order) if ALIKE in name else min(copies, len(order))
        for distance in range(1, most):
            ranks = members[order[(order.index(node) + distance) % len(order)]]
            errands.append(Errand(writer, ranks[local % len(ranks)], name, record))
    return errands


def picture(nodes: int, copies: int) -> str:
    """Say what is kept where."""
    what = "the nodes share no disk: each keeps its own part of every checkpoint"
    further = min(copies, nodes) - 1
    if not further:
        return f"{what}; checkpoint.copies=2 keeps each part on a second node, too"
    where = "the next node" if further == 1 else f"the next {further} nodes"
    fewer = f" (there are {nodes} nodes, not {copies})" if copies > nodes else ""
    return f"{what}, with a copy on {where}{fewer}"
