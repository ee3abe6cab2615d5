"""Notes in a machine's history that a job failed because of it, or was held up by it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.head.follow.failure_kinds import of_a_machine
from orchestrator.records import history
from orchestrator.records.experiment import JobRecord
from orchestrator.records.history import Incident
from orchestrator.records.machines import machine_of


def note(experiment: str, record: JobRecord, verdict: dict[str, Any] | None) -> str:
    """Remember the node that a verdict names; return what prevents that, if anything does."""
    if verdict is None:
        return ""
    kind, message = verdict["kind"], verdict["message"]
    if not of_a_machine(kind, message):
        return ""
    return noted(experiment, record, verdict["node"], verdict["time"], kind, message)


def note_slow(experiment: str, record: JobRecord, found: Mapping[str, Any]) -> str:
    """Remember the node of who holds the others up; return what prevents that, if anything does."""
    node, cause, text = found["node"], found["cause"], found["text"]
    return noted(experiment, record, node, time.time(), cause, text)


def noted(experiment: str, record: JobRecord, index: int, when: float, kind: str, what: str) -> str:
    node = next((node for node in record.nodes if node.index == index), None)
    if node is None:
        return ""
    machine = machine_of(node)
    try:
        history.note(Incident(machine, when, record.job, experiment, kind, what))
    except UsageError as error:
        return f"the history of {machine} is not kept: {error.what}"
    return ""
