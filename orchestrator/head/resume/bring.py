"""Bring the parts of one checkpoint from node to node: all takers at once, each file checked.

A node calls the one that gives, by a token that both have from here; where it cannot, its files
come through this machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.folder import Folder
from orchestrator.head.chores import push
from orchestrator.head.connect import fleet
from orchestrator.head.outputs.fetch import Fetch
from orchestrator.head.resume.holder import Holder
from orchestrator.head.resume.room import Room
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer.send import Outbox, Sender
from orchestrator.head.transfer.take import QUICK_SECONDS
from orchestrator.protocol.requests.transfer import (
    GivingNode,
    MakeRoom,
    NamedFile,
    Place,
    TakeFiles,
)
from orchestrator.records import checkpoint_manifest, checkpoint_store
from orchestrator.records.checkpoint_parts import Delivery, Version

LONGEST = 86400.0  # seconds: terabytes over a slow line
AT_ONCE = 8  # nodes that take from one; it listens to a few more, and hangs up on the others

Stopped = Callable[[], None]  # raises an error when nobody wants it any more


@dataclass(frozen=True)
class Load:
    """Files that one node takes from another."""

    source: int
    target: int
    directory: str  # of the source
    files: tuple[NamedFile, ...]


class Bringing:
    """Bring files of one version of a checkpoint from node to node, over open channels."""

    def __init__(
        self,
        holders: Sequence[Holder],
        deliveries: Sequence[Delivery],
        step: int,
        version: Version,
        place: Path,  # here, for files that come through this machine
    ) -> None:
        self.holders, self.deliveries, self.room = holders, deliveries, Room(place)
        self.step, self.version = step, version
        self.givers: dict[tuple[int, str], GivingNode] = {}
        self.calling = {number: threading.Semaphore(AT_ONCE) for number in range(len(holders))}
        self.through_here: list[str] = []  # who could not take from whom, and why

    def go(self, into: str, stopped: Stopped) -> None:
        """Bring all files; an error says what could not be brought.

        `into` is a directory of checkpoints on the nodes; without one it is that of their job.
        """
        self.into, self.stopped = into, stopped
        self.loads = list(self.grouped())
        total = sum(each.record.size for each in self.deliveries)
        progress = Progress("bringing the checkpoint", total)
        targets = sorted({load.target for load in self.loads})
        try:
            self.give()
            results = fleet.everywhere(targets, lambda target: self.take_all(target, progress))
        finally:
            progress.clear()
            for number in {source for source, _ in self.givers}:
                self.holders[number].end_giving()
        self.stopped()
        for target, result in zip(targets, results, strict=True):
            if isinstance(result, OrchestratorError):
                raise NodeError(f"{self.holders[target].name}: {result.what}", result.fix)

    def grouped(self) -> Iterator[Load]:
        """Gather what goes from one node to another; each taker gets the manifest last."""
        groups: dict[tuple[int, int, str], list[NamedFile]] = {}
        for each in self.deliveries:
            paths = (h.path for h in self.version.holdings
                     if h.node == each.source and each.name in h.here)  # fmt: skip
            file = NamedFile(path=each.name, size=each.record.size, sum=each.record.sha256)
            groups.setdefault((each.target, each.source, next(paths)), []).append(file)
        last = {target: (target, source, path) for target, source, path in sorted(groups)}
        for group in last.values():
            checksum = self.version.holdings[0].manifest
            size = len(self.holders[group[1]].manifests[checksum])
            groups[group].append(NamedFile(path=checkpoint_manifest.NAME, size=size, sum=checksum))
        for target, source, path in sorted(groups):
            yield Load(source, target, path, tuple(groups[target, source, path]))

    def give(self) -> None:
        """Let those nodes listen that others will call."""
        names: dict[tuple[int, str], set[str]] = {}
        for load in self.loads:
            given = names.setdefault((load.source, load.directory), set())
            given.update(file.path for file in load.files)

        def ask(where: tuple[int, str]) -> tuple[int, str]:
            number, directory = where
            giver = self.holders[number].give(directory, names[where], LONGEST)
            if giver is not None:
                self.givers[where] = giver
            return where

        fleet.everywhere(list(names), ask)  # what does not listen gives through here

    def take_all(self, target: int, progress: Progress) -> None:
        for load in self.loads:
            if load.target == target:
                self.take(load, progress)

    def take(self, load: Load, progress: Progress) -> None:
        """Let a node take its files from another, or bring them through here."""
        directory, why = self.directory_of(load.target), ""
        giver = self.givers.get((load.source, load.directory))
        if giver is not None:
            while not self.calling[load.source].acquire(timeout=QUICK_SECONDS):
                self.stopped()
            try:
                why = self.take_directly(load, directory, giver, progress)
            finally:
                self.calling[load.source].release()
        if giver is None or why:
            source, target = self.holders[load.source].name, self.holders[load.target].name
            reason = why or f"{source} may not listen"
            self.through_here.append(f"{target} cannot take files from {source} ({reason})")
            for file in load.files:
                with self.room.of(file.path, file.size, self.stopped) as here:
                    self.take_through_here(load, file, directory, here, progress)

    def directory_of(self, target: int) -> str:
        """Return where a node has its part of this checkpoint, or is to have it."""
        for holding in self.version.holdings:
            if holding.node == target:
                return holding.path
        holder, room = self.holders[target], self.into
        if not room:
            job, node = holder.job
            with holder.lock:
                room = holder.open.ask(MakeRoom(job=job, node=node), QUICK_SECONDS).directory
        return str(checkpoint_store.final(Path(room), self.step))

    def take_directly(
        self, load: Load, directory: str, giver: GivingNode, progress: Progress
    ) -> str:
        """Return why it did not come, or nothing."""
        request = TakeFiles(directory=directory, files=load.files, giver=giver, seconds=LONGEST)
        why = self.holders[load.target].take(request, progress, self.stopped)
        return why.encode("ascii", "replace").decode()[:200]

    def take_through_here(
        self, load: Load, file: NamedFile, directory: str, place: Path, progress: Progress
    ) -> None:
        """Fetch a file, and send it on; what has come is not sent again."""
        source, target = self.holders[load.source], self.holders[load.target]
        within = load.directory.removeprefix(f"{source.place}/")
        here = Folder(place, private=True)
        with source.lock:
            fetch = Fetch(source.open, source.place, here, label="resume", replace=True)
            came = fetch.go([source.files[f"{within}/{file.path}"]])
        refuse(came.failed)
        record = checkpoint_manifest.digest(place / within / file.path)
        if (record.size, record.sha256) != (file.size, file.sum):
            raise NodeError(f"{file.path} on {source.name} is not what its manifest says")
        cargo = push.load(place / within, directory)
        outbox = Outbox(cargo.tree)
        try:
            with target.lock:
                into = Place(directory=cargo.directory)
                sent = Sender(outbox, target.open, into, progress.add).go()
        finally:
            outbox.close()
        refuse({os.fsdecode(path): why for path, why in sent.failed.items()})


def refuse(failed: Mapping[str, str]) -> None:
    for path, why in failed.items():
        raise NodeError(f"{path}: {why}")
