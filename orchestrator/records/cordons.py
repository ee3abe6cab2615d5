"""The machines that launches pass over, as `orchestrator nodes --cordon` asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.protocol.message import Moment
from orchestrator.records import machines as remembered
from orchestrator.records.machines import ListedNode, machine_of

FILE = "cordons.json"
# The most characters of a reason.
LONGEST_CHARACTERS = 200


@dataclass(frozen=True)
class Cordon:
    """A machine that launches skip, with the reason and the time of the cordon."""

    # Host and port, as machine_of() formats them.
    machine: str
    since: Moment
    reason: str = ""

    @property
    def words(self) -> str:
        """Return the reason and the time, without brackets."""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"{self.reason}, since {since}" if self.reason else f"since {since}"


# Keyed by machine.
Cordons = dict[str, Cordon]


def read() -> dict[str, Cordon]:
    """Return all cordons by machine, the oldest first."""
    known = remembered.read(FILE, Cordons)
    return dict(sorted(known.items(), key=lambda entry: entry[1].since))


def words_of(node: ListedNode, cordons: Mapping[str, Cordon]) -> str:
    """Return why and since when a node is cordoned, or an empty string if it is not."""
    cordon = cordons.get(machine_of(node))
    return cordon.words if cordon is not None else ""


def add(machines: Sequence[str], reason: str) -> list[Cordon]:
    """Cordon machines. A cordon that exists keeps its time and gets the new reason, if any."""
    cordons = []
    with remembered.changing(FILE, Cordons) as known:
        for machine in machines:
            old = known.get(machine) or Cordon(machine, time.time())
            new = replace(old, reason=reason[:LONGEST_CHARACTERS] or old.reason)
            known[machine] = new
            cordons.append(new)
    return cordons


def remove(machines: Sequence[str]) -> None:
    with remembered.changing(FILE, Cordons) as known:
        for machine in machines:
            known.pop(machine, None)
