"""Notes in a machine's history that a job failed because of it."""

from __future__ import annotations

from typing import Any

from orchestrator.errors import UsageError
from orchestrator.head.follow.failure_kinds import of_a_machine
from orchestrator.records import history
from orchestrator.records.experiment import JobRecord
from orchestrator.records.history import Incident
from orchestrator.records.machine_name import machine_of


def note(experiment: str, record: JobRecord, verdict: dict[str, Any] | None) -> str:
    """Remember the node that a verdict names; return what prevents that, if anything does."""
    if verdict is None:
        return ""
    kind, message = verdict["kind"], verdict["message"]
    node = next((node for node in record.nodes if node.index == verdict["node"]), None)
    if node is None or not of_a_machine(kind, message):
        return ""
    machine = machine_of(node)
    try:
        history.note(Incident(machine, verdict["time"], record.job, experiment, kind, message))
    except UsageError as error:
        return f"the history of {machine} is not kept: {error.what}"
    return ""
