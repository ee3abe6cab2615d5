"""Answers a head's requests about a job that runs or ran here."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, TypeVar

from orchestrator.common import files
from orchestrator.node.follow import stop_job
from orchestrator.node.job import job_processes, run_directory
from orchestrator.node.job.hang import Activity, collect_stacks, step_times
from orchestrator.node.job.run_directory import PartDir, RunDir, connect_supervisor
from orchestrator.node.server.session import LIBRARY, Refusal, ServerSession, answers
from orchestrator.node.server.stream import FileStreamer
from orchestrator.node.warm.session import StandbySession
from orchestrator.protocol.events import Ended, EndOrder, RankEvent, RankState, Started
from orchestrator.protocol.message import Message, Nonsense, decode_value, parse_object, to_json
from orchestrator.protocol.requests import follow as profiling
from orchestrator.protocol.requests.follow import (
    AskJobState,
    AskProfile,
    AskStuck,
    AskSystem,
    End,
    Follow,
    JobState,
    Living,
    LivingRuns,
    ProfileAnswer,
    ProfileRequest,
    ProfileState,
    Remove,
    RemovedParts,
    Stop,
    StopAll,
    StopReceipt,
    StopReceipts,
    Stuck,
    SystemLines,
)
from orchestrator.protocol.requests.request import (
    OTHER_VERSION,
    UNKNOWN_JOB,
    Nothing,
)
from orchestrator.protocol.timing import PROFILE_SECONDS
from orchestrator.protocol.version import OWN, version_conflict

M = TypeVar("M", bound=Message)


@answers(Follow)
def follow(session: ServerSession, request: Follow) -> Nothing:
    run = stop_job.run_of(request)
    other = version_conflict(run.job, run.version(), OWN)
    if other:
        raise Refusal(other, OTHER_VERSION)
    if not os.path.isdir(run.path):
        raise Refusal(f"this machine knows nothing of job {run.job}", UNKNOWN_JOB)
    session.streamer = FileStreamer(
        run, request.log, request.ranks, request.events, request.gather or 0.0
    )
    session.activity = Activity(run)
    session.of(StandbySession).follow(run)
    if request.head:
        session.streamer.tell_of_head()
    return Nothing()


# -- its state --------------------------------------------------------------------------------


@answers(AskJobState)
def state(session: ServerSession, request: AskJobState) -> JobState:
    run = stop_job.run_of(request)
    if not os.path.isdir(run.path):
        return JobState(job=run.job, part=run.part, state="unknown there", ranks={})
    return job_state(run)


@answers(AskSystem)
def system(session: ServerSession, request: AskSystem) -> SystemLines:
    now, server = time.time(), run_directory.server_log()
    runs = [run.system for run in PartDir(request.job, request.part).attempts()]
    return SystemLines(
        supervisor=run_directory.lines_between(runs, now - request.since, now - request.until),
        server=run_directory.lines_between(
            [f"{server}.1", server], now - request.since, now - request.until
        ),
    )


@answers(AskStuck)
def stuck(session: ServerSession, request: AskStuck) -> Stuck:
    return Stuck(stuck=collect_stacks(stop_job.run_of(request)), time=time.time())


@answers(AskProfile)
def profile(session: ServerSession, request: AskProfile) -> ProfileState:
    return ask_for_profile(stop_job.run_of(request), request.trace)


@answers(Living)
def living(session: ServerSession, request: Living) -> LivingRuns:
    stored = (part for part in request.parts if os.path.exists(PartDir(*part).spec))
    alive = tuple(job_processes.living_runs(request.parts))
    return LivingRuns(living=alive, stored=tuple(stored))


# -- its end ----------------------------------------------------------------------------------


@answers(End)
def end(session: ServerSession, request: End) -> Nothing:
    # The head has waited for other nodes to report a failure first, so the cause is certain.
    failed = {"failed": request.failed, "certain": request.failed}
    order = EndOrder(why=request.why, grace=request.grace, **failed)
    stop_job.end_part(stop_job.run_of(request), order)
    return Nothing()


@answers(Stop)
def stop(session: ServerSession, request: Stop) -> StopReceipt:
    return stop_job.stop_part(stop_job.run_of(request), request)


@answers(StopAll)
def stop_all(session: ServerSession, request: StopAll) -> StopReceipts:
    if request.all_users and os.getuid() != 0:
        raise Refusal("only root can end the jobs of other users there")
    return StopReceipts(receipts=tuple(stop_job.stop_all(request)))


@answers(Remove)
def remove(session: ServerSession, request: Remove) -> RemovedParts:
    from orchestrator.node.job import cleanup
    from orchestrator.node.transfer import checkout

    removed = cleanup.remove_parts(request.parts, LIBRARY)
    return removed.replace(freed=removed.freed + checkout.clean_snapshots())


# -- the answers in full ----------------------------------------------------------------------


def job_state(run: RunDir) -> JobState:
    """Return the state of one job on this node, as `status` shows it."""
    known: dict[str, Any] = {"state": "lost"}
    ranks: dict[int, RankState] = {}
    ended = False
    for event in run.read_events():
        if isinstance(event, Started):
            known["started"] = event.time
        elif isinstance(event, Ended):
            ended = True
            known.update(ended=event.time, agent=event.agent, why=event.why)
        elif isinstance(event, RankEvent):
            ranks[event.rank] = ranks.get(event.rank, RankState()).after(event)
    with contextlib.suppress(OSError):
        status = os.stat(run.log)
        known.update(log_bytes=status.st_size, log_time=status.st_mtime)
    with contextlib.suppress(OSError):
        connect_supervisor(run).close()
        known["state"] = "running"
    if ended:
        known["state"] = "ended"
    else:
        living = job_processes.processes_of_job(run)
        known["processes"] = tuple(process.pid for process in living)
    return JobState(job=run.job, part=run.part, ranks=ranks, **known)


def ask_for_profile(run: RunDir, request: ProfileRequest) -> ProfileState:
    """Write the request once; return its state. A program without training steps never answers."""
    if not os.path.isdir(run.path):
        raise ValueError(f"this machine knows nothing of job {run.job}")
    over = run.last(Ended) is not None
    path = os.path.join(run.path, profiling.REQUEST_FILE)
    waiting, reply = (
        read_reply(run, profiling.REQUEST_FILE, ProfileRequest),
        read_reply(run, profiling.ANSWER_FILE, ProfileAnswer),
    )
    state = reply if reply is not None and reply.id == request.id else None
    with contextlib.suppress(OSError):
        if time.time() - os.stat(path).st_mtime > PROFILE_SECONDS:
            # The head that wrote it no longer repeats it.
            waiting = None
    steps = step_times(run).values()
    stepped = max(0.0, time.time() - max(steps)) if steps else None
    busy = waiting is not None and waiting.id != request.id
    if reply is not None and state is None:
        busy = busy or reply.state in (profiling.ASKED, profiling.TRACING)
    if state is None and not (over or busy):
        if waiting is None:
            files.replace_file(path, to_json(request))
        # Rank 0 has just removed the file.
        with contextlib.suppress(OSError):
            # The new time shows that this head still waits.
            os.utime(path)
    return ProfileState(reply=state, busy=busy, stepped=stepped, over=over)


def read_reply(run: RunDir, name: str, kind: type[M]) -> M | None:
    try:
        with files.open_plain(os.path.join(run.path, name)) as file:
            return decode_value(kind, parse_object(file.read(1 << 14)), newer=True)
    except (OSError, Nonsense):
        return None
