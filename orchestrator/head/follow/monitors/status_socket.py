"""Tells other commands of this user how the nodes of a job stand that a head follows.

The head has a channel to every node. A command that asks through it logs in nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.head.connect import fleet
from orchestrator.head.nodes import clock
from orchestrator.protocol.message import decode, encode
from orchestrator.protocol.requests.follow import Jobs, JobState, JobStates

if TYPE_CHECKING:
    from orchestrator.head.follow.streams.follower import NodeFollower

HEARD_SECONDS = 3.0  # a head that says nothing until then hangs
ANSWER_SECONDS = 8.0  # nodes that have not answered by then are asked by the command itself
READING_SECONDS = 3.0  # a command that has not read the answer until then hangs
WAITING = 64  # commands that ask at the same moment
LARGEST_BYTES = 1 << 24  # of an answer
CREDENTIALS = struct.Struct("3i")
# The kernel names the caller, and holds names without files: so does Linux alone. Elsewhere
# commands ask the nodes.
POSSIBLE = hasattr(socket, "SO_PEERCRED")


def name_of(experiment: Path) -> str:
    """Name the socket for a job's directory, in the kernel: a network disk may hold no sockets.

    It is gone with its process. Anybody may take the name, so both ends ask who the other is.
    """
    place = experiment.stat()
    return f"\0orchestrator/{os.geteuid()}/{place.st_dev:x}/{place.st_ino:x}"


def user_of(sock: socket.socket) -> int:
    """Return the user at the other end, as the kernel knows it."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(data)[1])


def ask_head(experiment: Path, job: str) -> dict[int, JobState]:
    """Ask the head that follows a job how its nodes stand; return what is known, by node."""
    if not POSSIBLE:
        return {}
    with socket.socket(socket.AF_UNIX) as sock, sock.makefile("rb") as lines:
        sock.settimeout(HEARD_SECONDS)
        try:
            sock.connect(name_of(experiment))
            if user_of(sock) != os.geteuid():
                return {}
            lines.readline(LARGEST_BYTES)  # It was heard.
            sock.settimeout(ANSWER_SECONDS + READING_SECONDS)
            answer = decode(JobStates, json.loads(lines.readline(LARGEST_BYTES)))
        except (OSError, ValueError):  # No head follows it here, or one of another version.
            return {}
    return {state.node: state for state in answer.jobs if state.job == job}


class StatusSocket:
    """The head's end. `check` comes often and never waits; later callers are served next."""

    def __init__(self, job: str, experiment: Path) -> None:
        self.job, self.experiment = job, experiment
        self.listener: socket.socket | None = None
        self.callers: list[socket.socket] = []
        self.waiting: list[socket.socket] = []  # for the next question
        self.asked: dict[int, bool] = {}  # node -> whether it has answered
        self.states: dict[int, JobState] = {}
        self.asked_at = 0.0

    def __enter__(self) -> None:
        if not POSSIBLE:
            return
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        try:
            listener.bind(name_of(self.experiment))
            listener.listen(WAITING)
            self.listener = listener
        except OSError:  # another process has the name: commands ask the nodes
            listener.close()

    def __exit__(self, *_: object) -> None:
        if self.listener is not None:
            self.listener.close()
        for sock in (*self.callers, *self.waiting):
            sock.close()
        self.listener, self.callers, self.waiting = None, [], []

    def check(self, followers: Callable[[], Sequence[NodeFollower]]) -> None:
        """Ask the nodes for the commands that have called, and answer these in time."""
        self.accept()
        if not self.callers and self.waiting:
            self.callers, self.waiting = self.waiting, []
            self.asked_at, self.states, self.asked = time.monotonic(), {}, {}
        if self.callers:
            self.ask({follower.node.index: follower for follower in followers()})

    def accept(self) -> None:
        """Take those who have called, and tell each at once that it was heard.

        Anybody may call without end. Who is not taken now is next, or asks the nodes itself.
        """
        if (listener := self.listener) is None:
            return
        with contextlib.suppress(OSError):  # none waits
            for _ in range(WAITING):
                sock, _ = listener.accept()
                self.waiting.append(sock)
                sock.setblocking(False)
                if user_of(sock) == os.geteuid() and len(self.waiting) <= WAITING:
                    sock.send(b"{}\n")
                else:
                    self.waiting.pop().close()

    def ask(self, followers: Mapping[int, NodeFollower]) -> None:
        """Ask nodes to which there is a channel by now; a node that was lost is not waited for."""
        for node, follower in followers.items():
            if node not in self.asked and follower.channel is not None:
                self.asked[node] = False
                follower.ask(Jobs(part=(self.job, node)))
        done = all(self.asked.get(node) for node in followers)
        if done or time.monotonic() > self.asked_at + ANSWER_SECONDS:
            self.reply()

    def answer(self, node: int, answer: JobStates) -> None:
        self.asked[node] = True
        for state in clock.jobs_now(answer).jobs[:1]:  # none, if it does not know the job
            self.states[node] = state.replace(node=node)

    def reply(self) -> None:
        message = encode(JobStates(jobs=tuple(self.states.values()), time=time.time()))
        for sock in self.callers:
            sock.settimeout(READING_SECONDS)
            fleet.start(partial(send, sock, message))
        self.callers = []


def send(sock: socket.socket, message: dict[str, object]) -> None:
    with sock, contextlib.suppress(OSError):  # the command is gone
        sock.sendall(json.dumps(message).encode("ascii") + b"\n")
