"""Remembers machines for this login: the name of each, and which of them failed.

It is kept in small JSON files under ~/.orchestrator. What they say decides where jobs run, so they
count only if nobody else can write them.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.permissions import others
from orchestrator.protocol.message import Moment, Nonsense, decode, encode, parse

T = TypeVar("T")

LARGEST_BYTES = 16 << 20
HISTORY = "history.json"
MOST_INCIDENTS = 2000  # the oldest go first
LONGEST_TEXT_CHARACTERS = 300  # of what happened


class Place(Protocol):
    """A node of a list or of a record."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int | None: ...


def machine_of(node: Place) -> str:
    """Write host:port, or [v6]:port; the host alone where the list gives no port."""
    host = node.host.lower()
    if ":" in host:
        host = canonical(host)
    if node.port is None:
        return host
    return f"[{host}]:{node.port}" if ":" in host else f"{host}:{node.port}"


def canonical(host: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        return host


# -- the files --------------------------------------------------------------------------------


def directory() -> Path:
    return Path(files.our_directory())


def read(name: str, kind: type[T]) -> T:
    """Return what the file holds, as of an empty one where there is none.

    UsageError, if it does not count.
    """
    path = directory() / name
    try:
        with files.open_plain(path) as file:
            problem = others(os.fstat(file.fileno()))
            text = file.read(LARGEST_BYTES)
    except FileNotFoundError:
        problem, text = "", b"{}"
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if problem:
        raise UsageError(f"{path} {problem}, and is not believed", f"look at it, then: rm {path}")
    try:
        return decode(kind, parse(text), newer=True)
    except Nonsense as error:
        raise UsageError(f"{path} is not a file of ours: {error}", f"rm {path}") from error


@contextlib.contextmanager
def changing(name: str, kind: type[T]) -> Iterator[T]:
    """Give what the file holds to be changed, and replace the file with that; one at a time."""
    path = directory() / name
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(lock):
            fcntl.flock(lock, fcntl.LOCK_EX)
            data = read(name, kind)
            yield data
            files.replace(path, json.dumps(encode(data), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


# -- what happened on them ----------------------------------------------------------------------


@dataclass(frozen=True)
class Incident:
    """One failure of a job that a machine was named for, or one time that it was slow.

    Only what a machine can cause is kept: an exception in the program says nothing about the node
    that its rank happened to run on.
    """

    machine: str  # host and port, as machine_of() names it
    time: Moment
    job: str
    experiment: str
    kind: str  # as the verdict has it: lost, signal, out_of_memory, link, ...
    what: str


@dataclass(frozen=True)
class History:
    """The content of its file."""

    incidents: list[Incident] = field(default_factory=list)


def note(incident: Incident) -> None:
    """Remember an incident, unless another head has seen the same end; UsageError: it cannot be."""

    def key(known: Incident) -> tuple[str, ...]:
        return known.machine, known.job, known.kind

    first_line = (incident.what.splitlines() or [""])[0]
    with changing(HISTORY, History) as history:
        if key(incident) not in map(key, history.incidents):
            history.incidents.append(replace(incident, what=first_line[:LONGEST_TEXT_CHARACTERS]))
        del history.incidents[:-MOST_INCIDENTS]


def incidents() -> list[Incident]:
    """Return all incidents, the oldest first."""
    return sorted(read(HISTORY, History).incidents, key=lambda incident: incident.time)


def by_machine(machines: Iterable[str]) -> Mapping[str, list[Incident]]:
    """Return the incidents of each of these machines, and of all others that had any."""
    known: dict[str, list[Incident]] = {machine: [] for machine in machines}
    for incident in incidents():
        known.setdefault(incident.machine, []).append(incident)
    return known
