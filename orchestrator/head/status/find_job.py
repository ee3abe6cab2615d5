"""Finds a job again by its experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Launch, Where
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.transport import Transport
from orchestrator.head.schedulers.backend import SshBackend, backend_of
from orchestrator.head.screen.output import complain
from orchestrator.head.status import status
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord


@dataclass(frozen=True)
class FoundJob:
    """A job, its experiment's directory, and how its nodes are reached."""

    record: JobRecord
    transport: Transport
    backend: SshBackend
    experiment: Experiment

    def refreshed(self) -> FoundJob:
        """Read the record again; a job that ended without its head is concluded."""
        record = self.backend.settle(self.experiment, self.experiment.read_record())
        return replace(self, record=record)


def find_job(where: Where, wanted: str | None) -> FoundJob:
    experiment = find_experiment(where, wanted)
    if wanted is None and not where.trust_record:
        report_passed_over(where.experiments, experiment)
    if experiment is None:
        raise experiments.missing(where.experiments, wanted)
    record = experiment.read_record()
    if where.trust_record or not record.over:  # then its nodes will be asked
        experiment.check_launched(record)
    backend = backend_of(record)
    record = backend.settle(experiment, record)
    transport = backend.transport(record, where.ssh_config, where.connect_timeout)
    return FoundJob(record, transport, backend, experiment)


def without_record(where: Where) -> SshTransport:
    """Return the way to nodes of which nothing but the node list is known."""
    seconds = where.connect_timeout or Launch.connect_timeout
    return SshTransport(SshConfig(where.ssh_config), timeout=seconds)


def find_experiment(where: Where, wanted: str | None) -> Experiment | None:
    """Find an experiment by its name; without one, the only one that runs, else the newest.

    A record may say for ever that a job runs whose head was killed: then its nodes are asked.
    """
    newest = experiments.find(where.experiments, wanted, trusted=where.trust_record)
    if wanted is not None or newest is None:
        return newest
    unfinished = experiments.unfinished(where.experiments, trusted=where.trust_record)
    read = [(each, each.read_record()) for each in unfinished if not each.elsewhere]
    candidates = [(each, record) for each, record in read if each.is_launched_here(record)]
    if [candidate.path for candidate, _ in candidates] in ([], [newest.path]):
        return newest
    known = [(candidate, runs(candidate, record, where)) for candidate, record in candidates]
    most = max(certainty for _, certainty in known)
    running = [candidate for candidate, certainty in known if certainty == most > NOT]
    if len(running) > 1:
        raise several([candidate.name for candidate in running])
    return running[0] if running else newest


def several(names: Sequence[str]) -> UsageError:
    listed = "".join(f"\n  {name}" for name in names)
    return UsageError(f"{len(names)} jobs run:{listed}", f"name one of them, such as {names[-1]}")


NOT, MAYBE, SURELY = range(3)


def runs(experiment: Experiment, record: JobRecord, where: Where) -> int:
    """Tell whether a job waits or runs; on nodes that do not answer it may."""
    if experiment.followed:
        return SURELY
    backend = backend_of(record)
    record = backend.settle(experiment, record)
    if record.over or record.state == "queued":
        return NOT if record.over else SURELY
    transport = backend.transport(record, where.ssh_config, where.connect_timeout)
    states = status.ask_nodes(transport, record)
    if any(status.lives(state) for state in states):
        return SURELY
    return MAYBE if any(state.state == "unreachable" for state in states) else NOT


def report_passed_over(root: Path, taken: Experiment | None) -> None:
    """Say so if the newest experiment is not the one that is taken.

    One of our own is probably the one that is meant: in its place no other is stopped.
    """
    newer = [
        refused
        for refused in experiments.passed_over(root)
        if taken is None or refused.path.name[-15:] > taken.name[-15:]
    ]
    for refused in newer:
        if refused.ours:
            raise refused
    if newer:
        more = f" (and {len(newer) - 1} more)" if newer[1:] else ""
        complain(f"orchestrator: {newer[-1]}{more}")
