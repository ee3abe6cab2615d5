"""The files that one visit moves: those that its head offers, and those between nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.common import files
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import Refusal, RoomState, Visit
from orchestrator.node.transfer import payload
from orchestrator.node.transfer.directory import TargetDirectory
from orchestrator.node.transfer.receive import FileTarget, IncomingFiles, unzip
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import LARGEST_LIST_BYTES
from orchestrator.protocol.requests.transfer import (
    HANDED,
    LARGEST_BATCH_BYTES,
    OF_JOB,
    STORE,
    AskTaken,
    Contents,
    FailedWrites,
    Give,
    Giving,
    Lacking,
    Offer,
    OutputFiles,
    Place,
    ReadFile,
    Take,
    TakeProgress,
)

if TYPE_CHECKING:
    from orchestrator.node.transfer.give import Giver
    from orchestrator.node.transfer.take import Taking

TAKEN_SECONDS = 0.5  # an answer about what is taken waits so long for its end


class Moving(RoomState):
    """Holds what this visit moves."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        # The files that the head offered last: they come from it, or from another node.
        self.offered: IncomingFiles | None = None
        self.taking: Taking | None = None
        self.giver: Giver | None = None
        self.handed: dict[str, RunDir] = {}  # what waits for the start of its job
        self.listed: set[tuple[str, str]] = set()  # files that the head knows, and may ask for

    def leave(self) -> None:
        """End all that is under way, and discard what no job took up."""
        self.end_giving()
        self.end_taking()
        for run in self.handed.values():
            payload.discard(run)

    def list(self, listing: OutputFiles) -> OutputFiles:
        """Note the files of an answer: the head may ask for these, and no others."""
        self.listed |= {(file.place or listing.place, file.path) for file in listing.files}
        return listing

    def refuse_if_not_listed(self, request: ReadFile) -> None:
        if (request.place, request.path) not in self.listed:  # walking each time takes too long
            raise Refusal(f"no such output: {request.path!r}")

    def target(self, place: Place, listing: bytes) -> FileTarget:
        """Return the place for files, with its policy; ValueError where there is none."""
        entries = manifest.unpacked(listing)
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
        if place.kind == OF_JOB:
            from orchestrator.node.transfer import job_files

            run = RunDir(place.job, place.node)
            return job_files.target(run, place, entries, self.visit.umask)
        return TargetDirectory(Path(absolute(place.directory)), entries, self.visit.umask)

    # -- from the head -----------------------------------------------------------------------

    def offer(self, request: Offer, packed: bytes | bytearray) -> Lacking:
        """Say what is lacking of the files that are offered."""
        self.end_taking()
        listing = unzip(packed, LARGEST_LIST_BYTES)
        self.offered = IncomingFiles(self.target(request.into, listing))
        return self.offered.compare(dry_run=request.dry_run)

    def contents(self, request: Contents, packed: bytes | bytearray) -> FailedWrites:
        """Write what came."""
        offered = self.offered
        if offered is None or request.size > LARGEST_BATCH_BYTES:
            raise ValueError("contents that were not offered")
        try:
            data = unzip(packed, max(1, request.size))
            if len(data) != request.size:
                raise ValueError("contents of another size came")
            offered.put_all(data)
        except Exception:
            offered.abandon()
            raise
        if request.last:
            offered.abandon()  # what has not come by now
        return FailedWrites(failed=dict(offered.failed))

    # -- from node to node -------------------------------------------------------------------

    def give(self, request: Give, packed: bytes | bytearray) -> Giving:
        """Listen for nodes that take the files that were offered here, or files of this node."""
        from orchestrator.node.transfer.give import Giver

        if request.here is not None:
            listing = unzip(packed, LARGEST_LIST_BYTES)
            self.offered = IncomingFiles(self.target(request.here, listing), all_here=True)
        self.end_giving()
        self.giver = Giver(request.token, self.last_offered, request.seconds)
        return Giving(port=self.giver.port)

    def end_giving(self) -> None:
        if self.giver is not None:
            self.giver.close()
            self.giver = None

    def take(self, request: Take) -> None:
        """Begin to take from another node what is lacking of the files that were offered."""
        from orchestrator.node.transfer.take import Taking

        offered = self.last_offered()
        if self.taking is not None:
            self.taking.end()
        self.taking = Taking(offered, request.giver)

    def taken(self, request: AskTaken) -> TakeProgress:
        """Say how far that is."""
        if self.taking is None:
            raise ValueError("nothing is being taken here")
        if request.end:
            self.taking.end()
        return self.taking.progress(TAKEN_SECONDS)

    def last_offered(self) -> IncomingFiles:
        if self.offered is None:
            raise ValueError("nothing was offered here")
        return self.offered

    def end_taking(self) -> None:
        """See that nothing more is written of what was offered before."""
        if self.taking is not None:
            self.taking.end()
        if self.offered is not None:
            self.offered.abandon()


def absolute(directory: str) -> str:
    path = files.expanded(directory)
    if not path.startswith("/"):
        raise ValueError(f"not an absolute path: {directory!r}")
    return path
