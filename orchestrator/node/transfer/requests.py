"""Answers what a head asks to move files: from it, from node to node, and home."""

from __future__ import annotations

import os

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import Refusal, Visit, answers
from orchestrator.node.transfer import outputs
from orchestrator.node.transfer.code.checkout import CodeVisit
from orchestrator.node.transfer.code.store import Incomplete
from orchestrator.node.transfer.moving import Moving
from orchestrator.protocol.manifest import is_inside
from orchestrator.protocol.requests.request import LACKING, NO_PART, Nothing
from orchestrator.protocol.requests.transfer import (
    AskSaved,
    AskTaken,
    CheckedOut,
    CheckOut,
    Checkpoints,
    Contents,
    EndGiving,
    Files,
    Give,
    Giving,
    Lacking,
    MakeRoom,
    Offer,
    Output,
    OutputFiles,
    OutputPiece,
    Outputs,
    OutputSum,
    RemoveCopies,
    Room,
    Saved,
    SumOutput,
    Take,
    Taken,
    Written,
)

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
    visit.of(Moving).end_giving(request.manifest)
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
    visit.of(Moving).rooms.append(run)
    return Room(directory=outputs.room_for(run))


# -- home -------------------------------------------------------------------------------------


@answers(Outputs)
def outputs_of_job(visit: Visit, request: Outputs) -> OutputFiles:
    run = RunDir(request.job, request.node)
    listing = outputs.of_job(run, checkpoints=request.checkpoints, beside=request.beside)
    return visit.of(Moving).list(listing)


@answers(Files)
def files(visit: Visit, request: Files) -> OutputFiles:
    return visit.of(Moving).list(outputs.of_path(request.path, request.directory))


@answers(Checkpoints)
def checkpoints(visit: Visit, request: Checkpoints) -> OutputFiles:
    return visit.of(Moving).list(outputs.of_checkpoints(request))


@answers(Output)
def output(visit: Visit, request: Output) -> OutputPiece:
    visit.of(Moving).refuse_if_not_listed(request)
    return visit.of(Moving).reader.piece(request)


@answers(SumOutput)
def sum_output(visit: Visit, request: SumOutput) -> OutputSum:
    visit.of(Moving).refuse_if_not_listed(request)
    return visit.of(Moving).reader.sum(request)


# -- what programs saved ----------------------------------------------------------------------


@answers(AskSaved)
def saved(visit: Visit, request: AskSaved) -> Saved:
    from orchestrator.node.transfer.saved import listing

    run = RunDir(request.job, request.node)
    if not os.path.exists(run.spec):
        raise Refusal("it has lost its part of the job", NO_PART)
    answer = listing.saved(run, request.outputs)
    visit.of(Moving).listed |= {(answer.roots[file.place], file.path) for file in answer.files}
    return answer


@answers(RemoveCopies)
def remove_copies(visit: Visit, request: RemoveCopies) -> Nothing:
    from orchestrator.node.transfer.saved.place import CopiesTarget

    if not all(is_inside(os.fsencode(path)) for path in request.paths):
        raise ValueError("a path that leads out of the directory")
    CopiesTarget(request.place, (), visit.umask).drop(request.paths)
    return Nothing()
