"""Answers what a head asks to move files: from it, from node to node, and home."""

from __future__ import annotations

import os

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.visit import Refusal, Visit, answers
from orchestrator.node.transfer import job_files, outputs
from orchestrator.node.transfer.code.checkout import CodeVisit
from orchestrator.node.transfer.code.store import Incomplete
from orchestrator.node.transfer.moving import Moving
from orchestrator.protocol.requests.request import LACKING, NO_PART, Nothing
from orchestrator.protocol.requests.transfer import (
    AskJobFiles,
    AskTaken,
    CheckedOut,
    CheckOut,
    Contents,
    EndGiving,
    FailedWrites,
    FilePiece,
    Give,
    Giving,
    JobFiles,
    Lacking,
    ListPath,
    Offer,
    OutputFiles,
    Outputs,
    ReadFile,
    Take,
    TakeProgress,
)

# -- to this node, and from it to others ------------------------------------------------------


@answers(Offer)
def offer(visit: Visit, request: Offer) -> Lacking:
    return visit.of(Moving).offer(request, visit.take_piece())


@answers(Contents)
def contents(visit: Visit, request: Contents) -> FailedWrites:
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
def ask_taken(visit: Visit, request: AskTaken) -> TakeProgress:
    return visit.of(Moving).taken(request)


# -- code -------------------------------------------------------------------------------------


@answers(CheckOut)
def check_out(visit: Visit, request: CheckOut) -> CheckedOut:
    try:
        return visit.of(CodeVisit).check_out(request)
    except Incomplete:
        raise Refusal("contents of the tree are lacking", LACKING) from None


# -- home -------------------------------------------------------------------------------------


@answers(Outputs)
def outputs_of_job(visit: Visit, request: Outputs) -> OutputFiles:
    run = RunDir(request.job, request.node)
    listing = outputs.of_job(run, checkpoints=request.checkpoints, beside=request.beside)
    return visit.of(Moving).list(listing)


@answers(ListPath)
def files(visit: Visit, request: ListPath) -> OutputFiles:
    return visit.of(Moving).list(outputs.of_path(request.path, request.directory))


@answers(ReadFile)
def read_file(visit: Visit, request: ReadFile) -> FilePiece:
    visit.of(Moving).refuse_if_not_listed(request)
    return outputs.read(request)


# -- what the master of a job wrote ---------------------------------------------------------------


@answers(AskJobFiles)
def files_of_job(visit: Visit, request: AskJobFiles) -> JobFiles:
    answer = job_files.written(part_of_job(request.job, request.node), request)
    visit.of(Moving).listed |= {(answer.roots[file.place], file.path) for file in answer.files}
    return answer


def part_of_job(job: str, node: int) -> RunDir:
    run = RunDir(job, node)
    if not os.path.exists(run.spec):
        raise Refusal("it has lost its part of the job", NO_PART)
    return run
