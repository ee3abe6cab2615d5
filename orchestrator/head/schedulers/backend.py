"""The backend of a job: Slurm, the machine where run-node was typed, or the supervisors alone.

A command asks the backend how the nodes are reached, whether the job is over, or to stop it; it
never asks which backend it is. Of a job whose head is the batch script of a Slurm job, that head
writes the record and the logs on the disk that all share: elsewhere they are only read, and Slurm's
queue is asked.
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
from orchestrator.head.screen.keyboard import Keyboard
from orchestrator.head.screen.output import pass_on, say
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.outcome import Receipt

OUTPUT = "slurm.out"  # what the head prints, of all attempts
LOOK_SECONDS = 0.2  # between two looks at the files
ASK_SECONDS = 5.0  # between two questions to Slurm's controller, which has many to answer
REQUEUE_SECONDS = 60.0  # for Slurm to end what is queued again
MARGIN_SECONDS = 90  # seconds beyond the ranks' grace: the last step, and the checkpoint after it
KILL_LIMIT_SECONDS = 60.0  # scancel takes KillWait, 30 s where nobody changed it
SEEN_WITHIN_SECONDS = 10.0  # until a file of another machine shows up on a shared disk


@dataclass(frozen=True)
class Scheduled:
    """A job as its scheduler knows it: a text to show, and further keys of the JSON."""

    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


UNSCHEDULED = Scheduled()
Conclude = Callable[[Experiment, JobRecord], int]  # prints the end, returns the exit code


class SshBackend:
    """Nodes that are reached by SSH: only the supervisors there know of the job."""

    signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    has_other_heads = False

    def transport(
        self, record: JobRecord, ssh_config: Path | None, seconds: float | None = None
    ) -> Transport:
        """Return the way to its nodes; who launched on slow ones waits for them later, too."""
        recorded = Path(record.ssh_config) if record.ssh_config else None
        launch = record.launch
        return SshTransport(
            SshConfig(ssh_config or recorded),
            timeout=seconds or max(Launch.connect_timeout, launch.connect_timeout),
            strict=launch.strict_host_keys,
        )

    def settle(self, experiment: Experiment, record: JobRecord) -> JobRecord:
        """Conclude the record of a job that ended without its head being able to say so."""
        return record

    def scheduled(self, record: JobRecord) -> Scheduled:
        """Ask the scheduler of the job, if it has one."""
        return UNSCHEDULED

    def begun(self, experiment: Experiment, record: JobRecord, *, wait: bool) -> JobRecord:
        """Say so if the job is still queued, and with `wait` wait for its start."""
        return record

    def stop(self, experiment: Experiment, record: JobRecord, grace: float) -> list[Receipt] | None:
        """End a job that has to be ended through its scheduler; None: the nodes are asked."""
        return None

    def watch(self, experiment: Experiment, record: JobRecord, conclude: Conclude) -> int | None:
        """Show a job whose head is elsewhere until it is over; None if its head can be here."""
        return None

    def is_taken_back(self, record: JobRecord) -> bool:
        """Return True if the scheduler ends the job in order to start it again."""
        return False

    def why_terminated(self, record: JobRecord) -> str:
        """Say why the scheduler ends the job, if it does so by itself."""
        return ""

    def start_again(self, experiment: Experiment, record: JobRecord) -> bool:
        """Queue a job again that had to give its nodes back, if there is a queue."""
        return False


class LocalBackend(SshBackend):
    """One machine's part of a job that was typed on each of its machines (run-node)."""

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
        if record.slurm_job is None:  # it is being submitted
            return super().transport(record, ssh_config, seconds)
        return queue.SrunTransport(record.slurm_job)

    def settle(
        self, experiment: Experiment, record: JobRecord, patience: float = SEEN_WITHIN_SECONDS
    ) -> JobRecord:
        """Conclude the record of a job that Slurm ended before its head could."""
        if record.over or record.slurm_job is None:
            return record
        entry = queue.find(record.slurm_job)
        deadline = time.monotonic() + patience
        # Its last record may be on its way; and a job on its way back into the queue counts as
        # failed in Slurm for a few seconds.
        while entry.over and record.batch and not record.over and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            record = experiment.read_record()
            entry = queue.find(job_of(record))
        if not entry.over or record.over or experiment.lock() is not None:
            return record
        now = time.time()
        reason = f"Slurm's job {record.slurm_job} is {entry}"
        if entry.state == "CANCELLED":
            conclusion, state, code = verdict.stopped(reason, now), "stopped", EXIT_STOPPED
        else:
            where = experiment.path / OUTPUT
            reason += (
                f", and its head wrote no result; its last output is in {where}" * where.exists()
            )
            conclusion, state, code = verdict.not_started(reason, now), "failed", EXIT_FAILED
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
        entry = queue.find(record.slurm_job)
        return Scheduled(f"{text}: {entry}", {"slurm": {**data, **asdict(entry)}})

    def why_terminated(self, record: JobRecord) -> str:
        """Return why Slurm ends the job, where no user asked for it."""
        with contextlib.suppress(OrchestratorError):
            if queue.is_out_of_time(job_of(record)):
                return f"the time limit of Slurm's job {job_of(record)} is over"
        return ""


