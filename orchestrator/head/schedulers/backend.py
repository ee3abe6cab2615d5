"""The backends of a job: SSH, Slurm, a Slurm batch job, or one machine with run-node.

A backend knows how the nodes are reached, whether the job is over, and how it is stopped. Commands
never check which backend they have. The head of a batch job runs in the batch script, and writes
the record and the logs on the shared disk. Other processes only read them, and query Slurm's queue.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    EXIT_STOPPED,
    OrchestratorError,
)
from orchestrator.config.launch import Launch
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.subprocess_transport import LocalTransport
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow import verdict
from orchestrator.head.schedulers import queue
from orchestrator.head.screen.events import say
from orchestrator.head.screen.keyboard import Keyboard
from orchestrator.head.screen.output import pass_on
from orchestrator.protocol.timing import (
    FILE_SEEN_SECONDS,
    KILL_LIMIT_SECONDS,
    REQUEUE_SECONDS,
    SCHEDULER_SECONDS,
)
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.outcome import Receipt

# The output of the head in a batch job, for all attempts.
OUTPUT = "slurm.out"
# The interval at which the files are read.
LOOK_SECONDS = 0.2
# The time beyond the ranks' grace, for the last step and the checkpoint after it.
MARGIN_SECONDS = 90


@dataclass(frozen=True)
class Scheduled:
    """The scheduler's state of a job: a text to show, and further keys of the JSON output."""

    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


UNSCHEDULED = Scheduled()
# Prints the result of the job and returns the exit code.
Conclude = Callable[[Experiment, JobRecord], int]


class SshBackend:
    """A job on nodes that are reached by SSH, where only their supervisors know of it."""

    signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    has_other_heads = False

    def transport(
        self, record: JobRecord, ssh_config: Path | None, seconds: float | None = None
    ) -> Transport:
        """Return the transport to the nodes; its timeout is at least that of the launch."""
        recorded = Path(record.ssh_config) if record.ssh_config else None
        launch = record.launch
        return SshTransport(
            SshConfig(ssh_config or recorded),
            timeout=seconds or max(Launch.connect_timeout, launch.connect_timeout),
            strict=launch.strict_host_keys,
        )

    def settle(self, experiment: Experiment, record: JobRecord) -> JobRecord:
        """Return the record, concluded if the job ended before its head could write that."""
        return record

    def scheduled(self, record: JobRecord) -> Scheduled:
        """Return the state of the job in its scheduler, or UNSCHEDULED without one."""
        return UNSCHEDULED

    def begun(self, experiment: Experiment, record: JobRecord, *, wait: bool) -> JobRecord:
        """Print a line if the job is queued, wait for its start if `wait`; return the record."""
        return record

    def stop(self, experiment: Experiment, record: JobRecord, grace: float) -> list[Receipt] | None:
        """Stop a job through its scheduler; return None if it has to be stopped on its nodes."""
        return None

    def watch(self, experiment: Experiment, record: JobRecord, conclude: Conclude) -> int | None:
        """Show a job until it ends, if its head runs elsewhere; return None if it can run here."""
        return None

    def is_taken_back(self, record: JobRecord) -> bool:
        """Return True if the scheduler ends the job in order to restart it."""
        return False

    def why_terminated(self, record: JobRecord) -> str:
        """Return the reason why the scheduler ends the job; "" if it does not."""
        return ""

    def start_again(self, experiment: Experiment, record: JobRecord) -> bool:
        """Requeue a preempted job; return False if there is no queue or it fails."""
        return False


class LocalBackend(SshBackend):
    """One machine's part of a job that was started on each machine by run-node."""

    has_other_heads = True

    def transport(
        self, record: JobRecord, ssh_config: Path | None, seconds: float | None = None
    ) -> Transport:
        return LocalTransport()


