"""Answers a head's requests to move files to this node and back."""

from __future__ import annotations

from pathlib import Path

from orchestrator.common import files
from orchestrator.common.folder import Folder
from orchestrator.node.job.run_directory import PartDir, RunDir
from orchestrator.node.server.session import Refusal, ServerSession, SessionState, answers
from orchestrator.node.transfer import outputs, receive
from orchestrator.node.transfer.receive import TargetDirectory, unzip_data
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import LARGEST_LIST_BYTES
from orchestrator.protocol.requests.transfer import (
    HANDED,
    LARGEST_BATCH_BYTES,
    OF_JOB,
    STORE,
    AskJobFiles,
    CheckedOut,
    CheckOut,
    Contents,
    FilePiece,
    JobFiles,
    Lacking,
    ListPath,
    Offer,
    OutputFiles,
    Outputs,
    ReadFile,
    RemoteDir,
    parts_of_request,
)


class Moving(SessionState):
    """The transfers of this session."""

    def __init__(self, session: ServerSession) -> None:
        super().__init__(session)
        # The files that the head offered last.
        self.offered = receive.empty_target()
        # The parts whose private files wait for the start of the job.
        self.handed: dict[str, PartDir] = {}
        # The files that were listed, which the head may read.
        self.listed: set[tuple[str, str]] = set()

    def leave(self) -> None:
        """End all transfers, and discard files that no job has taken."""
        self.offered.abandon()
        for part in self.handed.values():
            receive.discard_files(part)

    def offer(self, place: RemoteDir) -> TargetDirectory:
        """Return the receiver for the manifest in the payload; end the transfer before it."""
        self.offered.abandon()
        listing = unzip_data(self.session.take_piece(), LARGEST_LIST_BYTES)
        entries = manifest.unpack_entries(listing)
        if place.kind == STORE:
            from orchestrator.node.transfer.checkout import CodeSession
            from orchestrator.node.transfer.store import ToStore

            self.offered = ToStore(self.session.of(CodeSession).store, entries, listing)
        elif place.kind == HANDED:
            run = RunDir(place.job, place.part)
            self.session.refuse_if_stopped(run)
            folder = Folder(Path(receive.waiting_place(run)), private=True, umask=0o077)
            self.offered = TargetDirectory(folder, entries)
            self.handed[run.home] = run
        elif place.kind == OF_JOB:
            from orchestrator.node.transfer import job_files

            part = PartDir(place.job, place.part)
            self.offered = job_files.target_directory(part, place, entries, self.session.umask)
        else:
            path = files.expand_home(place.directory)
            if not path.startswith("/"):
                raise ValueError(f"not an absolute path: {place.directory!r}")
            folder = Folder(Path(path), private=False, umask=self.session.umask)
            self.offered = TargetDirectory(folder, entries)
        return self.offered

    def list(self, listing: OutputFiles) -> OutputFiles:
        """Record the files of an answer: the head may read these, and no others."""
        self.listed |= {(file.place or listing.place, file.path) for file in listing.files}
        return listing


# -- to this node ------------------------------------------------------------------------------


@answers(Offer)
def offer(session: ServerSession, request: Offer) -> Lacking:
    return session.of(Moving).offer(request.into).compare(dry_run=request.dry_run)


@answers(Contents)
def contents(session: ServerSession, request: Contents) -> Lacking:
    """Write the received parts; return the files that failed."""
    offered = session.of(Moving).offered
    try:
        data = unzip_data(session.take_piece(), min(request.size, LARGEST_BATCH_BYTES) or 1)
        if len(data) != request.size:
            raise ValueError("contents of another size came")
        for part, content in parts_of_request(data):
            offered.put(part, content)
    except Exception:
        offered.abandon()
        raise
    return Lacking(failed=dict(offered.failed))


# -- code -------------------------------------------------------------------------------------


@answers(CheckOut)
def check_out(session: ServerSession, request: CheckOut) -> CheckedOut:
    from orchestrator.node.transfer.checkout import CodeSession

    return session.of(CodeSession).check_out(request)


# -- home -------------------------------------------------------------------------------------


@answers(Outputs)
def outputs_of_job(session: ServerSession, request: Outputs) -> OutputFiles:
    listing = outputs.outputs_of_job(PartDir(request.job, request.part), request)
    return session.of(Moving).list(listing)


@answers(ListPath)
def files_of_path(session: ServerSession, request: ListPath) -> OutputFiles:
    return session.of(Moving).list(outputs.files_of_path(request.path, request.directory))


@answers(ReadFile)
def read_file(session: ServerSession, request: ReadFile) -> FilePiece:
    if (request.place, request.path) not in session.of(Moving).listed:
        raise Refusal(f"no such output: {request.path!r}")
    return outputs.read_piece(request)


@answers(AskJobFiles)
def files_of_job(session: ServerSession, request: AskJobFiles) -> JobFiles:
    from orchestrator.node.transfer import job_files

    found = job_files.written_files(PartDir(request.job, request.part), request)
    moving = session.of(Moving)
    moving.listed |= {(found.roots[file.place], file.path) for file in found.files}
    return found
