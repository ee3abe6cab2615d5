"""The files that one visit moves: those that its head offers, and those between nodes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from orchestrator.common import files
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import RoomState, Visit
from orchestrator.node.transfer import payload
from orchestrator.node.transfer.directory import Directory
from orchestrator.node.transfer.receive import Incoming, Target, unzip
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import LARGEST_LIST_BYTES, Entry
from orchestrator.protocol.requests.transfer import (
    HANDED,
    LARGEST_BATCH_BYTES,
    STORE,
    AskTaken,
    Contents,
    Give,
    Giving,
    Lacking,
    Offer,
    Place,
    Take,
    Taken,
    Written,
)

if TYPE_CHECKING:
    from orchestrator.node.transfer.give import Giver, Source
    from orchestrator.node.transfer.take import Taking

TAKEN_SECONDS = 0.5  # an answer about what is taken waits so long for its end
LOOK_SECONDS = 0.05  # for a manifest that is still to come from another node


class Moving(RoomState):
    """What this visit moves, whoever asks."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.incoming: dict[str, Incoming] = {}  # by the digest of the manifest
        self.offered: Incoming | None = None  # last
        self.givers: list[Giver] = []  # what other nodes may fetch here
        self.taking: Taking | None = None  # from another node
        self.handed: dict[str, RunDir] = {}  # what waits for the start of its job

    def leave(self) -> None:
        """End all that is under way, and discard what no job took up."""
        self.end_giving()
        if self.taking is not None:
            self.taking.end()
        for incoming in self.incoming.values():
            incoming.abandon()
        for run in self.handed.values():
            payload.discard(run)

    def target(self, place: Place, entries: Sequence[Entry], listing: bytes) -> Target:
        """Return the place for files, with its policy; ValueError where there is none."""
        if place.kind == STORE:
            from orchestrator.node.transfer.checkout import CodeVisit
            from orchestrator.node.transfer.store import ToStore

            return ToStore(self.visit.of(CodeVisit).store, entries, listing)
        if place.kind == HANDED:
            run = RunDir(place.job, place.node)
            self.visit.refuse_if_stopped(run)
            target = payload.place(run, entries)
            self.handed[run.path] = run
            return target
        return Directory(Path(absolute(place.directory)), entries, self.visit.umask)

    def begin(self, place: Place, listing: bytes) -> Incoming:
        """Await the files of a manifest."""
        target = self.target(place, manifest.unpacked(listing), listing)
        before = self.incoming.get(digest := manifest.digest_of(listing))
        if before is not None:
            before.abandon()
        self.incoming[digest] = incoming = Incoming(target, listing)
        return incoming

    # -- from the head -----------------------------------------------------------------------

    def offer(self, request: Offer, packed: bytes | bytearray) -> Lacking:
        """Say what is lacking of the files that are offered."""
        if self.offered is not None:
            self.offered.abandon()
        self.offered = self.begin(request.into, unzip(packed, LARGEST_LIST_BYTES))
        return self.offered.compare(dry_run=request.dry_run)

    def contents(self, request: Contents, packed: bytes | bytearray) -> Written:
        """Write what came; the answer to the last request says that all is written."""
        offered = self.offered
        if offered is None or request.size > LARGEST_BATCH_BYTES:
            raise ValueError("contents that nobody expects")
        try:
            data = zlib.decompress(packed, bufsize=max(1, request.size))
            if len(data) != request.size:
                raise ValueError("contents of another size came")
            offered.take_batch(data, last=request.last)
        except zlib.error as error:
            offered.abandon()
            raise ValueError(f"contents were damaged on their way: {error}") from None
        except Exception:
            offered.abandon()
            raise
        return Written(failed=dict(offered.failed))

    # -- from node to node -------------------------------------------------------------------

    def give(self, request: Give, packed: bytes | bytearray) -> Giving:
        """Listen for nodes that take the files of a manifest."""
        if packed:  # files that are here
            listing = unzip(packed, LARGEST_LIST_BYTES)
            target = self.target(request.place, manifest.unpacked(listing), listing)
            self.incoming[manifest.digest_of(listing)] = Incoming(target, listing, all_here=True)
        source = Coming(self.incoming, request.manifest)
        return self.give_from(source, request.token, request.seconds)

    def give_from(self, source: Source, token: str, seconds: float) -> Giving:
        from orchestrator.node.transfer.give import Giver

        self.givers.append(Giver(token, source, seconds))
        return Giving(port=self.givers[-1].port)

    def end_giving(self) -> None:
        while self.givers:
            self.givers.pop().close()

    def take(self, request: Take) -> None:
        """Begin to take the files of a manifest from another node."""
        from orchestrator.node.transfer import take

        self.offered = None
        into = request.into
        self.begin_taking(lambda: take.take(request, lambda listing: self.begin(into, listing)))

    def begin_taking(self, begin: Callable[[], Taking]) -> None:
        """Begin with this, once nothing more is written of what was taken before."""
        if self.taking is not None:
            self.taking.end()
        self.taking = begin()

    def taken(self, request: AskTaken) -> Taken:
        """Say how far that is."""
        if self.taking is None:
            raise ValueError("nothing is being taken here")
        if request.end:
            self.taking.end()
        return self.taking.progress(TAKEN_SECONDS)


class Coming:
    """The files of a manifest that may still be on its own way to this node."""

    def __init__(self, incoming: dict[str, Incoming], digest: str) -> None:
        self.incoming, self.digest = incoming, digest

    def open(self, name: str) -> BinaryIO | None:
        known = self.incoming.get(self.digest)
        return known.open(name) if known is not None else None

    def wait(self, seconds: float) -> None:
        known = self.incoming.get(self.digest)
        if known is None:
            time.sleep(min(seconds, LOOK_SECONDS))
        else:
            known.wait(seconds)


def absolute(directory: str) -> str:
    path = files.expanded(directory)
    if not path.startswith("/"):
        raise ValueError(f"not an absolute path: {directory!r}")
    return path
