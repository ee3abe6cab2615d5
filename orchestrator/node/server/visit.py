"""One head's visit to this node, and the registry of what the node's rooms answer to it.

The requests of protocol/ROOM.py are answered in node/ROOM/requests.py, which is loaded when a head
asks for one of them: a probe, which every launch asks, must not wait for the rest.
"""

from __future__ import annotations

import importlib
import os
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from orchestrator.node.job import processes
from orchestrator.node.job.run_directory import RunDir, stop_of_all
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.request import STOPPED, Beat, Clock, Request
from orchestrator.protocol.spec import Spec

if TYPE_CHECKING:
    import subprocess

    from orchestrator.node.job.hang import Activity
    from orchestrator.node.server.stream import FileStreamer

LIBRARY = os.path.abspath(__file__).rsplit(os.sep, 4)[0]

R = TypeVar("R", bound=Request[Any])
A = TypeVar("A", bound=Message)
S = TypeVar("S", bound="RoomState")
Handler = Callable[["ServerSession", Any], Message]

HANDLERS: dict[type[Request[Any]], Handler] = {}


class Refusal(Exception):
    """A request that cannot be done; its text goes to the user."""

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
    """Return the function that answers such requests; load its room at the first of them."""
    if kind not in HANDLERS:
        importlib.import_module(f"orchestrator.node.{kind.room}.requests")
    return HANDLERS[kind]


class RoomState:
    """Holds what a room keeps of one visit, and acts when something happens in it."""

    def __init__(self, visit: ServerSession) -> None:
        self.visit = visit

    def job_started(self, run: RunDir, spec: Spec) -> None:
        """Leave to a job what was prepared for it; `spec` is as the head sent it."""

    def beat(self) -> None:
        """Do what is due; called every few seconds."""

    def job_over(self) -> None:
        """Prepare what comes next: the followed job is over, and the head has all of its files."""

    def leave(self) -> None:
        """Discard what no job took up: the visit ends."""


class ServerSession:
    """One head's visit, and what was opened, started or announced in it."""

    def __init__(self, umask: int = 0o077) -> None:
        self.umask = umask  # of the login, for what is the user's own
        self.piece = bytearray()  # what the next request is about
        self.states: dict[type[RoomState], RoomState] = {}
        self.stop_of_all = stop_of_all()  # the last one before this visit
        self.waits = False  # for its head, which comes later
        self.streamer: FileStreamer | None = None
        self.activity: Activity | None = None  # of the job that is followed
        self.supervisor: subprocess.Popen[bytes] | None = None  # started in this visit
        self.input: int | None = None  # where the head's requests come from

    def of(self, kind: type[S]) -> S:
        """Return a room's state in this visit, which is made when it is first asked for."""
        if kind not in self.states:
            self.states[kind] = kind(self)
        return cast(S, self.states[kind])

    def answer(self, request: Request[A]) -> A:
        """Do what is asked; raise a Refusal where that cannot be."""
        if self.waits:  # perhaps through a stop of all jobs, none of which is of this head
            self.waits, self.stop_of_all = False, stop_of_all()
        try:
            return cast(A, handler_of(type(request))(self, request))
        except (OSError, ValueError, RuntimeError) as error:
            raise Refusal(processes.in_words(error)) from error

    def take_piece(self) -> bytearray:
        """Return the bytes that came before the request."""
        piece, self.piece = self.piece, bytearray()
        return piece

    def is_called(self, seconds: float) -> bool:
        """Wait so long; return True at once when the head says more meanwhile, or is gone."""
        if self.input is None:
            time.sleep(seconds)
            return False
        return bool(select.select([self.input], [], [], seconds)[0])

    def refuse_if_stopped(self, run: RunDir, first: RunDir | None = None) -> None:
        """Refuse a job that was stopped while its head was still starting it."""
        over = first is not None and first.attempts_are_forbidden
        if over or run.start_is_forbidden or stop_of_all() != self.stop_of_all:
            raise Refusal(f"job {run.job} was stopped before it had started", STOPPED)

    def job_started(self, run: RunDir, spec: Spec) -> None:
        for state in self.states.values():
            state.job_started(run, spec)

    def job_over(self) -> None:
        for state in self.states.values():
            state.job_over()

    def beat(self) -> None:
        for state in self.states.values():
            state.beat()

    def leave(self) -> None:
        for state in self.states.values():
            state.leave()


@answers(Beat)
def clock(visit: ServerSession, request: Beat) -> Clock:
    return Clock(time=time.time())