class BatchBackend(SlurmBackend):
    """A job whose head is the batch script of a Slurm job."""

    signals = (*SshBackend.signals, signal.SIGUSR1)  # by which Slurm announces the time limit

    def is_taken_back(self, record: JobRecord) -> bool:
        """Return True, from inside it, if Slurm ends the job to start it again."""
        try:
            return queue.restarts(job_of(record)) > int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        except (OrchestratorError, ValueError):
            return False

    def start_again(self, experiment: Experiment, record: JobRecord) -> bool:
        """Queue the job again, from inside it, unless Slurm has done so by itself."""
        taken_back = self.is_taken_back(record)
        nodes = [replace(node, state="queued", ranks={}) for node in record.nodes]
        later = replace(
            record, state="queued", nodes=nodes, exit_code=None, ended=None, verdict=None
        )
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

    def begun(self, experiment: Experiment, record: JobRecord, *, wait: bool) -> JobRecord:
        if record.state == "queued":
            text = self.scheduled(record).text or "submitted"
            say(f"{experiment.name} waits in the queue: {text}")
        while wait and record.state == "queued":
            time.sleep(ASK_SECONDS / 5)
            record = self.settle(experiment, experiment.read_record())
        return record

    def stop(self, experiment: Experiment, record: JobRecord, grace: float) -> list[Receipt] | None:
        """Ask the job to end, then cancel it; return when it has left Slurm's queue."""
        if record.over:
            return None
        job, began = job_of(record), time.monotonic()
        killed: dict[int, str] = {}
        if not queue.find(job).over:
            end(record, now=grace <= 0)
        if grace > 0 and not gone(job, grace + KILL_LIMIT_SECONDS / 2):
            queue.cancel(job)
            killed = {int(job): "Slurm's job"}
        left = () if gone(job, KILL_LIMIT_SECONDS) else (int(job),)
        if not left:
            self.settle(experiment, experiment.read_record(), patience=1.0)
        took = time.monotonic() - began
        return [Receipt(f"Slurm's job {job}", record.job, took, killed=killed, left=left)]

    def watch(self, experiment: Experiment, record: JobRecord, conclude: Conclude) -> int | None:
        return watch_batch(experiment, record, conclude, anew=False)


def backend_of(record: JobRecord) -> SshBackend:
    if record.batch:
        return BatchBackend()
    if record.slurm_job is not None:
        return SlurmBackend()
    return LocalBackend() if record.part_of else SshBackend()


def watch_batch(
    experiment: Experiment, record: JobRecord, conclude: Conclude, *, anew: bool
) -> int:
    """Show what the head prints in the Slurm job, until the job is over or the user leaves it."""
    view = SlurmJobView(experiment, record, anew=anew)
    say(f"{experiment.name} is Slurm's job {record.slurm_job}; d leaves it, Ctrl-C stops it")
    if not view.go():
        say(f"left running; follow it again: orchestrator attach {experiment.name}")
        return EXIT_DONE
    if view.settled:  # its head could not say how it ended
        return conclude(experiment, view.record)
    assert view.record.exit_code is not None
    return view.record.exit_code


class SlurmJobView:
    """Shows what the head prints until the job is over, or the user leaves it."""

    def __init__(self, experiment: Experiment, record: JobRecord, *, anew: bool) -> None:
        self.experiment, self.record = experiment, record
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
            say(end(self.record, now=self.answered > 1))
        self.record = self.experiment.read_record()
        if time.monotonic() >= self.next_ask:
            self.next_ask = time.monotonic() + ASK_SECONDS
            before = self.record.over
            self.record = SlurmBackend().settle(self.experiment, self.record)
            self.settled = self.record.over and not before
            if self.record.state == "queued":
                state = f"Slurm's job {self.record.slurm_job}: {queue.find(job_of(self.record))}"
                if state != self.before:
                    say(state)
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


# -- what is asked of Slurm ---------------------------------------------------------------------


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


def gone(job: str, patience: float) -> bool:
    """Wait for the job to leave the queue with all its processes; return True if it has."""
    deadline = time.monotonic() + patience
    while not queue.find(job).over:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True
