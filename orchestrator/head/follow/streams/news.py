"""The kinds of news that the follower of a node posts to its job."""

from __future__ import annotations

from orchestrator.head.transfer.home import CodeOutputs
from orchestrator.protocol.events import Event
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import StopReceipt, Stuck
from orchestrator.protocol.requests.machine import Dialed


class News(Message, kw_only=False):
    """A message from a node, or a change of the connection to it."""

    node: int


class Happened(News, kw_only=False):
    """The node's supervisor wrote an event."""

    event: Event


class Grew(News, kw_only=False):
    """The local files have more than before."""


class Lost(News, kw_only=False):
    """The connection broke; the follower tries to come back."""

    why: str
    silent: float  # seconds since it was last heard of


class Connected(News, kw_only=False):
    """The stream begins, or begins again. `clock`: the node's clock minus ours."""

    clock: float


class ClockRead(News, kw_only=False):
    """The clock's offset is known more precisely."""

    clock: float


class Answer(News, kw_only=False):
    """The node answers a question of a monitor."""

    answer: Stuck | Dialed


class Warned(News, kw_only=False):
    """Something stays there, which is to be said: outputs, or what may be of the job."""

    what: str
    receipt: StopReceipt | None = None


class Wrote(News, kw_only=False):
    """The outputs of a node are here, also those in the snapshot of the code."""

    with_code: CodeOutputs | None
    own_disk: bool


class DiskFull(News, kw_only=False):
    """The head's disk has no room for the log."""


class Over(News, kw_only=False):
    """The job has ended there, and all files are here; or the node has no such job."""

    why: str = "its supervisor was killed"  # where its last event is missing


class Failed(News, kw_only=False):
    """The follower cannot go on: a version of the job that cannot be followed, or a defect."""

    error: Exception
