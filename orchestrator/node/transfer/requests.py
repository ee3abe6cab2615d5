"""Answers what a head asks to move files: from it, from node to node, and home."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import Refusal, RoomState, Visit, answers
from orchestrator.node.transfer import outputs, payload
from orchestrator.node.transfer.checkout import CodeVisit, compare
from orchestrator.node.transfer.store import Incomplete
from orchestrator.protocol.requests.request import LACKING, Nothing
from orchestrator.protocol.requests.transfer import (
    AskTaken,
    CheckedOut,
    CheckOut,
    Checkpoints,
    Compare,
    Compared,
    Contents,
    EndGiving,
    EndTaking,
    Files,
    GiveFiles,
    GiveTree,
    Giving,
    Lacking,
    MakeRoom,
    OfferFiles,
    OfferTree,
    Output,
    OutputFiles,
    OutputPiece,
    Outputs,
    OutputSum,
    Parcel,
    Room,
    SumOutput,
    TakeFiles,
    Taken,
    TakeTree,
    WantedFiles,
    WriteFile,
)

if TYPE_CHECKING:
    from orchestrator.node.transfer.arrivals import Arrivals
    from orchestrator.node.transfer.give import Giver, Source
    from orchestrator.node.transfer.take import Taking

TAKEN_SECONDS = 0.5  # an answer about what is taken waits so long for its end


class TransferVisit(RoomState):
    """The files that this visit moves."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit)
        self.parcels: dict[str, RunDir] = {}  # that wait for the start of their jobs
        self.rooms: list[RunDir] = []  # of jobs that checkpoints were brought for
        self.listed: set[tuple[str, str]] = set()  # files that the head knows, and may ask for
        self.arrivals: Arrivals | None = None  # from this head
        self.givers: list[Giver] = []  # what other nodes may fetch here
        self.taking: Taking | None = None  # from another node

    def leave(self) -> None:
        for run in self.parcels.values():
            payload.discard(run)
        for run in self.rooms:
            outputs.discard(run)
        self.end_giving()
        self.end_taking()

    def give(self, source: Source, request: GiveTree | GiveFiles) -> Giving:
        from orchestrator.node.transfer.give import Giver

        self.givers.append(Giver(request.token, source, request.seconds))
        return Giving(port=self.givers[-1].port)

    def end_giving(self) -> None:
        while self.givers:
            self.givers.pop().close()

    def end_taking(self) -> None:
        if self.taking is not None:
            self.taking.end()

    def list(self, listing: OutputFiles) -> OutputFiles:
        """Note the files of an answer: the head may ask for these, and no others."""
        self.listed |= {(file.place or listing.place, file.path) for file in listing.files}
        return listing

    def refuse_if_not_listed(self, request: Output | SumOutput) -> None:
        if (request.place, request.path) not in self.listed:  # walking each time takes too long
            raise Refusal(f"no such output: {request.path!r}")


# -- code -------------------------------------------------------------------------------------


@answers(CheckOut)
def check_out(visit: Visit, request: CheckOut) -> CheckedOut:
    try:
        return visit.of(CodeVisit).check_out(request)
    except Incomplete:
        raise Refusal("contents of the tree are lacking", LACKING) from None


@answers(OfferTree)
def offer_tree(visit: Visit, request: OfferTree) -> Lacking:
    return visit.of(CodeVisit).offer(request.tree, visit.take_piece())


@answers(Contents)
def contents(visit: Visit, request: Contents) -> Nothing:
    return visit.of(CodeVisit).contents(request.tree, request.size, visit.take_piece())


@answers(Compare)
def compared(visit: Visit, request: Compare) -> Compared:
    return compare(request.directory, visit.take_piece())


# -- from the head ----------------------------------------------------------------------------


@answers(Parcel)
def parcel(visit: Visit, request: Parcel) -> Nothing:
    run = RunDir(request.job, request.node)
    visit.of(TransferVisit).parcels[run.path] = run
    visit.refuse_if_stopped(run)
    payload.keep(run, request.name, visit.take_piece())
    return Nothing()


@answers(OfferFiles)
def offer_files(visit: Visit, request: OfferFiles) -> WantedFiles:
    from orchestrator.node.transfer.arrivals import Arrivals

    state = visit.of(TransferVisit)
    if state.arrivals is not None:
        state.arrivals.close()
    state.arrivals = Arrivals(request.directory, visit.take_piece(), visit.umask)
    return state.arrivals.compare(dry_run=request.dry_run)


@answers(WriteFile)
def write_file(visit: Visit, request: WriteFile) -> Nothing:
    piece, arrivals = visit.take_piece(), visit.of(TransferVisit).arrivals
    if arrivals is None:
        raise Refusal("a file that was not offered")
    arrivals.write(request, piece)
    return Nothing()


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


@answers(GiveTree)
def give_tree(visit: Visit, request: GiveTree) -> Giving:
    from orchestrator.node.transfer import forward

    source = forward.Given(visit.of(CodeVisit).store, request.tree)
    return visit.of(TransferVisit).give(source, request)


@answers(GiveFiles)
def give_files(visit: Visit, request: GiveFiles) -> Giving:
    from orchestrator.node.transfer.files import Given

    source = Given(request.directory, request.files, request.coming)
    return visit.of(TransferVisit).give(source, request)


@answers(EndGiving)
def end_giving(visit: Visit, request: EndGiving) -> Nothing:
    visit.of(TransferVisit).end_giving()
    return Nothing()


@answers(TakeTree)
def take_tree(visit: Visit, request: TakeTree) -> Nothing:
    from orchestrator.node.transfer import forward

    state = visit.of(TransferVisit)
    state.end_taking()
    state.taking = forward.take(visit.of(CodeVisit).store, request)
    return Nothing()


@answers(TakeFiles)
def take_files(visit: Visit, request: TakeFiles) -> Nothing:
    from orchestrator.node.transfer import files

    state = visit.of(TransferVisit)
    state.end_taking()
    state.taking = files.take(request, visit.umask)
    return Nothing()


@answers(AskTaken)
def ask_taken(visit: Visit, request: AskTaken) -> Taken:
    taking = visit.of(TransferVisit).taking
    if taking is None:
        raise Refusal("nothing is being taken here")
    return taking.progress(TAKEN_SECONDS)


@answers(EndTaking)
def end_taking(visit: Visit, request: EndTaking) -> Nothing:
    visit.of(TransferVisit).end_taking()
    return Nothing()
