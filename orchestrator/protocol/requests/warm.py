"""Names what a head asks about processes that wait for a job."""

from __future__ import annotations

from orchestrator.protocol.message import Count, Message, Moment
from orchestrator.protocol.requests.request import Request


class StandbyState(Message):
    """A process with torch that waits for a job."""

    key: str
    since: Moment
    seconds_left: float  # until it leaves by itself
    ready: bool  # torch is imported
    pid: int
    memory: Count  # bytes that no other process shares
    python: str


class StandbyStates(Message):
    """All of this user's on this node."""

    standbys: tuple[StandbyState, ...]
    time: Moment  # by the clock of this node, as all times in it


class Warm(Request[StandbyStates], do="warm"):
    """List the processes that wait for a job."""


class StandbyEnds(Message):
    """The proof that they are gone: PIDs of those that ended, and of those that do not end."""

    ended: tuple[int, ...]
    left: tuple[int, ...]


class WarmOff(Request[StandbyEnds], do="warm_off"):
    """End the processes that wait for a job."""
