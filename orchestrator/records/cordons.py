"""The machines that launches pass over, because somebody said so: `orchestrator node cordon`."""

from __future__ import annotations

import getpass
import time
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from orchestrator.common.errors import UsageError
from orchestrator.protocol.message import Moment, decode
from orchestrator.records import machines as remembered
from orchestrator.records.machines import Place, machine_of

FILE = "cordons.json"
LONGEST = 200  # characters of a reason


@dataclass(frozen=True)
class Cordon:
    """A machine that no job shall run on, why, and since when."""

    machine: str  # host and port, as machine_of() names it
    since: Moment
    reason: str = ""
    by: str = ""  # the login

    @property
    def words(self) -> str:
        """Say why and since when, to be put in brackets."""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"{self.reason}, since {since}" if self.reason else f"since {since}"


def read() -> dict[str, Cordon]:
    """Return every cordon by its machine, the oldest first."""
    known = [cordon(machine, entry) for machine, entry in remembered.read(FILE).items()]
    return {each.machine: each for each in sorted(known, key=lambda each: each.since)}


def words_of(node: Place, cordons: Mapping[str, Cordon]) -> str:
    """Say why a node is cordoned and since when; nothing, if it is not."""
    own = cordons.get(machine_of(node))
    return own.words if own is not None else ""


def cordon(machine: str, entry: object) -> Cordon:
    """Return an entry of the file as a cordon."""
    try:
        return decode(Cordon, {**typing.cast(dict[str, object], entry), "machine": machine})
    except (ValueError, TypeError) as error:
        path = remembered.directory() / FILE
        raise UsageError(f"{path} is not a file of ours: {error}", f"rm {path}") from error


def add(machines: Sequence[str], reason: str) -> list[Cordon]:
    """Cordon machines; one that is already keeps its time and gets the new reason, if any."""
    cordons = []
    with remembered.changing(FILE) as data:
        for machine in machines:
            old = (
                cordon(machine, data[machine]) if machine in data else Cordon(machine, time.time())
            )
            new = replace(old, reason=reason[:LONGEST] or old.reason, by=login())
            data[machine] = asdict(new)
            cordons.append(new)
    return cordons


def remove(machines: Sequence[str]) -> None:
    with remembered.changing(FILE) as data:
        for machine in machines:
            data.pop(machine, None)


def login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without an entry in passwd
        return ""
