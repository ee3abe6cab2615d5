"""Notes in a machine's history that a job failed because of it, or was held up by it."""

from __future__ import annotations

import time

from orchestrator.common.errors import UsageError
from orchestrator.head.follow.failure_kinds import of_a_machine
from orchestrator.records import machines
from orchestrator.records.experiment import JobRecord
from orchestrator.records.machines import Incident, machine_of
from orchestrator.records.outcome import SlowRank, Verdict


def note(experiment: str, record: JobRecord, verdict: Verdict | None) -> str:
    """Remember the node that a verdict names; return what prevents that, if anything does."""
    if verdict is None:
        return ""
    kind, message = verdict.kind, verdict.message
    if not of_a_machine(kind, message):
        return ""
    return noted(experiment, record, verdict.node, verdict.time, kind, message)


def note_slow(experiment: str, record: JobRecord, slow: SlowRank) -> str:
    """Remember the node of who holds the others up; return what prevents that, if anything does."""
    return noted(experiment, record, slow.node, time.time(), slow.cause, slow.text)


def noted(
    experiment: str, record: JobRecord, index: int | None, when: float, kind: str, what: str
) -> str:
    node = next((node for node in record.nodes if node.index == index), None)
    if node is None:
        return ""
    machine = machine_of(node)
    try:
        machines.note(Incident(machine, when, record.job, experiment, kind, what))
    except UsageError as error:
        return f"the history of {machine} is not kept: {error.what}"
    return ""
