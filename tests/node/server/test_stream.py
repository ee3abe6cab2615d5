"""The parts of a job's files that a node sends, and when."""

import socket
from pathlib import Path

import pytest

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.stream import BURST_SECONDS, FileStreamer
from orchestrator.protocol.frames import EVENTS, LOG, OFFSET
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.request import SupervisorGone


class Head:
    """The bytes of each file that have come, and in how many frames."""

    def __init__(self) -> None:
        self.files: dict[bytes, bytes] = {}
        self.frames = 0
        self.messages: list[Message] = []

    def frame(self, kind: bytes, offset: bytes, data: bytes) -> None:
        held = self.files.setdefault(kind, b"")
        assert OFFSET.unpack(offset) == (len(held),)
        self.files[kind] += data
        self.frames += 1

    def pump(self, streamer: FileStreamer) -> None:
        streamer.behind = True  # as after a notification
        streamer.pump(self.frame, self.messages.append)


def test_streamer_batches_lines_and_flushes_on_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    run = RunDir("job-1", 0)
    Path(run.path).mkdir(parents=True)
    head, seconds = Head(), BURST_SECONDS / 2
    streamer = FileStreamer(run, 0, 0, 0, gather=seconds)
    assert streamer.supervisor is None
    supervisor, ours = socket.socketpair()
    streamer.supervisor = ours

    def append(path: str, text: bytes) -> None:
        with Path(path).open("ab") as file:
            file.write(text)
        head.pump(streamer)

    for number in range(10):
        append(run.log, b"line %d\n" % number)
    assert head.frames == 3  # a burst; then all wait
    assert 0 < streamer.left <= seconds
    append(run.events, b"{}\n")
    assert head.files[LOG] == Path(run.log).read_bytes() and head.files[EVENTS] == b"{}\n"
    append(run.log, b"the last one\n")
    assert head.frames == 5
    supervisor.close()
    streamer.drain_wakeup()
    head.pump(streamer)
    assert head.files[LOG] == Path(run.log).read_bytes()
    assert [type(message) for message in head.messages] == [SupervisorGone]
