from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.head.follow.monitors import status_socket
from orchestrator.head.follow.monitors.status_socket import StatusSocket, ask_head
from orchestrator.protocol.requests.follow import Jobs, JobState, JobStates


class Follower:
    """A node that answers at once, or never."""

    def __init__(self, index: int, answer: Callable[[int, JobStates], None] | None) -> None:
        self.node = SimpleNamespace(index=index)
        self.channel: object | None = object()
        self.answer = answer

    def ask(self, request: Jobs) -> None:
        assert request.part is not None
        job, index = request.part
        if self.answer is not None:
            told = JobState(job=job, node=7, state="running", ranks={})  # whichever it says it is
            self.answer(index, JobStates(jobs=(told, told), time=time.time()))


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[[Any], None]]:
    """Follow a job in a thread, as a head does."""
    over, threads = threading.Event(), []
    listens = threading.Event()

    def serve(status: StatusSocket, followers: Any) -> None:
        with status:
            listens.set()
            while not over.wait(0.01):
                status.check(lambda: followers)

    def begin(makes: Any) -> None:
        status = StatusSocket("job-1", tmp_path)
        threads.append(threading.Thread(target=serve, args=(status, makes(status))))
        threads[-1].start()
        assert listens.wait(10)

    yield begin
    over.set()
    for thread in threads:
        thread.join()
    assert ask_head(tmp_path, "job-1") == {}


def test_nodes_that_do_not_answer_in_time_are_left_out(
    serving: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_socket, "ANSWER_SECONDS", 0.2)
    serving(lambda status: [Follower(0, status.answer), Follower(1, None)])
    for _ in range(2):
        assert [(n, s.node, s.state) for n, s in ask_head(tmp_path, "job-1").items()] == [
            (0, 0, "running")
        ]
    assert ask_head(tmp_path, "job-2") == {}  # its next attempt


def test_commands_that_ask_at_once_are_all_answered(
    serving: Callable[[Any], None], tmp_path: Path
) -> None:
    serving(lambda status: [Follower(index, status.answer) for index in range(3)])
    answers: list[list[int]] = []
    callers = [
        threading.Thread(target=lambda: answers.append(sorted(ask_head(tmp_path, "job-1"))))
        for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert answers == [[0, 1, 2]] * 8


def test_a_name_that_another_head_has_is_no_error(
    serving: Callable[[Any], None], tmp_path: Path
) -> None:
    serving(lambda status: [Follower(0, status.answer)])
    with StatusSocket("job-1", tmp_path):
        assert ask_head(tmp_path, "job-1").keys() == {0}


def test_a_node_whose_channel_is_made_meanwhile_is_asked_and_one_that_is_lost_is_not_waited_for(
    tmp_path: Path,
) -> None:
    status = StatusSocket("job-1", tmp_path)
    late, lost = Follower(0, status.answer), Follower(1, None)
    late.channel = None
    followers = [late, lost]
    told: list[list[int]] = []
    caller = threading.Thread(target=lambda: told.append([*ask_head(tmp_path, "job-1")]))
    with status:
        caller.start()
        while not status.callers:
            status.check(lambda: followers)
        late.channel = object()
        status.check(lambda: followers)
        assert status.callers
        status.check(lambda: followers[:1])
        caller.join(10)
    assert told == [[0]]


def test_commands_without_number_take_no_more_files_than_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers that never read, and callers of other users, which are sent away."""
    status = StatusSocket("job-1", tmp_path)
    with status, contextlib.ExitStack() as calls:
        for _ in range(4):
            for _ in range(status_socket.WAITING):
                caller = calls.enter_context(socket.socket(socket.AF_UNIX))
                caller.connect(status_socket.name_of(tmp_path))
            status.check(lambda: [Follower(0, None)])
        assert len(status.callers) == len(status.waiting) == status_socket.WAITING
        monkeypatch.setattr(status_socket, "user_of", lambda _: os.geteuid() + 1)
        taken = []

        class Busy:
            """At which somebody calls as fast as callers are taken."""

            def accept(self) -> tuple[socket.socket, None]:
                taken.append(socket.socketpair())
                assert len(taken) <= status_socket.WAITING
                taken[-1][1].close()
                return taken[-1][0], None

            def close(self) -> None: ...

        calls.callback(status.listener.close)  # type: ignore[union-attr]
        monkeypatch.setattr(status, "listener", Busy())
        status.accept()
        assert len(taken) == status_socket.WAITING == len(status.waiting)
