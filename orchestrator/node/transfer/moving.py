"""The files that one visit moves: those that its head offers, and those between nodes."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from orchestrator.common import files
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import Refusal, RoomState, Visit
from orchestrator.node.transfer import outputs, payload
from orchestrator.node.transfer.directory import Directory
from orchestrator.node.transfer.receive import Incoming, Target, unzip
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import LARGEST_LIST_BYTES, Entry
from orchestrator.protocol.requests.request import LACKING
from orchestrator.protocol.requests.transfer import (
    HANDED,
    LARGEST_BATCH_BYTES,
    PRIVATE,
    STORE,
    AskTaken,
    Contents,
    Give,
    Giving,
    Lacking,
    Offer,
    Output,
    OutputFiles,
    Place,
    SumOutput,
    Take,
    Taken,
    Written,
)

if TYPE_CHECKING:
    from orchestrator.node.transfer.give import Giver
    from orchestrator.node.transfer.take import Taking

TAKEN_SECONDS = 0.5  # an answer about what is taken waits so long for its end
LOOK_SECONDS = 0.05  # for a manifest that is still to come from another node


class Moving(RoomState):
    """Holds what this visit moves, whoever asks."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.incoming: dict[str, Incoming] = {}  # by the digest of the manifest
        self.offered: Incoming | None = None  # last
        self.givers: dict[str, Giver] = {}  # of a manifest that other nodes may fetch here
        self.taking: Taking | None = None  # from another node
        self.handed: dict[str, RunDir] = {}  # what waits for the start of its job
        self.reader = outputs.Reader()
        self.listed: set[tuple[str, str]] = set()  # files that the head knows, and may ask for

    def leave(self) -> None:
        """End all that is under way, and discard what no job took up."""
        for digest in list(self.givers):
            self.end_giving(digest)
        if self.taking is not None:
            self.taking.end()
        for incoming in self.incoming.values():
            incoming.abandon()
        for run in self.handed.values():
            payload.discard(run)

    def list(self, listing: OutputFiles) -> OutputFiles:
        """Note the files of an answer: the head may ask for these, and no others."""
        self.listed |= {(file.place or listing.place, file.path) for file in listing.files}
        return listing

    def refuse_if_not_listed(self, request: Output | SumOutput) -> None:
        if (request.place, request.path) not in self.listed:  # walking each time takes too long
            raise Refusal(f"no such output: {request.path!r}")

    def target(self, place: Place, entries: Sequence[Entry], listing: bytes) -> Target:
        """Return the place for files, with its policy; ValueError where there is none."""
        if place.kind == STORE:
            from orchestrator.node.transfer.code.checkout import CodeVisit
            from orchestrator.node.transfer.code.store import ToStore

            return ToStore(self.visit.of(CodeVisit).store, entries, listing)
        if place.kind == HANDED:
            run = RunDir(place.job, place.node)
            self.visit.refuse_if_stopped(run)
            target = payload.place(run, entries)
            self.handed[run.path] = run
            return target
        root, private = Path(absolute(place.directory)), place.kind == PRIVATE
        return Directory(root, entries, self.visit.umask, private=private, of_job=private)

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
        listing = unzip(packed, LARGEST_LIST_BYTES)
        if request.before:
            listing = self.changed(request, listing)
        self.offered = self.begin(request.into, listing)
        return self.offered.compare(dry_run=request.dry_run)

    def changed(self, request: Offer, change: bytes) -> bytes:
        """Return the list that a difference makes of the one that the store has."""
        from orchestrator.node.transfer.code.checkout import CodeVisit
        from orchestrator.node.transfer.code.store import Incomplete

        with contextlib.suppress(Incomplete):
            listing = manifest.applied(
                self.visit.of(CodeVisit).store.listing(request.before), change
            )
            if manifest.digest_of(listing) == request.after:
                return listing
        raise Refusal("the list before is not here", LACKING)

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
        if request.last:
            offered.abandon()  # what has not come by now
        return Written(failed=dict(offered.failed))

    # -- from node to node -------------------------------------------------------------------

    def give(self, request: Give, packed: bytes | bytearray) -> Giving:
        """Listen for nodes that take the files of a manifest."""
        from orchestrator.node.transfer.give import Giver

        if packed:  # files that are here
            listing = unzip(packed, LARGEST_LIST_BYTES)
            target = self.target(request.place, manifest.unpacked(listing), listing)
            self.incoming[manifest.digest_of(listing)] = Incoming(target, listing, all_here=True)
        source = Coming(self.incoming, request.manifest)
        self.end_giving(request.manifest)
        giver = self.givers[request.manifest] = Giver(request.token, source, request.seconds)
        return Giving(port=giver.port)

    def end_giving(self, digest: str) -> None:
        if digest in self.givers:
            self.givers.pop(digest).close()

    def take(self, request: Take) -> None:
        """Begin to take the files of a manifest from another node."""
        from orchestrator.node.transfer import take

        self.offered = None
        if self.taking is not None:
            self.taking.end()  # nothing more is written of what was taken before
        self.taking = take.take(request, lambda listing: self.begin(request.into, listing))

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
