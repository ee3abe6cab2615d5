"""The final record of an attempt whose nodes have all ended or are given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_NODE, EXIT_STOPPED
from orchestrator.common.text import format_duration, plural
from orchestrator.head.events.of_job import AttemptOver
from orchestrator.head.follow import failure_kinds, restarts, verdict
from orchestrator.head.follow.followed_job import FollowedJob
from orchestrator.head.follow.job_end import Outcome
from orchestrator.head.follow.monitors import hang
from orchestrator.head.follow.verdict import Failure
from orchestrator.head.screen import tracebacks
from orchestrator.records import goodput, manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics import trainers
from orchestrator.records.outcome import JobVerdict

log = logging.getLogger(__name__)

STATES = {"done": "is done", "failed": "failed", "lost": "lost a node"}


def conclude_attempt(
    job: FollowedJob, scheduler: Callable[[JobRecord], str], *, stopped: bool
) -> JobRecord:
    """Return the record with the attempt's outcome and cause, and the decision on a restart.

    `scheduler` returns why the scheduler ended the job, if it did. `stopped`: the user stopped it.
    """
    unreached = [node for node in job.nodes if not node.over]
    for node in unreached:
        node.record = replace(node.record, state="lost")
    now = time.time()
    state, code = state_of(job, unreached=bool(unreached))
    cause = None
    if state == "stopped":
        reason = next((node.ended.why for node in job.nodes if node.ended and node.ended.why), "")
        reason = scheduler(job.record) or reason or verdict.STOPPED_BY_USER
        cause = verdict.stopped_verdict(reason, now)
    elif state != "done":
        cause = cause_of(job)
    record = replace(job.current_record(), state=state, exit_code=code, ended=now, verdict=cause)
    record = after_attempt(job.experiment, record, stopped=stopped)
    return replace(record, goodput=goodput.goodput_seconds(record, job.experiment.path, now))


def after_attempt(experiment: Experiment, record: JobRecord, *, stopped: bool = False) -> JobRecord:
    """Return the record with the last steps of the ended attempt and the decision on a restart."""
    if not record.launch.max_restarts:
        return record
    outputs = experiment.path / "outputs"
    steps = step_reached(outputs), step_reached(trainers.printed_metrics_directory(outputs))
    record = restarts.record_after(record, restarts.ended_attempt(record, *steps), stopped=stopped)
    log.info("another attempt: %s (%s)", record.goes_on, record.attempts[-1].why)
    return record


def end_of_attempt(experiment: Experiment, record: JobRecord) -> AttemptOver:
    """Return the event for the end of a job, or of an attempt that is followed by another."""
    name, seconds = Path(record.experiment).name, (record.ended or 0.0) - record.started
    after = f"after {format_duration(seconds)} on {plural(len(record.nodes), 'node')}"
    kind, cause = "end", None
    title = f"{name} {STATES.get(record.state, f'was {record.state}')} {after}"
    if record.goes_on:
        last = record.attempts[-1]
        kind, cause = "restart", last.verdict
        which = f"attempt {last.number} of at most {1 + record.launch.max_restarts} {last.state}"
        at = "" if last.step is None else f" at step {last.step}"
        after = format_duration(last.ended - last.started)
        title = f"{name} is started again: {which} after {after}{at}"
    elif record.state in ("failed", "lost"):
        kind, cause = "failure", record.verdict
    else:
        title += f": {record.experiment}"
    if cause is not None:
        tree = manifest.working_tree(experiment)
        cause = tracebacks.own_paths_in_verdict(cause, tree)
    lines = () if cause is None else verdict.verdict_to_lines(cause)
    return AttemptOver(kind, record, title, cause, lines)


def step_reached(outputs: Path) -> int | None:
    """Return the last step in the metrics files, None if there is none."""
    every = trainers.list_metrics_files(outputs).values()
    steps = [trainers.read_last_values(path).step for files in every for path in files.values()]
    return max((step for step in steps if step is not None), default=None)


def cause_of(job: FollowedJob) -> JobVerdict | None:
    """Return the verdict on a job that failed, None if no failure was reported."""
    silent = [(node.record.index, node.record.name) for node in job.nodes if not node.over]
    # Other nodes can have taken a standstill of this length for a loss.
    still = [
        (node.record.index, node.record.name, node.ended.stood_still)
        for node in job.nodes
        if node.ended and node.ended.stood_still > job.record.launch.node_loss_timeout / 2
    ]
    codes = [rank.code for node in job.nodes for rank in node.ranks.values()]
    bad = sum(code not in (0, None) for code in codes)
    failures: Sequence[Failure] = job.failures
    if silent:
        failures = verdict.blame_silent_node(failures, silent)
    elif still:
        failures = verdict.blame_still_node(failures, still)
    for node in job.nodes:
        if node.broken_gpu is not None:
            where = node.record.index, node.record.name
            failures = verdict.blame_broken_gpu(failures, *where, node.broken_gpu)
    stuck = [
        (hang.stuck_rank(rank, node.record.index, stacks), stacks)
        for node in job.nodes
        for rank, stacks in node.stuck.items()
        if rank in node.record.numbers
    ]
    if found := hang.missed_rank(stuck):
        who, words = found
        late = job.nodes[who.node].failure(0.0, "hang", words, who.rank)
        failures = verdict.blame_late_rank(failures, replace(late, fix=failure_kinds.LATE_FIX))
    cause = verdict.conclude_verdict(failures, bad)
    if cause is None:
        return None
    return replace(cause, fix=manifest.send_hint(job.experiment, cause.message) or cause.fix)


def state_of(job: FollowedJob, *, unreached: bool) -> tuple[str, int]:
    if job.end.outcome is Outcome.STOPPED and not unreached:
        return "stopped", EXIT_STOPPED
    if job.end.outcome is Outcome.LOST or unreached:
        return "lost", EXIT_NODE
    if job.end.outcome is Outcome.FAILED:
        return "failed", EXIT_FAILED
    if any(node.ended and node.ended.why for node in job.nodes):
        # The stop came from `orchestrator stop`, or from a signal to a supervisor.
        return "stopped", EXIT_STOPPED
    return "done", EXIT_DONE
