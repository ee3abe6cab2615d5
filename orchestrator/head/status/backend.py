"""Backends: Slurm, the machine where run-node was typed, or only the supervisors know of a job.

A command asks the backend of a job how its nodes are reached, whether it is over, or to stop it; it
never asks which backend that is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import EXIT_DONE
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.subprocess_transport import LocalTransport, SrunTransport
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.stop import Receipt
from orchestrator.head.slurm import batch_job, queue
from orchestrator.head.slurm.queue import QueueEntry
from orchestrator.records.experiment import Experiment, JobRecord

Say = Callable[[str], None]
Conclude = Callable[[Experiment, JobRecord], int]  # tells the end, returns the exit code


class SshBackend:
    """Nodes that are reached by SSH: only the supervisors there know of the job."""

    def transport(self, record: JobRecord, ssh_config: Path | None) -> Transport:
        recorded = Path(record.ssh_config) if record.ssh_config else None
        strict = record.launch.strict_host_keys
        return SshTransport(SshConfig(ssh_config or recorded), strict=strict)

    def settle(self, place: Experiment, record: JobRecord) -> JobRecord:
        """Conclude the record of a job that ended without its head being able to say so."""
        return record

    def queue_entry(self, record: JobRecord) -> QueueEntry | None:
        """Return the state of a job that a scheduler holds."""
        return None

    def begun(self, place: Experiment, record: JobRecord, say: Say, *, wait: bool) -> JobRecord:
        """Say that the job is still queued, where it is, and with `wait` wait for its start."""
        return record

    def stop(self, place: Experiment, record: JobRecord, grace: float) -> list[Receipt] | None:
        """End a job that has to be ended through its scheduler; None: the nodes are asked."""
        return None

    def watch(
        self, place: Experiment, record: JobRecord, say: Say, conclude: Conclude
    ) -> int | None:
        """Show a job whose head is elsewhere until it is over; None: its head can be here."""
        return None

    def start_again(self, place: Experiment, record: JobRecord, say: Say) -> bool:
        """Queue a job again that had to stop for a time limit, if there is a queue."""
        return False


class LocalBackend(SshBackend):
    """One machine's part of a job that was typed on each of its machines (run-node)."""

    def transport(self, record: JobRecord, ssh_config: Path | None) -> Transport:
        return LocalTransport()


class SlurmBackend(SshBackend):
    """A job in an allocation whose head runs in a terminal."""

    def transport(self, record: JobRecord, ssh_config: Path | None) -> Transport:
        if record.slurm_job is None:  # it is being submitted
            return super().transport(record, ssh_config)
        return SrunTransport(record.slurm_job)

    def settle(self, place: Experiment, record: JobRecord) -> JobRecord:
        return batch_job.settle(place, record)

    def queue_entry(self, record: JobRecord) -> QueueEntry | None:
        if record.over or record.slurm_job is None:
            return None
        return queue.look_up(record.slurm_job)

    def start_again(self, place: Experiment, record: JobRecord, say: Say) -> bool:
        return batch_job.again_later(place, record, say)


class BatchBackend(SlurmBackend):
    """A job whose head is the batch script of a Slurm job."""

    def begun(self, place: Experiment, record: JobRecord, say: Say, *, wait: bool) -> JobRecord:
        if record.state != "queued":
            return record
        say(f"{place.name} waits in Slurm's queue: {self.queue_entry(record)}")
        return batch_job.begun(place, record) if wait else record

    def stop(self, place: Experiment, record: JobRecord, grace: float) -> list[Receipt] | None:
        return None if record.over else batch_job.stop(place, record, grace)

    def watch(
        self, place: Experiment, record: JobRecord, say: Say, conclude: Conclude
    ) -> int | None:
        return watch_batch(place, record, say, conclude, anew=False)


def watch_batch(
    place: Experiment, record: JobRecord, say: Say, conclude: Conclude, *, anew: bool
) -> int:
    """Show what the head prints in the Slurm job, until the job is over or the user leaves it."""
    view = batch_job.SlurmJobView(place, record, say, anew=anew)
    say(f"{place.name} is Slurm's job {record.slurm_job}; d leaves it, Ctrl-C stops it")
    if not view.go():
        say(f"left running; follow it again: orchestrator attach {place.name}")
        return EXIT_DONE
    if view.settled:  # its head could not say how it ended
        return conclude(place, view.record)
    assert view.record.exit_code is not None
    return view.record.exit_code


def backend_of(record: JobRecord) -> SshBackend:
    if record.batch:
        return BatchBackend()
    if record.slurm_job is not None:
        return SlurmBackend()
    return LocalBackend() if record.part_of else SshBackend()
