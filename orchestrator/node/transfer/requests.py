"""Answers what a head asks to move files: from it, from node to node, and home."""

from __future__ import annotations

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import Refusal, RoomState, Visit, answers
from orchestrator.node.transfer import outputs
from orchestrator.node.transfer.checkout import CodeVisit
from orchestrator.node.transfer.moving import Moving
from orchestrator.node.transfer.store import Incomplete
from orchestrator.protocol.requests.request import LACKING, Nothing
from orchestrator.protocol.requests.transfer import (
    AskTaken,
    CheckedOut,
    CheckOut,
    Checkpoints,
    Contents,
    EndGiving,
    Files,
    Give,
    GiveFiles,
    Giving,
    Lacking,
    MakeRoom,
    Offer,
    Output,
    OutputFiles,
    OutputPiece,
    Outputs,
    OutputSum,
    Room,
    SumOutput,
    Take,
    TakeFiles,
    Taken,
    Written,
)


class TransferVisit(RoomState):
    """What this visit knows of the files that are fetched, or brought for a job."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.rooms: list[RunDir] = []  # of jobs that checkpoints were brought for
        self.listed: set[tuple[str, str]] = set()  # files that the head knows, and may ask for

    def leave(self) -> None:
        for run in self.rooms:
            outputs.discard(run)

    def list(self, listing: OutputFiles) -> OutputFiles:
        """Note the files of an answer: the head may ask for these, and no others."""
        self.listed |= {(file.place or listing.place, file.path) for file in listing.files}
        return listing

    def refuse_if_not_listed(self, request: Output | SumOutput) -> None:
        if (request.place, request.path) not in self.listed:  # walking each time takes too long
            raise Refusal(f"no such output: {request.path!r}")


# -- to this node, and from it to others ------------------------------------------------------


@answers(Offer)
def offer(visit: Visit, request: Offer) -> Lacking:
    return visit.of(Moving).offer(request, visit.take_piece())


@answers(Contents)
def contents(visit: Visit, request: Contents) -> Written:
    return visit.of(Moving).contents(request, visit.take_piece())


@answers(Give)
def give(visit: Visit, request: Give) -> Giving:
    return visit.of(Moving).give(request, visit.take_piece())


@answers(EndGiving)
def end_giving(visit: Visit, request: EndGiving) -> Nothing:
    visit.of(Moving).end_giving()
    return Nothing()


@answers(Take)
def take(visit: Visit, request: Take) -> Nothing:
    visit.of(Moving).take(request)
    return Nothing()


@answers(AskTaken)
def ask_taken(visit: Visit, request: AskTaken) -> Taken:
    return visit.of(Moving).taken(request)


# -- code -------------------------------------------------------------------------------------


@answers(CheckOut)
def check_out(visit: Visit, request: CheckOut) -> CheckedOut:
    try:
        return visit.of(CodeVisit).check_out(request)
    except Incomplete:
        raise Refusal("contents of the tree are lacking", LACKING) from None


@answers(MakeRoom)
def make_room(visit: Visit, request: MakeRoom) -> Room:
    run = RunDir(request.job, request.node)
    visit.of(TransferVisit).rooms.append(run)
    return Room(directory=outputs.room_for(run))


# -- home -------------------------------------------------------------------------------------


@answers(Outputs)
def outputs_of_job(visit: Visit, request: Outputs) -> OutputFiles:
    run = RunDir(request.job, request.node)
    listing = outputs.of_job(run, checkpoints=request.checkpoints, beside=request.beside)
    return visit.of(TransferVisit).list(listing)


@answers(Files)
def files(visit: Visit, request: Files) -> OutputFiles:
    return visit.of(TransferVisit).list(outputs.of_path(request.path, request.directory))


@answers(Checkpoints)
def checkpoints(visit: Visit, request: Checkpoints) -> OutputFiles:
    return visit.of(TransferVisit).list(outputs.of_checkpoints(request))


@answers(Output)
def output(visit: Visit, request: Output) -> OutputPiece:
    visit.of(TransferVisit).refuse_if_not_listed(request)
    return OutputPiece(data=outputs.piece(request.place, request.path, request.offset))


@answers(SumOutput)
def sum_output(visit: Visit, request: SumOutput) -> OutputSum:
    visit.of(TransferVisit).refuse_if_not_listed(request)
    return outputs.digest(request)


# -- from node to node ------------------------------------------------------------------------


@answers(GiveFiles)
def give_files(visit: Visit, request: GiveFiles) -> Giving:
    from orchestrator.node.transfer.files import Given

    source = Given(request.directory, request.files)
    return visit.of(Moving).give_from(source, request.token, request.seconds)


@answers(TakeFiles)
def take_files(visit: Visit, request: TakeFiles) -> Nothing:
    from orchestrator.node.transfer import files

    visit.of(Moving).begin_taking(lambda: files.take(request, visit.umask))
    return Nothing()
