"""The backend of a job: Slurm, the machine where run-node was typed, or the supervisors alone.

A command asks the backend how the nodes are reached, whether the job is over, or to stop it; it
never asks which backend it is.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from orchestrator.common.errors import EXIT_DONE
from orchestrator.common.text import Say
from orchestrator.head.connect.held.transport import HeldTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.subprocess_transport import LocalTransport, SrunTransport
from orchestrator.head.connect.transport import Transport
from orchestrator.head.schedulers import batch_job, queue
from orchestrator.head.status.status import UNSCHEDULED, Scheduled
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.outcome import Receipt

Conclude = Callable[[Experiment, JobRecord], int]  # prints the end, returns the exit code


class SshBackend:
    """Nodes that are reached by SSH: only the supervisors there know of the job."""

    signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    has_other_heads = False

    def transport(self, record: JobRecord, ssh_config: Path | None) -> Transport:
        recorded = Path(record.ssh_config) if record.ssh_config else None
        strict = record.launch.strict_host_keys
        return HeldTransport(SshConfig(ssh_config or recorded), strict=strict)

    def settle(self, experiment: Experiment, record: JobRecord) -> JobRecord:
        """Conclude the record of a job that ended without its head being able to say so."""
        return record

    def scheduled(self, record: JobRecord) -> Scheduled:
        """Ask the scheduler of the job, if it has one."""
        return UNSCHEDULED

    def begun(
        self, experiment: Experiment, record: JobRecord, say: Say, *, wait: bool
    ) -> JobRecord:
        """Say so if the job is still queued, and with `wait` wait for its start."""
        return record

    def stop(self, experiment: Experiment, record: JobRecord, grace: float) -> list[Receipt] | None:
        """End a job that has to be ended through its scheduler; None: the nodes are asked."""
        return None

    def watch(
        self, experiment: Experiment, record: JobRecord, say: Say, conclude: Conclude
    ) -> int | None:
        """Show a job whose head is elsewhere until it is over; None if its head can be here."""
        return None

    def is_taken_back(self, record: JobRecord) -> bool:
        """Tell whether the scheduler ends the job in order to start it again."""
        return False

    def why_terminated(self, record: JobRecord) -> str:
        """Say why the scheduler ends the job, if it does so by itself."""
        return ""

    def start_again(self, experiment: Experiment, record: JobRecord, say: Say) -> bool:
        """Queue a job again that had to give its nodes back, if there is a queue."""
        return False


class LocalBackend(SshBackend):
    """One machine's part of a job that was typed on each of its machines (run-node)."""

    has_other_heads = True

    def transport(self, record: JobRecord, ssh_config: Path | None) -> Transport:
        return LocalTransport()


class SlurmBackend(SshBackend):
    """A job in an allocation whose head runs in a terminal."""

    def transport(self, record: JobRecord, ssh_config: Path | None) -> Transport:
        if record.slurm_job is None:  # it is being submitted
            return super().transport(record, ssh_config)
        return SrunTransport(record.slurm_job)

    def settle(self, experiment: Experiment, record: JobRecord) -> JobRecord:
        return batch_job.settle(experiment, record)

    def scheduled(self, record: JobRecord) -> Scheduled:
        if record.slurm_job is None:
            return UNSCHEDULED
        text, data = f"Slurm's job {record.slurm_job}", {"job": record.slurm_job}
        if record.over:
            return Scheduled(text, {"slurm": data})
        entry = queue.look_up(record.slurm_job)
        return Scheduled(f"{text}: {entry}", {"slurm": {**data, **asdict(entry)}})

    def why_terminated(self, record: JobRecord) -> str:
        return batch_job.why_terminated(record)

    def start_again(self, experiment: Experiment, record: JobRecord, say: Say) -> bool:
        return batch_job.again_later(experiment, record, say)


class BatchBackend(SlurmBackend):
    """A job whose head is the batch script of a Slurm job."""

    signals = (*SshBackend.signals, signal.SIGUSR1)  # by which Slurm announces the time limit

    def is_taken_back(self, record: JobRecord) -> bool:
        return batch_job.is_taken_back(record)

    def begun(
        self, experiment: Experiment, record: JobRecord, say: Say, *, wait: bool
    ) -> JobRecord:
        if record.state != "queued":
            return record
        say(f"{experiment.name} waits in the queue: {self.scheduled(record).text or 'submitted'}")
        return batch_job.begun(experiment, record) if wait else record

    def stop(self, experiment: Experiment, record: JobRecord, grace: float) -> list[Receipt] | None:
        return None if record.over else batch_job.stop(experiment, record, grace)

    def watch(
        self, experiment: Experiment, record: JobRecord, say: Say, conclude: Conclude
    ) -> int | None:
        return watch_batch(experiment, record, say, conclude, anew=False)


def watch_batch(
    experiment: Experiment, record: JobRecord, say: Say, conclude: Conclude, *, anew: bool
) -> int:
    """Show what the head prints in the Slurm job, until the job is over or the user leaves it."""
    view = batch_job.SlurmJobView(experiment, record, say, anew=anew)
    say(f"{experiment.name} is Slurm's job {record.slurm_job}; d leaves it, Ctrl-C stops it")
    if not view.go():
        say(f"left running; follow it again: orchestrator attach {experiment.name}")
        return EXIT_DONE
    if view.settled:  # its head could not say how it ended
        return conclude(experiment, view.record)
    assert view.record.exit_code is not None
    return view.record.exit_code


def backend_of(record: JobRecord) -> SshBackend:
    if record.batch:
        return BatchBackend()
    if record.slurm_job is not None:
        return SlurmBackend()
    return LocalBackend() if record.part_of else SshBackend()
