"""Find and remove what jobs left on their nodes, through one connection per machine.

The nodes' side is node/job/cleanup.py. Jobs of one list share their machines, so the requests are
gathered by machine first: 64 nodes are 64 connections, for however many jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.subprocess_transport import LocalTransport
from orchestrator.head.connect.transport import Transport
from orchestrator.protocol.message import Message
from orchestrator.protocol.messages import Living, Remove, Request
from orchestrator.records.experiment import JobRecord

LIVING_SECONDS = 60.0
REMOVE_SECONDS = 600.0  # a node's slow disk, a million files

A = TypeVar("A", bound=Message)
Run = tuple[str, int]  # a job and the index of a node in it


@dataclass(frozen=True)
class Machine:
    """How one machine of a job is reached, from the job's record."""

    host: str
    user: str | None
    port: int | None
    python: str
    ssh_config: Path | None
    strict: bool
    here: bool = False  # this machine, where somebody typed run-node


@dataclass(frozen=True)
class Survey:
    """The runs that live, and those that cannot be asked about; all others are over."""

    living: frozenset[Run]
    unreached: Mapping[Run, str]  # and why


@dataclass(frozen=True)
class Removed:
    problems: Mapping[Run, str]  # what could not be removed, and why
    unreached: Mapping[Run, str]
    freed: int
    libraries: int


def survey(records: Sequence[JobRecord], ssh_config: Path | None) -> Survey:
    """Find the runs of these jobs that live, and the nodes where that cannot be known."""
    wanted = by_machine(records, ssh_config)
    answers = ask(wanted, lambda runs: Living(runs=runs), LIVING_SECONDS)
    living: set[Run] = set()
    unreached: dict[Run, str] = {}
    for machine, answer in answers.items():
        if isinstance(answer, OrchestratorError):
            unreached.update(dict.fromkeys(wanted[machine], answer.what))
        else:
            living.update(answer.living)
    return Survey(frozenset(living), unreached)


def remove(records: Sequence[JobRecord], ssh_config: Path | None) -> Removed:
    """Remove the run directories of these jobs on all their nodes."""
    wanted = by_machine(records, ssh_config)
    answers = ask(wanted, lambda runs: Remove(runs=runs), REMOVE_SECONDS)
    problems: dict[Run, str] = {}
    unreached: dict[Run, str] = {}
    freed = libraries = 0
    for machine, answer in answers.items():
        if isinstance(answer, OrchestratorError):
            unreached.update(dict.fromkeys(wanted[machine], answer.what))
            continue
        outcomes = {(run.job, run.node): run.problem for run in answer.runs}
        problems.update({run: problem for run, problem in outcomes.items() if problem})
        freed += answer.freed
        libraries += answer.libraries
    return Removed(problems, unreached, freed, libraries)


def by_machine(
    records: Sequence[JobRecord], ssh_config: Path | None
) -> dict[Machine, tuple[Run, ...]]:
    machines: dict[Machine, dict[Run, None]] = {}
    for record in records:
        if record.slurm_job is not None:
            continue  # its nodes were Slurm's, and may belong to somebody else now
        file = ssh_config or (Path(record.ssh_config) if record.ssh_config else None)
        for node in record.nodes:
            machine = Machine(
                *(
                    node.host,
                    node.user,
                    node.port,
                    node.python,
                    file,
                    record.launch.strict_host_keys,
                ),
                here=bool(record.part_of),
            )
            machines.setdefault(machine, {})[record.job, node.index] = None
    return {machine: tuple(runs) for machine, runs in machines.items()}


def ask(
    wanted: Mapping[Machine, tuple[Run, ...]],
    request: Callable[[tuple[Run, ...]], Request[A]],
    timeout: float,
) -> dict[Machine, A | OrchestratorError]:
    def ask_machine(machine: Machine) -> A:
        config = SshConfig(machine.ssh_config)
        ssh: Transport = (
            LocalTransport() if machine.here else SshTransport(config, strict=machine.strict)
        )
        destination = ssh.config.destination(machine.host, machine.user, machine.port)
        connection = ssh.connect(destination)
        try:
            channel = fleet.open_channel(connection, machine.python, ssh.timeout)
            return channel.ask(request(wanted[machine]), timeout)
        finally:
            connection.close()

    machines = list(wanted)
    return dict(zip(machines, fleet.everywhere(machines, ask_machine), strict=True))
