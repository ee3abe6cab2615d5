"""Parts of a record that tell how a job went: verdict, slow ranks, receipts of its end."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.protocol.message import Message, Nonsense, decode_value, parse_object
from orchestrator.protocol.requests.follow import StopReceipt


@dataclass(frozen=True)
class Cause:
    """One thing that went wrong on a node, or on no single one, at a time of the head's clock."""

    node: int | None = None
    node_name: str = ""
    rank: int | None = None
    time: float = 0.0
    # One of head/follow/failure_kinds.py.
    kind: str = ""
    message: str = ""
    traceback: str = ""
    # The last line of the user's own code, as file:line in function.
    where: str = ""
    fix: str = ""


@dataclass(frozen=True)
class JobVerdict(Cause):
    """Why a job failed: the first cause and its consequences."""

    title: str = ""
    # Ranks that failed in the same way.
    same: tuple[int, ...] = ()
    # Further ranks that failed by themselves, in another way than the first one.
    also: tuple[Cause, ...] = ()
    # The number of other ranks that ended because of it.
    others: int = 0


class SlowRank(Message):
    """A rank that held the others up, or whose disk accepted no checkpoint."""

    cause: str = ""
    rank: int = 0
    node: int = 0
    step: int | None = None
    text: str = ""
    time: float | None = None


class Receipt(StopReceipt):
    """How one job ended on one node, or why that is not known."""

    node: str
    error: str = ""
    # What to do about the error.
    fix: str = ""
    # False if its part never began there, and never will.
    began: bool = True

    @property
    def proved(self) -> bool:
        told = self.known or not self.began
        return told and not (self.error or self.left or self.gpu_memory)


@dataclass(frozen=True)
class Head:
    """The process that follows a job, and the time at which it began to."""

    host: str = "?"
    pid: int = 0
    since: float = 0.0
    # A later head may replace a head in the background.
    background: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "a head that starts"

    @staticmethod
    def read(text: bytes) -> Head:
        """Return the head that wrote this text. A head that is starting has written none yet."""
        try:
            return decode_value(Head, parse_object(text), newer=True)
        except Nonsense:
            return Head()
