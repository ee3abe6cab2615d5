"""Bring what nodes lack of one checkpoint, each file checked: its manifest comes last.

What a node cannot take from another comes through this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.common.errors import NodeError
from orchestrator.common.folder import Folder
from orchestrator.head.screen.output import Progress
from orchestrator.head.transfer.bring.exchange import (
    CALLERS,
    LONGEST_SECONDS,
    Bundle,
    Exchange,
    Stopped,
)
from orchestrator.head.transfer.bring.partner import Partner
from orchestrator.head.transfer.bring.room import Room
from orchestrator.head.transfer.fetch.fetch import Fetch
from orchestrator.head.transfer.schedule import Rules
from orchestrator.head.transfer.send import Outbox, Sender
from orchestrator.head.transfer.take import QUICK_SECONDS
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.manifest import FILE, Entry
from orchestrator.protocol.requests.transfer import (
    GivingNode,
    MakeRoom,
    NamedFile,
    Place,
    TakeFiles,
)
from orchestrator.records import checkpoint_manifest, checkpoint_store
from orchestrator.records.checkpoint_parts import Delivery, Version

STAR = Rules(width=CALLERS, streams=False, passes_on=False)  # each takes a share of its own


class Missing:
    """Brings what nodes lack of one version of a checkpoint, in two goes: its manifest is last."""

    def __init__(
        self,
        partners: Sequence[Partner],
        deliveries: Sequence[Delivery],
        step: int,
        version: Version,
        room: Room,  # here, for files that come through this machine
        stopped: Stopped,
    ) -> None:
        self.partners, self.deliveries, self.room = partners, deliveries, room
        self.step, self.version, self.stopped = step, version, stopped
        total = sum(delivery.record.size for delivery in deliveries)
        self.progress = Progress("bringing the checkpoint", total)
        self.through_here: list[str] = []  # who could not take from whom, and why

    def bring(self, into: str) -> None:
        """Bring all of it; an error says what could not be brought.

        `into` is a directory of checkpoints on the nodes; without one it is that of their job.
        """
        exchange = Exchange(self.partners, self.progress, self.stopped)
        parts: dict[tuple[int, int, str], list[NamedFile]] = {}
        for each in self.deliveries:
            there = next(h.path for h in self.version.holdings
                         if h.node == each.source and each.name in h.here)  # fmt: skip
            file = NamedFile(path=each.name, size=each.record.size, sum=each.record.sha256)
            parts.setdefault((each.target, each.source, there), []).append(file)
        places = {target: self.place_on(target, into) for target, _, _ in parts}
        last = {target: (target, source, there) for target, source, there in parts}
        for files in (parts, {way: [self.manifest(way[1])] for way in last.values()}):
            exchange.go([self.bundle(*way, files[way], places[way[0]]) for way in sorted(files)])
            for target, error in exchange.failed.items():
                raise NodeError(f"{self.partners[target].name}: {error.what}", error.fix)

    def manifest(self, source: int) -> NamedFile:
        checksum = self.version.holdings[0].manifest
        size = len(self.partners[source].manifests[checksum])
        return NamedFile(path=checkpoint_manifest.NAME, size=size, sum=checksum)

    def bundle(
        self, target: int, source: int, there: str, files: Sequence[NamedFile], place: str
    ) -> Bundle:
        """Put together what one node takes from a directory of another."""

        def request(_: int, giver: GivingNode) -> TakeFiles:
            named = tuple(files)
            return TakeFiles(directory=place, files=named, giver=giver, seconds=LONGEST_SECONDS)

        def through_here(_: int, why: str) -> None:
            names = self.partners[target].name, self.partners[source].name
            self.through_here.append(
                "{} cannot take files from {}".format(*names) + f" ({why[:200]})"
            )
            for file in files:
                with self.room.of(file.path, file.size, self.stopped) as here:
                    self.pass_on(source, target, there, file, place, here)

        paths = frozenset(file.path for file in files)
        return Bundle(source, (target,), paths, lambda _: there, request, STAR, through_here)

    def place_on(self, target: int, into: str) -> str:
        """Return where a node has its part of this checkpoint, or is to have it."""
        for holding in self.version.holdings:
            if holding.node == target:
                return holding.path
        if not into:
            partner = self.partners[target]
            job, node = partner.job
            with partner.lock:
                into = partner.open.ask(MakeRoom(job=job, node=node), QUICK_SECONDS).directory
        return str(checkpoint_store.final(Path(into), self.step))

    def pass_on(
        self, source: int, target: int, directory: str, file: NamedFile, place: str, here: Path
    ) -> None:
        """Fetch a file, and send it on; what has come is not sent again."""
        giver, taker = self.partners[source], self.partners[target]
        within = directory.removeprefix(f"{giver.place}/")
        folder = Folder(here, private=True)
        with giver.lock:
            fetch = Fetch(giver.open, giver.place, folder, label="resume", replace=True)
            came = fetch.go([giver.files[f"{within}/{file.path}"]])
        refuse(came.failed)
        record = checkpoint_manifest.digest(here / within / file.path)
        if (record.size, record.sha256) != (file.size, file.sum):
            raise NodeError(f"{file.path} on {giver.name} is not what its manifest says")
        name, total = os.fsencode(file.path), file.sum.encode()
        entry = Entry(name, FILE, file.mode, file.size, total)
        outbox = Outbox(Tree.of(os.fsencode(here / within), [entry]))
        try:
            with taker.lock:
                sent = Sender(outbox, taker.open, Place(directory=place)).go()
        finally:
            outbox.close()
        refuse({os.fsdecode(path): why for path, why in sent.failed.items()})


def refuse(failed: Mapping[str, str]) -> None:
    for path, why in failed.items():
        raise NodeError(f"{path}: {why}")
