"""One head's session on this node, and the registry of request handlers.

The requests of protocol/ROOM.py are answered in node/ROOM/requests.py, which is loaded when a head
sends one of them: a probe, which every launch sends, must not load the rest.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from orchestrator.node.job import processes
from orchestrator.node.job.run_directory import PartDir, RunDir, stop_of_all
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.request import (
    NO_PART,
    OTHER_VERSION,
    STOPPED,
    Clock,
    Ping,
    Request,
)
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.version import version_conflict

if TYPE_CHECKING:
    import subprocess

    from orchestrator.node.job.hang import Activity
    from orchestrator.node.server.stream import FileStreamer

LIBRARY = os.path.abspath(__file__).rsplit(os.sep, 4)[0]

R = TypeVar("R", bound=Request[Any])
A = TypeVar("A", bound=Message)
S = TypeVar("S", bound="SessionState")
Handler = Callable[["ServerSession", Any], Message]

HANDLERS: dict[type[Request[Any]], Handler] = {}


class Refusal(Exception):
    """A request that cannot be done; its text is shown to the user."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


def answers(
    kind: type[R],
) -> Callable[[Callable[[ServerSession, R], A]], Callable[[ServerSession, R], A]]:
    """Register the function that answers this kind of request."""

    def register(handler: Callable[[ServerSession, R], A]) -> Callable[[ServerSession, R], A]:
        HANDLERS[kind] = handler
        return handler

    return register


def handler_of(kind: type[Request[Any]]) -> Handler:
    """Return the handler of this kind of request; load its module at the first one."""
    if kind not in HANDLERS:
        importlib.import_module(f"orchestrator.node.{kind.room}.requests")
    return HANDLERS[kind]


def stored_spec(part: PartDir) -> Spec:
    """Return the spec with which each attempt begins; refuse without it, or if it is strange."""
    if not os.path.exists(part.spec):
        raise Refusal("it has lost its part of the job", NO_PART)
    if other := version_conflict(part.job, part.version()):
        raise Refusal(other, OTHER_VERSION)
    return part.read_spec()


class SessionState:
    """A room's state in one session, with callbacks for the session's events."""

    def __init__(self, session: ServerSession) -> None:
        self.session = session

    def job_started(self, part: PartDir, spec: Spec) -> None:
        """Hand prepared resources over to a started job; `spec` is as the head sent it."""

    def beat(self) -> None:
        """Run periodic work; called every few seconds."""

    def job_over(self) -> None:
        """Prepare for a later job: the followed job is over, and the head has all its files."""

    def leave(self) -> None:
        """Discard resources that no job has taken, as the session ends."""


class ServerSession:
    """One head's session, with everything opened, started or announced in it."""

    def __init__(self, umask: int = 0o077) -> None:
        # The login's umask, for files of the user.
        self.umask = umask
        # The payload that belongs to the next request.
        self.piece = bytearray()
        self.states: dict[type[SessionState], SessionState] = {}
        # The last stop of all jobs before this session.
        self.stop_of_all = stop_of_all()
        # True if the session was opened in advance and its head sends requests later.
        self.waits = False
        self.streamer: FileStreamer | None = None
        # The activity of the job that is followed.
        self.activity: Activity | None = None
        # The supervisor started in this session.
        self.supervisor: subprocess.Popen[bytes] | None = None
        # The descriptor from which the head's requests are read.
        self.input: int | None = None

    def of(self, kind: type[S]) -> S:
        """Return a room's state in this session, which is created at the first call."""
        if kind not in self.states:
            self.states[kind] = kind(self)
        return cast(S, self.states[kind])

    def answer(self, request: Request[A]) -> A:
        """Return the answer to a request; raise a Refusal if it cannot be done."""
        # A stop of all jobs during the wait was not meant for this head's job.
        if self.waits:
            self.waits, self.stop_of_all = False, stop_of_all()
        try:
            return cast(A, handler_of(type(request))(self, request))
        except (OSError, ValueError, RuntimeError) as error:
            raise Refusal(processes.error_in_words(error)) from error

    def take_piece(self) -> bytearray:
        """Return the payload received before the request, and clear it."""
        piece, self.piece = self.piece, bytearray()
        return piece

    def refuse_if_stopped(self, run: RunDir) -> None:
        """Raise a Refusal if the job was stopped while its head was still starting it."""
        if run.start_is_forbidden or stop_of_all() != self.stop_of_all:
            raise Refusal(f"job {run.job} was stopped before it had started", STOPPED)

    def job_started(self, part: PartDir, spec: Spec) -> None:
        for state in self.states.values():
            state.job_started(part, spec)

    def job_over(self) -> None:
        for state in self.states.values():
            state.job_over()

    def beat(self) -> None:
        for state in self.states.values():
            state.beat()

    def leave(self) -> None:
        for state in self.states.values():
            state.leave()


@answers(Ping)
def clock(session: ServerSession, request: Ping) -> Clock:
    return Clock(time=time.time())
