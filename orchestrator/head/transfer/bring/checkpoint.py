"""Finds what nodes have of a checkpoint, and gives them what they lack, each file checked."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.common.errors import NodeError
from orchestrator.common.text import Say
from orchestrator.head.connect.channel import Declined
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer.fetch.fetch import plain
from orchestrator.head.transfer.fetch.gathered import holding_of
from orchestrator.head.transfer.fetch.pull import LIST_SECONDS, content
from orchestrator.head.transfer.peer import MOST_CALLERS, QUICK_SECONDS, NodeTree, Peer
from orchestrator.head.transfer.schedule import Rules
from orchestrator.head.transfer.spread import ServedFromHere, Spread, exchange
from orchestrator.protocol.manifest import FILE, Entry
from orchestrator.protocol.requests.transfer import (
    PRIVATE,
    Checkpoints,
    MakeRoom,
    Place,
)
from orchestrator.records import checkpoint_manifest, checkpoint_store
from orchestrator.records.checkpoint_parts import Delivery, Holding, Version

Source = tuple[int, str]  # who gives, and its directory
Parcel = tuple[Source, tuple[Entry, ...]]
STAR = Rules(width=MOST_CALLERS, streams=False, passes_on=False)  # each takes a share of its own


@dataclass(eq=False)
class Partner(Peer):
    """One node, which may not be connected to yet."""

    login: Login | None = None
    job: tuple[str, int] = ("", 0)  # its part of the job that resumes
    place: str = ""  # that its files are below
    manifests: dict[str, bytes] = field(default_factory=dict)  # by their checksums

    def checkpoints(self, question: Checkpoints, number: int) -> list[Holding]:
        """Ask the node what it has, and number it in the answer."""
        with self.lock:
            listing = self.open.ask(question, LIST_SECONDS)
            self.place = listing.place
            files = [file for file in listing.files if plain(file.path)]
            sizes = {file.path: file.size for file in files}
            holdings = []
            for file in files:
                directory, _, name = file.path.rpartition("/")
                if name != checkpoint_manifest.NAME or not directory:
                    continue
                try:
                    text = content(self.open, self.place, file)
                    manifest = checkpoint_manifest.parse(text)
                except (Declined, ValueError, RecursionError):
                    continue  # it was pruned meanwhile, cannot be read, or is none
                where = f"{self.place}/{directory}"
                holding = holding_of(number, directory, text, manifest, sizes, where)
                self.manifests[holding.manifest] = text
                holdings.append(holding)
        return holdings


@dataclass
class Missing:
    """Brings what nodes lack of one version of a checkpoint, in two goes: its manifest is last."""

    partners: Sequence[Partner]
    deliveries: Sequence[Delivery]
    step: int
    version: Version
    into: str  # a directory of checkpoints on the nodes; without one it is that of their job
    say: Say
    stopped: Callable[[], None]  # raises an error when nobody wants it any more

    def bring(self) -> None:
        """Bring all of it; an error says what could not be brought."""
        lacking: dict[tuple[Source, int], list[Entry]] = defaultdict(list)
        for part in self.deliveries:
            there = next(h.path for h in self.version.holdings
                         if h.node == part.source and part.name in h.here)  # fmt: skip
            entry = entry_of(part.name, part.record.size, part.record.sha256)
            lacking[(part.source, there), part.target].append(entry)
        last = {target: source for source, target in lacking}
        self.places = {target: self.place_on(target) for target in last}
        files: dict[Parcel, list[int]] = defaultdict(list)
        manifests: dict[Parcel, list[int]] = defaultdict(list)
        for (source, target), entries in lacking.items():
            files[source, tuple(entries)].append(target)
        for target, source in last.items():
            manifests[source, (self.manifest(source[0]),)].append(target)
        total = sum(part.record.size for part in self.deliveries)
        progress = Progress("bringing the checkpoint", total)
        served = ServedFromHere(self.say, "the files come through this machine")
        for parcels in (files, manifests):
            self.go(parcels, progress, served)
        served.sum_up()

    def go(
        self, parcels: Mapping[Parcel, Sequence[int]], progress: Progress, served: ServedFromHere
    ) -> None:
        spreads = []
        for ((source, there), entries), targets in parcels.items():
            giver = self.partners[source]
            within = there.removeprefix(f"{giver.place}/")
            tree = NodeTree.at(giver, giver.place, within, entries)
            takers = {
                self.partners[target]: Place(kind=PRIVATE, directory=self.places[target])
                for target in targets
            }
            seen = progress.add
            spreads.append(Spread.from_node(tree, takers, served, STAR, self.stopped, seen))
        for peer, error in exchange(spreads, progress).items():
            raise NodeError(f"{peer.name}: {error.what}", error.fix)

    def manifest(self, source: int) -> Entry:
        checksum = self.version.holdings[0].manifest
        size = len(self.partners[source].manifests[checksum])
        return entry_of(checkpoint_manifest.NAME, size, checksum)

    def place_on(self, target: int) -> str:
        """Return where a node has its part of this checkpoint, or is to have it."""
        for holding in self.version.holdings:
            if holding.node == target:
                return holding.path
        into = self.into
        if not into:
            job, node = self.partners[target].job
            request = MakeRoom(job=job, node=node)
            into = self.partners[target].ask(request, QUICK_SECONDS).directory
        return str(checkpoint_store.final(Path(into), self.step))


def entry_of(name: str, size: int, total: str) -> Entry:
    return Entry(os.fsencode(name), FILE, 0o600, size, total.encode())
