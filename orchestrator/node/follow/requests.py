"""Answers what a head asks about a job that runs or ran here."""

from __future__ import annotations

import os
import time

from orchestrator.node.follow import stop_job
from orchestrator.node.follow.job_state import job_state
from orchestrator.node.job import job_processes, run_directory
from orchestrator.node.job.hang import Activity, collect
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.stream import FileStreamer
from orchestrator.node.server.visit import LIBRARY, Refusal, Visit, answers
from orchestrator.node.warm.visit import WarmVisit
from orchestrator.protocol.events import EndOrder
from orchestrator.protocol.requests.follow import (
    AskProfile,
    AskStuck,
    AskSystem,
    End,
    Follow,
    Following,
    Jobs,
    JobStates,
    Living,
    LivingRuns,
    ProfileState,
    Remove,
    RemovedRuns,
    Stop,
    StopAll,
    StopReceipt,
    StopReceipts,
    Stuck,
    SystemLines,
)
from orchestrator.protocol.requests.request import OTHER_VERSION, UNKNOWN_JOB, Nothing
from orchestrator.protocol.version import OWN, conflict


@answers(Follow)
def follow(visit: Visit, request: Follow) -> Following:
    run = RunDir(request.job, request.node)
    if not os.path.isdir(run.path):
        raise Refusal(f"this machine knows nothing of job {run.job}", UNKNOWN_JOB)
    other = conflict(run.job, run.version(), OWN)
    if other:
        raise Refusal(other, OTHER_VERSION)
    visit.streamer = FileStreamer(
        run, request.log, request.ranks, request.events, request.gather or 0.0
    )
    visit.activity = Activity(run)
    visit.of(WarmVisit).follow(run)
    if request.head:
        visit.streamer.tell_of_head()
    return Following(time=time.time())


# -- its state --------------------------------------------------------------------------------


@answers(Jobs)
def jobs(visit: Visit, request: Jobs) -> JobStates:
    runs = [run for run in (RunDir(*request.part),) if os.path.isdir(run.path)]
    return JobStates(jobs=tuple(map(job_state, runs)), time=time.time())


@answers(AskSystem)
def system(visit: Visit, request: AskSystem) -> SystemLines:
    since, until, server = request.since, request.until, run_directory.server_log()
    runs = [RunDir(*part).system for part in request.parts]
    return SystemLines(
        supervisor=run_directory.lines_between(runs, since, until),
        server=run_directory.lines_between([f"{server}.1", server], since, until),
    )


@answers(AskStuck)
def stuck(visit: Visit, request: AskStuck) -> Stuck:
    return Stuck(stuck=collect(RunDir(request.job, request.node)), time=time.time())


@answers(AskProfile)
def profile(visit: Visit, request: AskProfile) -> ProfileState:
    from orchestrator.node.follow.profile import ask  # not for every visit

    return ask(RunDir(request.job, request.node), request.wish)


@answers(Living)
def living(visit: Visit, request: Living) -> LivingRuns:
    has_part = request.part is None or os.path.exists(RunDir(*request.part).spec)
    alive = tuple(job_processes.living(request.runs))
    return LivingRuns(living=alive, has_part=has_part)


# -- its end ----------------------------------------------------------------------------------


@answers(End)
def end(visit: Visit, request: End) -> Nothing:
    # The head has given the others the time to say that they failed: it is certain.
    failed = {"failed": request.failed, "certain": request.failed}
    order = EndOrder(why=request.why, grace=request.grace, **failed)
    stop_job.end(RunDir(request.job, request.node), order)
    return Nothing()


@answers(Stop)
def stop(visit: Visit, request: Stop) -> StopReceipt:
    return stop_job.stop(RunDir(request.job, request.node), request)


@answers(StopAll)
def stop_all(visit: Visit, request: StopAll) -> StopReceipts:
    if request.all_users and os.getuid() != 0:
        raise Refusal("only root can end the jobs of other users there")
    return StopReceipts(receipts=tuple(stop_job.stop_all(request)))


@answers(Remove)
def remove(visit: Visit, request: Remove) -> RemovedRuns:
    from orchestrator.node.job import cleanup
    from orchestrator.node.transfer.code import checkout

    snapshots = checkout.snapshots_of(request.runs)  # their names go with the runs
    removed = cleanup.remove(request.runs, LIBRARY)
    gone = [(run.job, run.node) for run in removed.runs if not run.problem]
    return removed.replace(freed=removed.freed + checkout.remove(snapshots, gone))
