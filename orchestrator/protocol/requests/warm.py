"""A head's requests about standby processes."""

from __future__ import annotations

from orchestrator.protocol.message import Count, Message, NodeTime
from orchestrator.protocol.requests.request import Request


class StandbyState(Message):
    """A standby process: it has imported torch and waits for a job."""

    since: NodeTime
    # Seconds until it exits by itself.
    seconds_left: float
    # True once torch is imported.
    ready: bool
    pid: int
    # Bytes that no other process shares.
    memory: Count
    python: str


class StandbyStates(Message):
    """All standbys of this user on this node."""

    standbys: tuple[StandbyState, ...]


class Warm(Request[StandbyStates], do="warm"):
    """List the standby processes."""


class StandbyEnds(Message):
    """The proof of their end: the PIDs that ended, and those that survive."""

    ended: tuple[int, ...]
    left: tuple[int, ...]


class WarmOff(Request[StandbyEnds], do="warm_off"):
    """End the standby processes."""
