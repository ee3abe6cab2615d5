"""What a lost node alone had of its log, and what nobody has."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.follow.restarts import ended
from orchestrator.head.follow.streams import last_lines
from orchestrator.head.follow.streams.node_logs import NodeLogs
from orchestrator.head.screen.log_reader import LogFile, LogReader
from orchestrator.head.start.record import with_line
from orchestrator.node.job.part.job_log import JobLog
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.frames import JSON
from orchestrator.protocol.message import Message, encode
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.version import OWN
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from tests.head.transfer.nodes import Channel
from tests.node.start.test_next_spec import FIRST

NODES = [
    NodeRecord(i, name, name, None, None, f"10.0.0.{i}", "py", i, 1, "running")
    for i, name in enumerate("ab")
]


class Streaming(Channel):
    """A channel to a real visit, which streams what a run has that is over."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: deque[tuple[bytes, bytes]] = deque()

    def ask(self, request: Request[Any], seconds: float) -> Any:
        answer = super().ask(request, seconds)
        self.frames.clear()
        return answer

    def header(self, deadline: float, silence: str) -> tuple[bytes, int]:
        def say(message: Message) -> None:
            self.frames.append((JSON, json.dumps(encode(message)).encode()))

        assert self.visit.streamer is not None
        while not self.frames:
            self.visit.streamer.pump(
                lambda kind, *parts: self.frames.append((kind, b"".join(parts))), say
            )
        return self.frames[0][0], len(self.frames[0][1])

    def exactly(self, size: int, deadline: float, silence: str) -> bytes:
        return self.frames.popleft()[1]


def there(job: str, node: int, before: int = 0) -> JobLog:
    run = RunDir(job, node)
    run.create()
    run.write_spec(FIRST.replace(job=job, node=node, version=OWN))
    return JobLog(run.log, run.ranks, before)


def here(place: Experiment, node: NodeRecord, text: bytes, ranks: bytes) -> None:
    logs = NodeLogs.of(place, node)
    logs.text.append(memoryview(text))
    logs.ranks.append(memoryview(ranks))
    logs.text.close()
    logs.ranks.close()


def pieces(place: Experiment, node: NodeRecord) -> list[tuple[str, bytes]]:
    log = LogFile(node.index, node.name, place.log(node), place.ranks(node))
    return [(piece.stream, piece.data) for piece in LogReader(log).read()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    return experiments.create(tmp_path / "experiments", "run")


def test_lines_that_a_lost_node_alone_had_come_once_and_to_their_place(place: Experiment) -> None:
    """It was lost as node 1 of the second attempt, and as another number it comes back."""
    job = JobRecord("run-1", str(place.path), "lost", ["x"], NODES, 0.0, ended=1.0)
    here(place, NODES[1], b"one\n", b"0 1\n")
    job = replace(job, attempts=[ended(job, None, None)])
    b = with_line(place, NODES[1], "attempt 2")
    log = there("run-1.2", 1, b.log_before)
    log.feed("1", b"two\n")
    here(place, b, b"two\n", f"{b.log_before} 1\n".encode())
    log.feed("1", b"three\n")
    log.feed("0", b"four\n")
    job = replace(job, job="run-1.2", nodes=[NODES[0], replace(b, state="lost")])
    job = replace(job, attempts=[*job.attempts, ended(job, None, None)])
    back, said = replace(b, index=0, state="lost"), list[str]()
    for _ in range(2):
        last_lines.bring(place, job, [back], lambda _: cast("Any", Streaming()), said.append)
    assert said == ["the last 11 B of b's log in run-1.2, which b alone had, are here now"]
    assert pieces(place, b) == [
        ("1", b"one\n"),
        ("-", b"orchestrator: attempt 2\n"),
        ("1", b"two\nthree\n"),
        ("0", b"four\n"),
    ]


def test_what_nobody_has_is_said(place: Experiment) -> None:
    job = JobRecord("run-1", str(place.path), "lost", ["x"], NODES, 0.0, ended=1.0)
    job = replace(job, attempts=[ended(job, None, None)])
    said = list[str]()
    last_lines.bring(place, job, NODES[1:], lambda _: cast("Any", Streaming()), said.append)
    words = "the last seconds of b's log in run-1 are not here"
    assert said == [f"{words}: this machine knows nothing of job run-1"]
    silent = SimpleNamespace(ask=lambda *_: (_ for _ in ()).throw(NodeError("it hung up")))
    with pytest.raises(NodeError) as error:
        last_lines.bring(place, job, NODES[1:], lambda _: cast("Any", silent), said.append)
    assert error.value.names == ("b",)
