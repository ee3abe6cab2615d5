"""Tells other commands of this user how the nodes of a job stand that a head follows.

The head has a channel to every node. A command that asks through it logs in nowhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.head.connect import tasks
from orchestrator.head.connect.held import wire
from orchestrator.head.nodes import clock
from orchestrator.protocol.message import decode, encode
from orchestrator.protocol.requests.follow import Jobs, JobState, JobStates

if TYPE_CHECKING:
    from orchestrator.head.follow.streams.follower import NodeFollower

ANSWER_SECONDS = 2.0  # nodes that have not answered by then are asked by the command itself
PATIENCE_SECONDS = 3.0  # with a head, and of a head with a command that does not read
WAITING = 64  # commands that ask at the same moment


def name_of(experiment: Path) -> str:
    """Name the socket for a job's directory, in the kernel: a network disk may hold no sockets.

    It is gone with its process. Anybody may take the name, so both ends ask who the other is.
    """
    place = experiment.stat()
    return f"\0orchestrator/{os.geteuid()}/{place.st_dev:x}/{place.st_ino:x}"


def ask_head(experiment: Path, job: str) -> dict[int, JobState]:
    """Ask whoever follows a job how its nodes stand; return what is known, by node."""
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(PATIENCE_SECONDS)
        try:
            plain.connect(name_of(experiment))
            if wire.peer(plain)[1] != os.geteuid():
                return {}
            answer = decode(JobStates, wire.receive(plain)[0])
        except (OSError, ValueError):  # nobody follows it here, or who does runs another version
            return {}
    return {state.node: state for state in answer.jobs if state.job == job}


class StatusSocket:
    """The head's end. `check` comes often and never waits; who calls meanwhile is next."""

    def __init__(self, job: str, experiment: Path) -> None:
        self.job, self.experiment = job, experiment
        self.listener: socket.socket | None = None
        self.callers: list[socket.socket] = []
        self.pending: set[int] = set()  # nodes that have not answered yet
        self.states: list[JobState] = []
        self.asked_at = 0.0

    def __enter__(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        try:
            listener.bind(name_of(self.experiment))
            listener.listen(WAITING)
            self.listener = listener
        except OSError:  # another head still has the name, or somebody: commands ask the nodes
            listener.close()

    def __exit__(self, *_: object) -> None:
        if self.listener is not None:
            self.listener.close()
        for caller in self.callers:
            caller.close()
        self.listener, self.callers = None, []

    def check(self, followers: Sequence[NodeFollower]) -> None:
        """Ask the nodes for the commands that have called, and answer these in time."""
        now = time.monotonic()
        if self.callers:
            if not self.pending or now > self.asked_at + ANSWER_SECONDS:
                self.reply()
            return
        if self.listener is not None:
            self.accept(self.listener)
        if self.callers:
            self.asked_at, self.states = now, []
            connected = [follower for follower in followers if follower.channel is not None]
            self.pending = {follower.node.index for follower in connected}
            for follower in connected:
                follower.ask(Jobs(part=(self.job, follower.node.index)))

    def accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # nobody waits
            while True:
                sock, _ = listener.accept()
                if wire.peer(sock)[1] == os.geteuid():
                    self.callers.append(sock)
                else:
                    sock.close()

    def answer(self, node: int, answer: JobStates) -> None:
        self.pending.discard(node)
        self.states += [state.replace(node=node) for state in clock.jobs_now(answer).jobs[:1]]

    def reply(self) -> None:
        message = encode(JobStates(jobs=tuple(self.states), time=time.time()))
        for sock in self.callers:
            sock.settimeout(PATIENCE_SECONDS)
            tasks.WORK.start(partial(send, tasks.Socket.of(sock), message))
        self.callers, self.pending = [], set()


def send(sock: socket.socket, message: dict[str, object]) -> None:
    with sock, contextlib.suppress(OSError):  # the command is gone
        wire.send(sock, message)
