"""Names what a head asks about processes that wait for a job."""

from __future__ import annotations

from orchestrator.protocol.message import Count, Message, Moment
from orchestrator.protocol.requests.request import Request


class WarmPair(Message):
    """A supervisor and its agent that wait for a job."""

    key: str
    since: Moment
    seconds_left: float  # until they leave by themselves
    ready: bool  # torch is imported
    pids: tuple[int, ...]
    memory: Count  # bytes that nobody else shares
    python: str
    variables: dict[str, str]  # that a job must have, too, to start from them
    skipped: tuple[str, ...]  # packages that every rank imports itself, and why is in the guide


class WarmPairs(Message):
    """All of this user's on this node."""

    pairs: tuple[WarmPair, ...]
    time: Moment  # by the clock of this node, as all times in it


class Warm(Request[WarmPairs], do="warm"):
    """List the processes that wait for a job."""


class WarmEnd(Message):
    """The proof that a pair is gone: PID -> name of what was ended, and of what does not go."""

    key: str
    ended: dict[int, str]
    left: dict[int, str]


class WarmEnds(Message):
    """One for each pair that was there."""

    ends: tuple[WarmEnd, ...]


class WarmOff(Request[WarmEnds], do="warm_off"):
    """End the processes that wait for a job."""
