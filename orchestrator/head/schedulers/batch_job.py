"""A job whose head is the batch script of a Slurm job, as seen from a login node.

That head writes the record and the logs on the disk that all share; here they are only read, and
Slurm's queue is asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace

from orchestrator.common.errors import EXIT_FAILED, EXIT_NODE, EXIT_STOPPED, OrchestratorError
from orchestrator.common.text import Say
from orchestrator.head.follow import verdict
from orchestrator.head.schedulers import queue
from orchestrator.head.screen.keyboard import Keys
from orchestrator.head.screen.output import pass_on
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.outcome import Receipt

OUTPUT = "slurm.out"  # what the head prints, of all attempts
LOOK = 0.2  # seconds between two looks at the files
ASK = 5.0  # between two questions to Slurm's controller, which has many to answer
REQUEUE_SECONDS = 60.0  # for Slurm to end what is queued again
MARGIN = 90  # seconds beyond the ranks' grace: the last step, and the checkpoint after it
EARLY = 60  # seconds by which Slurm's signal may come sooner
LEAST_SECONDS = 60.0  # that an attempt has to run, else the next one gets no further either
KILL_LIMIT = 60.0  # scancel takes KillWait, 30 s where nobody changed it
SEEN_WITHIN = 10.0  # until a file of another machine shows up on a shared disk


def settle(experiment: Experiment, record: JobRecord, patience: float = SEEN_WITHIN) -> JobRecord:
    """Conclude the record of a job that Slurm ended before its head could."""
    if record.over or record.slurm_job is None:
        return record
    entry = queue.look_up(record.slurm_job)
    deadline = time.monotonic() + patience
    # Its last record may be on its way; and a job on its way back into the queue counts as failed
    # in Slurm for a few seconds.
    while entry.over and record.batch and not record.over and time.monotonic() < deadline:
        time.sleep(LOOK)
        record = experiment.read_record()
        entry = queue.look_up(job_of(record))
    if not entry.over or record.over or experiment.lock() is not None:
        return record
    now = time.time()
    why = f"Slurm's job {record.slurm_job} is {entry}"
    if entry.state == "CANCELLED":
        conclusion, state, code = verdict.stopped(why, now), "stopped", EXIT_STOPPED
    else:
        where = experiment.path / OUTPUT
        why += f", and its head wrote no result; its last output is in {where}" * where.exists()
        conclusion, state, code = verdict.not_started(why, now), "failed", EXIT_FAILED
        if record.nodes:
            state, code = "lost", EXIT_NODE
    nodes = [replace(node, state="ended") for node in record.nodes]
    record = replace(
        record, state=state, exit_code=code, ended=now, verdict=conclusion, nodes=nodes
    )
    experiment.write_record(record)
    experiment.unlock()
    return record


def is_taken_back(record: JobRecord) -> bool:
    """Tell, from inside it, whether Slurm ends the job to start it again: preempted, requeued."""
    try:
        return queue.restarts(job_of(record)) > int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    except (OrchestratorError, ValueError):
        return False


def has_too_short_a_limit(record: JobRecord) -> bool:
    """Tell whether the signal that announces the time limit comes as good as at the start."""
    with contextlib.suppress(OrchestratorError):
        since, limit = queue.ran(job_of(record))
        return since < LEAST_SECONDS and limit - since <= record.launch.grace + MARGIN + EARLY
    return False


def why_terminated(record: JobRecord) -> str:
    """Say why Slurm ends the job, where it is not that somebody asked for it."""
    with contextlib.suppress(OrchestratorError):
        since, limit = queue.ran(job_of(record))
        if since >= limit:
            return f"the time limit of Slurm's job {job_of(record)} is over"
    return ""


def again_later(experiment: Experiment, record: JobRecord, say: Say) -> bool:
    """Queue the job again, from inside it, unless Slurm has done so by itself."""
    taken_back = is_taken_back(record)
    if not taken_back and has_too_short_a_limit(record):
        experiment.write_record(record)
        say(
            "it is not queued again, as it would get no further: Slurm's signal comes less than"
            f" {LEAST_SECONDS:.0f} s after the start; it needs more time: --time, or another"
            " partition"
        )
        return False
    nodes = [replace(node, state="queued", ranks={}) for node in record.nodes]
    later = replace(record, state="queued", nodes=nodes, exit_code=None, ended=None, verdict=None)
    experiment.write_record(later)
    say(f"saved; Slurm's job {record.slurm_job} goes back into the queue")
    if taken_back:
        return True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which Slurm ends this process
    try:
        queue.requeue(job_of(record))
    except OrchestratorError as error:
        experiment.write_record(record)
        say(f"it cannot be queued again: {error}")
        return False
    time.sleep(REQUEUE_SECONDS)
    return True


def begun(experiment: Experiment, record: JobRecord) -> JobRecord:
    """Wait until Slurm has started the job."""
    while record.state == "queued":
        time.sleep(ASK / 5)
        record = settle(experiment, experiment.read_record())
    return record


class SlurmJobView:
    """Shows what the head prints until the job is over, or the user leaves it."""

    def __init__(self, experiment: Experiment, record: JobRecord, say: Say, *, anew: bool) -> None:
        self.experiment, self.record, self.say = experiment, record, say
        self.interrupts: list[int] = []
        self.answered = 0
        self.shown = 0 if anew else self.size()
        self.settled = False  # Slurm ended it, and its record had to be concluded here
        self.before = ""
        self.next_ask = 0.0

    def go(self) -> bool:
        """Show the job until it is over; return False if the user left it."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in signals}
        for number in signals:
            signal.signal(number, lambda number, _: self.interrupts.append(number))
        try:
            with Keys() as keys:
                while not self.record.over:
                    if "d" in keys.pressed() or signal.SIGHUP in self.interrupts:
                        return False
                    self.turn()
                    time.sleep(LOOK)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.pump()
        return True

    def turn(self) -> None:
        self.pump()
        if len(self.interrupts) > self.answered:
            self.answered += 1
            self.say(end(self.record, now=self.answered > 1))
        self.record = self.experiment.read_record()
        if time.monotonic() >= self.next_ask:
            self.next_ask = time.monotonic() + ASK
            before = self.record.over
            self.record = settle(self.experiment, self.record)
            self.settled = self.record.over and not before
            if self.record.state == "queued" and not self.record.over:
                state = f"Slurm's job {self.record.slurm_job}: {queue.look_up(job_of(self.record))}"
                if state != self.before:
                    self.say(state)
                self.before = state

    def size(self) -> int:
        with contextlib.suppress(OSError):
            return (self.experiment.path / OUTPUT).stat().st_size
        return 0

    def pump(self) -> None:
        """Show what is new in the head's output."""
        try:
            with (self.experiment.path / OUTPUT).open("rb") as file:
                file.seek(self.shown)
                data = file.read()
        except OSError:
            return  # the job still waits
        self.shown += len(data)
        pass_on(data.decode("utf-8", "replace"))


