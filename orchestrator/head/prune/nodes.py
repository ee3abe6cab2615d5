"""Ask the machines on which jobs ran what lives there, or have them remove what the jobs left.

Jobs of one list share their machines, so runs are gathered by machine first: 64 nodes are 64
connections, for however many jobs. The nodes' side is node/job/cleanup.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import ask_once
from orchestrator.head.connect.transport import Transport
from orchestrator.head.schedulers.backend import backend_of
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.request import Request
from orchestrator.records.experiment import JobRecord, NodeRecord

A = TypeVar("A", bound=Message)
Run = tuple[str, int]  # a job and the index of a node in it
Machine = tuple[NodeRecord, Transport, dict[Run, None]]  # its runs are in order, each once


def ask(
    request: type[Request[A]], records: Sequence[JobRecord], ssh_config: Path | None, seconds: float
) -> tuple[list[A], dict[Run, str]]:
    """Ask once on every machine about the runs of these jobs there.

    Return the answers, and the runs about which nobody could be asked, each with the reason.
    """
    machines = by_machine(records, ssh_config)

    def ask_machine(machine: Machine) -> A:
        node, transport, runs = machine
        return ask_once(transport, node, request(runs=tuple(runs)), seconds)

    answers, unreached = [], dict[Run, str]()
    for (*_, runs), answer in zip(machines, fleet.everywhere(machines, ask_machine), strict=True):
        if isinstance(answer, OrchestratorError):
            unreached.update(dict.fromkeys(runs, answer.what))
        else:
            answers.append(answer)
    return answers, unreached


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
                machines[key] = node, backend.transport(record, ssh_config), {}
            machines[key][2].update(dict.fromkeys(runs_of(record, node)))
    return list(machines.values())


def runs_of(record: JobRecord, node: NodeRecord) -> Iterator[Run]:
    """Yield the parts of a job that a node had, in each of its attempts."""
    is_spare = record.attempts and node in record.spares
    yield record.attempts[0].job if is_spare else record.job, node.index
    for attempt in record.attempts:
        for index, name in enumerate(attempt.nodes):
            if name == node.name:
                yield attempt.job, index
