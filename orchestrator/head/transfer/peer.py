"""A node that gives or takes files, over a channel on which one thing is asked at a time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import Reached
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.request import Request

A = TypeVar("A", bound=Message)


@dataclass
class Moved:
    """The files that one node was sent or gave, or why there are none."""

    node: int = 0
    name: str = ""
    into: str = ""
    files: list[str] = field(default_factory=list)
    kept: int = 0  # that were there already
    size: int = 0  # bytes that went or came
    failed: dict[str, str] = field(default_factory=dict)  # path -> why
    left_out: list[str] = field(default_factory=list)
    error: OrchestratorError | None = None


@dataclass(eq=False)
class Peer:
    """One node, and what is known of the ways to it."""

    name: str
    channel: NodeChannel | None = None
    reached: Reached | None = None  # with its facts, where it was probed
    address: str = ""  # where other nodes may reach it
    lock: threading.RLock = field(default_factory=threading.RLock)  # of the channel

    @property
    def open(self) -> NodeChannel:
        assert self.channel is not None
        return self.channel

    @property
    def site(self) -> str | None:
        """Return what the node list says of where it is."""
        return self.reached.node.site if self.reached else None

    def ask(self, request: Request[A], seconds: float) -> A:
        with self.lock:
            return self.open.ask(request, seconds)

    def post(self, request: Request[Any]) -> None:
        """Ask something whose answer is not waited for."""
        with self.lock:
            self.open.post(request)
