"""Answers what a head asks about files that programs saved."""

from __future__ import annotations

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.saved import look, take
from orchestrator.node.server.visit import Visit, answers
from orchestrator.node.transfer.moving import Moving
from orchestrator.node.transfer.requests import TransferVisit
from orchestrator.protocol.requests.request import Nothing
from orchestrator.protocol.requests.saved import AskSaved, Saved, TakeSaved


@answers(AskSaved)
def saved(visit: Visit, request: AskSaved) -> Saved:
    answer = look.saved(RunDir(request.job, request.node), request.given)
    listed = {(answer.roots[file.place], file.path) for file in answer.files}
    visit.of(TransferVisit).listed |= listed
    return answer


@answers(TakeSaved)
def take_saved(visit: Visit, request: TakeSaved) -> Nothing:
    visit.of(Moving).begin_taking(lambda: take.take(request, visit.umask))
    return Nothing()