class SlurmBackend(SshBackend):
    """A job in an allocation whose head runs in a terminal."""

    def transport(
        self, record: JobRecord, ssh_config: Path | None, seconds: float | None = None
    ) -> Transport:
        # The job is being submitted.
        if record.slurm_job is None:
            return super().transport(record, ssh_config, seconds)
        return queue.SrunTransport(record.slurm_job)

    def settle(
        self, experiment: Experiment, record: JobRecord, patience: float = FILE_SEEN_SECONDS
    ) -> JobRecord:
        """Conclude the record of a job that Slurm ended before its head could."""
        if record.over or record.slurm_job is None:
            return record
        entry = queue.find_job(record.slurm_job)
        deadline = time.monotonic() + patience
        # The last record may not be visible on this machine yet. A job that is being requeued
        # counts as failed in Slurm for a few seconds.
        while entry.over and record.batch and not record.over and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            record = experiment.read_record()
            entry = queue.find_job(job_of(record))
        if not entry.over or record.over or experiment.lock() is not None:
            return record
        now = time.time()
        reason = f"Slurm's job {record.slurm_job} is {entry}"
        if entry.state == "CANCELLED":
            conclusion, state, code = verdict.stopped_verdict(reason, now), "stopped", EXIT_STOPPED
        else:
            where = experiment.path / OUTPUT
            reason += (
                f", and its head wrote no result; its last output is in {where}" * where.exists()
            )
            conclusion, state, code = verdict.unstarted_verdict(reason, now), "failed", EXIT_FAILED
            if record.nodes:
                state, code = "lost", EXIT_NODE
        nodes = [replace(node, state="ended") for node in record.nodes]
        record = replace(
            record, state=state, exit_code=code, ended=now, verdict=conclusion, nodes=nodes
        )
        experiment.write_record(record)
        experiment.unlock()
        return record

    def scheduled(self, record: JobRecord) -> Scheduled:
        if record.slurm_job is None:
            return UNSCHEDULED
        text, data = f"Slurm's job {record.slurm_job}", {"job": record.slurm_job}
        if record.over:
            return Scheduled(text, {"slurm": data})
        entry = queue.find_job(record.slurm_job)
        return Scheduled(f"{text}: {entry}", {"slurm": {**data, **asdict(entry)}})

    def why_terminated(self, record: JobRecord) -> str:
        """Return the reason if the time limit ended the job; "" otherwise."""
        with contextlib.suppress(OrchestratorError):
            if queue.is_out_of_time(job_of(record)):
                return f"the time limit of Slurm's job {job_of(record)} is over"
        return ""


class BatchBackend(SlurmBackend):
    """A job whose head is the batch script of a Slurm job."""

    # Slurm sends SIGUSR1 before the time limit.
    signals = (*SshBackend.signals, signal.SIGUSR1)

    def is_taken_back(self, record: JobRecord) -> bool:
        """Return True if Slurm ends this process's job in order to restart it."""
        try:
            return queue.count_restarts(job_of(record)) > int(
                os.environ.get("SLURM_RESTART_COUNT", "0")
            )
        except (OrchestratorError, ValueError):
            return False

    def start_again(self, experiment: Experiment, record: JobRecord) -> bool:
        """Requeue this process's job, unless Slurm has done so; return False on failure."""
        taken_back = self.is_taken_back(record)
        nodes = [replace(node, state="queued", ranks={}) for node in record.nodes]
        later = replace(
            record, state="queued", nodes=nodes, exit_code=None, ended=None, verdict=None
        )
        experiment.write_record(later)
        say(f"saved; Slurm's job {record.slurm_job} goes back into the queue")
        if taken_back:
            return True
        # Slurm ends this process by SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            queue.requeue_job(job_of(record))
        except OrchestratorError as error:
            experiment.write_record(record)
            say(f"it cannot be queued again: {error}")
            return False
        time.sleep(REQUEUE_SECONDS)
        return True

    def begun(self, experiment: Experiment, record: JobRecord, *, wait: bool) -> JobRecord:
        if record.state == "queued":
            text = self.scheduled(record).text or "submitted"
            say(f"{experiment.name} waits in the queue: {text}")
        while wait and record.state == "queued":
            time.sleep(SCHEDULER_SECONDS / 5)
            record = self.settle(experiment, experiment.read_record())
        return record

    def stop(self, experiment: Experiment, record: JobRecord, grace: float) -> list[Receipt] | None:
        """Request the end of the job, then cancel it; return when it has left Slurm's queue."""
        if record.over:
            return None
        job, began = job_of(record), time.monotonic()
        killed: dict[int, str] = {}
        if not queue.find_job(job).over:
            end_job(record, now=grace <= 0)
        if grace > 0 and not wait_until_gone(job, grace + KILL_LIMIT_SECONDS / 2):
            queue.cancel_job(job)
            killed = {int(job): "Slurm's job"}
        left = () if wait_until_gone(job, KILL_LIMIT_SECONDS) else (int(job),)
        if not left:
            self.settle(experiment, experiment.read_record(), patience=1.0)
        took = time.monotonic() - began
        return [
            Receipt(node=f"Slurm's job {job}", job=record.job, took=took, killed=killed, left=left)
        ]

    def watch(self, experiment: Experiment, record: JobRecord, conclude: Conclude) -> int | None:
        return watch_batch(experiment, record, conclude, from_start=False)


