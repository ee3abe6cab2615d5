"""The news of one node that its follower passes on to the run: a class for each kind."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.head.transfer.fetch.home import CodeOutputs
from orchestrator.protocol.events import Event
from orchestrator.protocol.requests.follow import Paces, Stuck
from orchestrator.protocol.requests.machine import Dialed, Listening


@dataclass(frozen=True)
class News:
    """Something that came from a node, or happened to the connection to it."""

    node: int


@dataclass(frozen=True)
class Happened(News):
    """The node's supervisor wrote an event."""

    event: Event


@dataclass(frozen=True)
class Grew(News):
    """The local files have more than before."""


@dataclass(frozen=True)
class Lost(News):
    """The connection broke; the follower tries to come back."""

    why: str
    silent: float  # seconds since it was last heard of
    outside: bool = False  # the machine answers, and the container of the job cannot be entered


@dataclass(frozen=True)
class Connected(News):
    """The stream begins, or begins again. `clock`: the node's clock minus ours."""

    clock: float


@dataclass(frozen=True)
class ClockRead(News):
    """The clock's offset is known more precisely."""

    clock: float


@dataclass(frozen=True)
class Answer(News):
    """The node answers a question: what its ranks are doing, or which address it reaches."""

    answer: Stuck | Paces | Listening | Dialed


@dataclass(frozen=True)
class OutputsStay(News):
    """Some outputs could not be fetched."""

    what: str


@dataclass(frozen=True)
class WroteBeside(News):
    """The program wrote where it ran, into a snapshot of its code."""

    what: CodeOutputs


@dataclass(frozen=True)
class DiskFull(News):
    """The head's disk has no room for the log."""


@dataclass(frozen=True)
class Over(News):
    """The job has ended there, and all files are here."""


@dataclass(frozen=True)
class Unknown(News):
    """The node has no such job."""

    why: str


@dataclass(frozen=True)
class Failed(News):
    """The follower cannot go on: a version of the job that cannot be followed, or a defect."""

    error: Exception
