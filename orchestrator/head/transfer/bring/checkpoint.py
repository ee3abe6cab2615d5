"""Bring what nodes lack of one checkpoint, each file checked: its manifest comes last."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import NodeError
from orchestrator.common.text import Say
from orchestrator.head.screen.progress import Progress
from orchestrator.head.transfer.bring.partner import Partner
from orchestrator.head.transfer.peer import MOST_CALLERS, QUICK_SECONDS, NodeTree
from orchestrator.head.transfer.schedule import Rules
from orchestrator.head.transfer.send import Outbox, Sender
from orchestrator.head.transfer.spread import Origin, ServedFromHere, Spread, exchange
from orchestrator.protocol.manifest import FILE, Entry
from orchestrator.protocol.requests.transfer import PRIVATE, MakeRoom, Place
from orchestrator.records import checkpoint_manifest, checkpoint_store
from orchestrator.records.checkpoint_parts import Delivery, Version

Way = tuple[int, int, str]  # who takes, who gives, and its directory
STAR = Rules(width=MOST_CALLERS, streams=False, passes_on=False)  # each takes a share of its own


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
        ways: dict[Way, list[Entry]] = {}
        for part in self.deliveries:
            there = next(h.path for h in self.version.holdings
                         if h.node == part.source and part.name in h.here)  # fmt: skip
            entry = entry_of(part.name, part.record.size, part.record.sha256)
            ways.setdefault((part.target, part.source, there), []).append(entry)
        last = {way[0]: way for way in ways}
        self.places = {target: self.place_on(target) for target in last}
        progress = Progress(
            "bringing the checkpoint", sum(part.record.size for part in self.deliveries)
        )
        served = ServedFromHere(self.say, "the files come through this machine")
        for files in (ways, {way: [self.manifest(way[1])] for way in last.values()}):
            self.go(files, progress, served)
        served.sum_up()

    def go(
        self, files: Mapping[Way, Sequence[Entry]], progress: Progress, served: ServedFromHere
    ) -> None:
        spreads = []
        for (target, source, there), entries in sorted(files.items()):
            giver = self.partners[source]
            within = there.removeprefix(f"{giver.place}/")
            outbox = Outbox(NodeTree.at(giver, giver.place, within, entries))
            into = Place(kind=PRIVATE, directory=self.places[target])
            sender = Sender(outbox, self.partners[target], into, progress.add)
            spreads.append(Spread([sender], served, Origin(giver, there), STAR, self.stopped))
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
