"""Find and remove what jobs left on their nodes, through one connection per machine.

The nodes' side is node/job/cleanup.py. Jobs of one list share their machines, so the requests are
gathered by machine first: 64 nodes are 64 connections, for however many jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import ask_once
from orchestrator.head.connect.transport import Transport
from orchestrator.head.status.backend import backend_of
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import Living, Remove
from orchestrator.protocol.requests.request import Request
from orchestrator.records.experiment import JobRecord, NodeRecord

LIVING_SECONDS = 60.0
REMOVE_SECONDS = 600.0  # a node's slow disk, a million files

A = TypeVar("A", bound=Message)
Run = tuple[str, int]  # a job and the index of a node in it


@dataclass(frozen=True)
class Machine:
    """A machine that jobs ran on: how it is reached, and their runs there."""

    node: NodeRecord
    transport: Transport
    runs: dict[Run, None]  # in order, each once


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
    machines = by_machine(records, ssh_config)
    answers = ask(machines, lambda runs: Living(runs=runs), LIVING_SECONDS)
    living: set[Run] = set()
    unreached: dict[Run, str] = {}
    for machine, answer in zip(machines, answers, strict=True):
        if isinstance(answer, OrchestratorError):
            unreached.update(dict.fromkeys(machine.runs, answer.what))
        else:
            living.update(answer.living)
    return Survey(frozenset(living), unreached)


def remove(records: Sequence[JobRecord], ssh_config: Path | None) -> Removed:
    """Remove the run directories of these jobs on all their nodes."""
    machines = by_machine(records, ssh_config)
    answers = ask(machines, lambda runs: Remove(runs=runs), REMOVE_SECONDS)
    problems: dict[Run, str] = {}
    unreached: dict[Run, str] = {}
    freed = libraries = 0
    for machine, answer in zip(machines, answers, strict=True):
        if isinstance(answer, OrchestratorError):
            unreached.update(dict.fromkeys(machine.runs, answer.what))
            continue
        outcomes = {(run.job, run.node): run.problem for run in answer.runs}
        problems.update({run: problem for run, problem in outcomes.items() if problem})
        freed += answer.freed
        libraries += answer.libraries
    return Removed(problems, unreached, freed, libraries)


def by_machine(records: Sequence[JobRecord], ssh_config: Path | None) -> list[Machine]:
    machines: dict[object, Machine] = {}
    for record in records:
        if record.scheduled:
            continue  # its nodes were a scheduler's, and may belong to somebody else now
        backend = backend_of(record)
        how = (type(backend), ssh_config or record.ssh_config, record.launch.strict_host_keys)
        for node in (*record.nodes, *record.spares):
            key = (*how, node.host, node.user, node.port, node.python, node.activate, node.wrap)
            if key not in machines:
                machines[key] = Machine(node, backend.transport(record, ssh_config), {})
            job = (
                record.attempts[0].job if record.attempts and node in record.spares else record.job
            )
            machines[key].runs[job, node.index] = None
            for attempt in record.attempts:
                for index, name in enumerate(attempt.nodes):
                    if name == node.name:
                        machines[key].runs[attempt.job, index] = None
    return list(machines.values())


def ask(
    machines: Sequence[Machine],
    request: Callable[[tuple[Run, ...]], Request[A]],
    timeout: float,
) -> list[A | OrchestratorError]:
    def ask_machine(machine: Machine) -> A:
        return ask_once(machine.transport, machine.node, request(tuple(machine.runs)), timeout)

    return fleet.everywhere(machines, ask_machine)