def backend_of(record: JobRecord) -> SshBackend:
    if record.batch:
        return BatchBackend()
    if record.slurm_job is not None:
        return SlurmBackend()
    return LocalBackend() if record.part_of else SshBackend()


def watch_batch(
    experiment: Experiment, record: JobRecord, conclude: Conclude, *, from_start: bool
) -> int:
    """Show the head's output in the Slurm job until the job ends or the user detaches.

    Return the exit code of the job, or EXIT_DONE after a detach.
    """
    view = SlurmJobView(experiment, record, from_start=from_start)
    say(f"{experiment.name} is Slurm's job {record.slurm_job}; d leaves it, Ctrl-C stops it")
    if not view.go():
        say(f"left running; follow it again: orchestrator attach {experiment.name}")
        return EXIT_DONE
    # The head could not write the result of the job.
    if view.settled:
        return conclude(experiment, view.record)
    assert view.record.exit_code is not None
    return view.record.exit_code


class SlurmJobView:
    """Shows the output of a batch job's head until the job ends or the user detaches."""

    def __init__(self, experiment: Experiment, record: JobRecord, *, from_start: bool) -> None:
        self.experiment, self.record = experiment, record
        self.interrupts: list[int] = []
        self.answered = 0
        self.shown = 0 if from_start else self.size()
        # True if Slurm ended the job, and its record had to be concluded here.
        self.settled = False
        self.before = ""
        self.next_ask = 0.0

    def go(self) -> bool:
        """Show the job until it ends; return False if the user detached."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in signals}
        for number in signals:
            signal.signal(number, lambda number, _: self.interrupts.append(number))
        try:
            with Keyboard() as keys:
                while not self.record.over:
                    if "d" in keys.pressed() or signal.SIGHUP in self.interrupts:
                        return False
                    self.turn()
                    time.sleep(LOOK_SECONDS)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.pump()
        return True

    def turn(self) -> None:
        self.pump()
        if len(self.interrupts) > self.answered:
            self.answered += 1
            say(end_job(self.record, now=self.answered > 1))
        self.record = self.experiment.read_record()
        if time.monotonic() >= self.next_ask:
            self.next_ask = time.monotonic() + SCHEDULER_SECONDS
            before = self.record.over
            self.record = SlurmBackend().settle(self.experiment, self.record)
            self.settled = self.record.over and not before
            if self.record.state == "queued":
                state = (
                    f"Slurm's job {self.record.slurm_job}: {queue.find_job(job_of(self.record))}"
                )
                if state != self.before:
                    say(state)
                self.before = state

    def size(self) -> int:
        with contextlib.suppress(OSError):
            return (self.experiment.path / OUTPUT).stat().st_size
        return 0

    def pump(self) -> None:
        """Print the new part of the head's output."""
        try:
            with files.open_plain(self.experiment.path / OUTPUT) as file:
                file.seek(self.shown)
                data = file.read()
        except OSError:
            # The job has not started yet.
            return
        self.shown += len(data)
        pass_on(data.decode("utf-8", "replace"))


# -- requests to Slurm --------------------------------------------------------------------------


def job_of(record: JobRecord) -> str:
    assert record.slurm_job is not None
    return record.slurm_job


def end_job(record: JobRecord, *, now: bool) -> str:
    """Request the end of the job, or cancel it; return a sentence that says which."""
    job = job_of(record)
    if now or record.state == "queued":
        queue.cancel_job(job)
        return f"Slurm's job {job} is cancelled"
    queue.ask_to_stop(job)
    grace = f"{record.launch.grace:g} s"
    return f"asking the ranks to save and stop ({grace}); once more to cancel the job"


def wait_until_gone(job: str, patience: float) -> bool:
    """Wait until the job has left the queue; return False after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not queue.find_job(job).over:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True
