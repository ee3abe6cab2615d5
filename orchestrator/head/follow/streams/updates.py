"""The messages that the follower of a node posts to its job."""

from __future__ import annotations

from orchestrator.head.transfer.home import CodeOutputs
from orchestrator.protocol.events import Event
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import StopReceipt, Stuck
from orchestrator.protocol.requests.machine import Dialed


class NodeUpdate(Message, kw_only=False):
    """A message from a node, or a change of the connection to it."""

    node: int


class Happened(NodeUpdate, kw_only=False):
    """The node's supervisor wrote an event."""

    event: Event


class Grew(NodeUpdate, kw_only=False):
    """The local copies of the logs have grown."""


class Lost(NodeUpdate, kw_only=False):
    """The connection broke; the follower tries to reconnect."""

    why: str
    # The seconds since the node was last heard.
    silent: float


class Connected(NodeUpdate, kw_only=False):
    """The stream begins, or goes on: the clock is read again, as it may be set at any time."""

    # The node's clock minus this machine's.
    clock: float


class Answer(NodeUpdate, kw_only=False):
    """The node answers a request of a monitor."""

    answer: Stuck | Dialed


class Warned(NodeUpdate, kw_only=False):
    """A warning on outputs or processes of the job that are left on the node."""

    what: str
    receipt: StopReceipt | None = None


class Wrote(NodeUpdate, kw_only=False):
    """The ranks of the node wrote files beside their code."""

    with_code: CodeOutputs


class DiskFull(NodeUpdate, kw_only=False):
    """The head's disk has no room for the log."""


class Over(NodeUpdate, kw_only=False):
    """The job has ended on the node and all files were fetched, or the node has no such job."""

    # The reason if the supervisor's last event is missing.
    why: str = "its supervisor was killed"


class Failed(NodeUpdate, kw_only=False):
    """The follower cannot go on: the job has an unsupported version, or there is a defect."""

    error: Exception
