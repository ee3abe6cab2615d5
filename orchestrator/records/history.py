"""Remembers which machines failed or were slow in this login's jobs: `doctor --history`.

Only failures that a machine can cause are kept: an exception in the program says nothing about the
node that its rank happened to run on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from orchestrator.common.errors import UsageError
from orchestrator.protocol.message import Moment, decode
from orchestrator.records import machines as remembered

FILE = "history.json"
MOST = 2000  # incidents; the oldest go first
LONGEST = 300  # characters of what happened


@dataclass(frozen=True)
class Incident:
    """One failure of a job that a machine was named for, or one time that it was slow."""

    machine: str  # host and port, as machine_of() names it
    time: Moment
    job: str
    experiment: str
    kind: str  # as the verdict has it: lost, signal, out_of_memory, link, ...
    what: str


def note(incident: Incident) -> None:
    """Remember an incident; UsageError says why that cannot be."""
    with remembered.changing(FILE) as data:
        incidents = data.setdefault("incidents", [])
        if not isinstance(incidents, list):
            raise no_file_of_ours("it has no list of incidents")
        same = (incident.machine, incident.job, incident.kind)
        if any(isinstance(old, dict) and key(old) == same for old in incidents):
            return  # another head has seen the same end
        first_line = (incident.what.splitlines() or [""])[0]
        incidents.append({**asdict(incident), "what": first_line[:LONGEST]})
        del incidents[:-MOST]


def key(entry: Mapping[str, object]) -> tuple[object, object, object]:
    return entry.get("machine"), entry.get("job"), entry.get("kind")


def read() -> list[Incident]:
    """Return all incidents, the oldest first."""
    entries = remembered.read(FILE).get("incidents", [])
    try:
        incidents = [decode(Incident, entry, newer=True) for entry in entries]
    except (ValueError, TypeError) as error:
        raise no_file_of_ours(error) from error
    return sorted(incidents, key=lambda incident: incident.time)


def by_machine(
    incidents: Iterable[Incident], machines: Iterable[str]
) -> Mapping[str, list[Incident]]:
    """Return the incidents of each of these machines, and of all others that had any."""
    known: dict[str, list[Incident]] = {machine: [] for machine in machines}
    for incident in incidents:
        known.setdefault(incident.machine, []).append(incident)
    return known


def no_file_of_ours(why: object) -> UsageError:
    path = remembered.directory() / FILE
    return UsageError(f"{path} is not a file of ours: {why}", f"rm {path}")
