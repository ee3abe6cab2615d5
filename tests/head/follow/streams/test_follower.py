"""The files and heartbeats that a follower of a node receives."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Silent
from orchestrator.head.follow.streams import follower as following
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.streams.node_logs import open_logs
from orchestrator.head.follow.streams.updates import NodeUpdate, Warned
from orchestrator.protocol.requests.follow import Stop
from orchestrator.protocol.requests.request import Ping
from orchestrator.protocol.requests.transfer import Outputs
from orchestrator.records import experiments
from orchestrator.records.experiment import JobRecord, NodeRecord

NODES = [NodeRecord(i, f"n{i}", f"n{i}", None, None, f"10.0.0.{i}", "py", i, 1) for i in range(3)]
RECORD = JobRecord("run-1", "run", "running", ["x"], NODES[:1], 1000.0)


def test_open_logs_refuses_more_files_than_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = sum(1 for _ in os.scandir("/dev/fd"))
    monkeypatch.setattr(
        fleet.resource, "getrlimit", lambda _: (now + fleet.SPARE + 5, now + fleet.SPARE + 5)
    )
    monkeypatch.setattr(fleet.resource, "setrlimit", lambda *_: None)
    with pytest.raises(UsageError, match="the logs of 3 nodes cannot be kept open"):
        open_logs(experiments.create_experiment(tmp_path, "run"), NODES)


class Quiet:
    """A node that says nothing; time goes by where something is waited for."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.posted: list[tuple[float, type]] = []

    def post(self, request: object) -> int:
        self.posted.append((self.now - 1000.0, type(request)))
        return len(self.posted)

    def header(self, deadline: float, silence: str) -> NoReturn:
        assert deadline > self.now, "it would run in circles"
        self.now = deadline
        raise Silent(silence)


def test_follower_polls_on_schedule_and_detects_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = cast("Any", Quiet())
    monkeypatch.setattr(following.time, "monotonic", lambda: channel.now)
    monkeypatch.setattr(following, "HEAD_BEAT_SECONDS", 3.0)
    directory = experiments.create_experiment(tmp_path, "run")
    follower = NodeFollower(cast("Any", None), RECORD, NODES[0], directory, print)
    follower.growing.begin()
    with pytest.raises(Silent, match="no word for 8 s"):
        follower._stream(channel)
    assert channel.posted == [(0.0, Ping), (2.0, Outputs), (3.0, Ping), (6.0, Ping)]
    assert channel.now == 1008.0


def test_sweep_after_killed_supervisor_allows_next_attempt(tmp_path: Path) -> None:
    """A stop for good would forbid the next attempt on that node."""
    asked: list[Stop] = []

    class Channel:
        def ask(self, request: Stop, timeout: float) -> Any:
            asked.append(request)
            return SimpleNamespace(left=(40,))

    said: list[NodeUpdate] = []
    directory = experiments.create_experiment(tmp_path, "run")
    follower = NodeFollower(Any, RECORD, NODES[0], directory, said.append)  # type: ignore[arg-type]
    follower._sweep(Channel())  # type: ignore[arg-type]
    assert [(stop.job, stop.part, stop.attempt, stop.grace, stop.for_good) for stop in asked] == [
        ("run-1", 0, 1, 0.0, False)
    ]
    [warned] = said
    assert isinstance(warned, Warned) and warned.receipt is not None
    assert "[40] do not end" in warned.what


def test_follower_closed_during_reconnect_hangs_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Channel:
        connection = SimpleNamespace(close=lambda: closed.append("hung up"))

        def ask(self, request: object, timeout: float) -> None:
            raise AssertionError("it follows on")

    def reopen() -> Channel:
        follower.closing.set()
        return Channel()

    directory = experiments.create_experiment(tmp_path, "run")
    follower = NodeFollower(Any, RECORD, NODES[0], directory, print)  # type: ignore[arg-type]
    monkeypatch.setattr(follower, "_reopen", reopen)
    follower.run()
    assert closed == ["hung up"]