def job_of(record: JobRecord) -> str:
    assert record.slurm_job is not None
    return record.slurm_job


def end(record: JobRecord, *, now: bool) -> str:
    """Ask for the end of the job, and return a sentence about it."""
    job = job_of(record)
    if now or record.state == "queued":
        queue.cancel(job)
        return f"Slurm's job {job} is cancelled"
    queue.ask_to_stop(job)
    grace = f"{record.launch.grace:g} s"
    return f"asking the ranks to save and stop ({grace}); once more to cancel the job"


def stop(experiment: Experiment, record: JobRecord, grace: float) -> list[Receipt]:
    """Ask the job to end, then cancel it; return when it has left Slurm's queue."""
    job, began = job_of(record), time.monotonic()
    killed: dict[int, str] = {}
    if not queue.look_up(job).over:
        end(record, now=grace <= 0)
    if grace > 0 and not gone(job, grace + KILL_LIMIT / 2):
        queue.cancel(job)
        killed = {int(job): "Slurm's job"}
    left = () if gone(job, KILL_LIMIT) else (int(job),)
    if not left:
        settle(experiment, experiment.read_record(), patience=1.0)
    took = time.monotonic() - began
    return [Receipt(f"Slurm's job {job}", record.job, took, killed=killed, left=left)]


def gone(job: str, patience: float) -> bool:
    """Wait for the job to leave the queue with all its processes; tell whether it has."""
    deadline = time.monotonic() + patience
    while not queue.look_up(job).over:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK)
    return True
