"""Says, in a record, how a job went: its verdict, who held it up, the proof of its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.protocol.events import UNSAVED
from orchestrator.protocol.message import Message, Nonsense, decode, parse
from orchestrator.protocol.requests.follow import PortState


@dataclass(frozen=True)
class OtherFailure:
    """A rank that failed by itself, too, and in another way."""

    rank: int | None = None
    node: int | None = None
    message: str = ""


@dataclass(frozen=True)
class Cause:
    """One thing that went wrong on a node, or on no single one, at a time of the head's clock."""

    node: int | None = None
    node_name: str = ""
    rank: int | None = None
    time: float = 0.0
    kind: str = ""  # one of head/follow/failure_kinds.py
    message: str = ""
    traceback: str = ""
    where: str = ""  # the user's own line: file:line in function
    fix: str = ""  # what to do


@dataclass(frozen=True)
class JobVerdict(Cause):
    """Why a job did not end well: the first cause, and what came of it."""

    title: str = ""
    same: tuple[int, ...] = ()  # ranks that failed in the same way
    also: tuple[OtherFailure, ...] = ()
    others: int = 0  # more ranks that ended because of it


class SlowRank(Message):
    """Who held the others up, and by what; or whose disk took no checkpoint."""

    cause: str = ""
    rank: int = 0
    node: int = 0
    step: int | None = None
    text: str = ""
    time: float | None = None

    @property
    def holds_up(self) -> bool:
        return self.cause != UNSAVED


@dataclass(frozen=True)
class Receipt:
    """One node's end of one job. Without an error: what was ended there, and what is left."""

    node: str
    job: str
    took: float = 0.0
    user: str = ""  # another's job
    ended: dict[int, str] = field(default_factory=dict)  # PID -> name: what lived before
    killed: dict[int, str] = field(default_factory=dict)  # of these, what did not go when asked
    left: tuple[int, ...] = ()
    gpu_memory: dict[int, str] = field(default_factory=dict)  # what dead processes still hold
    gpu_unknown: str = ""
    port: PortState | None = None  # the master's
    shared_memory: tuple[str, ...] = ()  # in /dev/shm: the job's, and not removed
    error: str = ""
    fix: str = ""  # of the error
    experiment: str = ""  # its directory, where nothing was ended, only shown
    known: bool = True  # else the node has neither files nor processes of it, for this login
    runs: str = ""  # names the directory for jobs there: of this login, on this machine
    began: bool = True  # else its part never began there, and never will

    @property
    def proved(self) -> bool:
        told = self.known or not self.began
        return told and not (self.error or self.left or self.gpu_memory)


@dataclass(frozen=True)
class Head:
    """A process that follows a job, and since when."""

    host: str = "?"
    pid: int = 0
    since: float = 0.0
    background: bool = False  # whoever comes next may take over from it

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "a head that starts"

    @staticmethod
    def read(text: bytes) -> Head:
        """Return who wrote this into a file of an experiment; one that starts has not yet."""
        try:
            return decode(Head, parse(text), newer=True)
        except Nonsense:
            return Head()
