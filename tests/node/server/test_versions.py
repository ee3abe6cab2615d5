"""A server meets supervisors of other versions: it understands them, or says what to do."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.head.connect.channel import Declined
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.message import encode_value
from orchestrator.protocol.requests.follow import (
    AskJobState,
    End,
    Follow,
    Living,
    RankState,
    Remove,
    Stop,
)
from orchestrator.protocol.requests.request import OTHER_VERSION
from orchestrator.protocol.version import PROTOCOL
from tests.node.running import PATIENCE, bare_spec, wait_until
from tests.node.server.test_server import Copy, NewLink, new_link

__all__ = ["new_link"]  # the fixture

# This version is one that we understand.
NEWER = {"protocol": PROTOCOL + 8, "oldest": PROTOCOL, "package": "9.0"}
STRANGE = {"protocol": PROTOCOL + 8, "oldest": PROTOCOL + 1, "package": "9.0"}


class StandIn:
    """The files on the disk, and the socket, of a supervisor of another version."""

    def __init__(self, job: str, spec: dict[str, Any], events: list[dict[str, Any]]) -> None:
        self.run = RunDir(job, 0)
        self.run.create()
        Path(self.run.log).write_bytes(b"hello\n")
        Path(self.run.ranks).write_bytes(b"0 0\n")
        Path(self.run.spec).write_text(json.dumps(spec))
        Path(self.run.events).write_text("".join(json.dumps(event) + "\n" for event in events))
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(self.run.socket)
        self.server.listen()
        self.lines: list[dict[str, Any]] = []
        self.threads: list[threading.Thread] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        """Record every line received; close each connection as soon as its peer asks to end."""
        while True:
            try:
                client = self.server.accept()[0]
            except OSError:
                return
            with client, client.makefile("rb") as lines:
                for line in lines:
                    self.lines.append(json.loads(line))
                    if "why" in self.lines[-1]:
                        break

    def close(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


def spec_with(**more: Any) -> dict[str, Any]:
    spec: dict[str, Any] = encode_value(bare_spec())
    del spec["version"]
    return {**spec, **more}


STARTED = {"event": "started", "time": 1.0, "agent": 2, "supervisor": 3}
RAN = {"event": "rank_started", "rank": 0, "local": 0, "time": 1.0, "pid": 99999999, "keeper": 8}
MORE = [
    {**STARTED, "version": NEWER, "kitchen": "sink"},
    {"event": "rank_started_thinking", "rank": 0, "local": 0, "time": 1.0, "thought": [1]},
    {"event": "moon", "time": 1.0, "phase": "full"},
    {**RAN, "colour": "blue"},
]


@pytest.fixture
def stand_in(home: Path) -> Iterator[Callable[..., StandIn]]:
    made: list[StandIn] = []

    def make(job: str, spec: dict[str, Any], events: list[dict[str, Any]]) -> StandIn:
        made.append(StandIn(job, spec, events))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.slow
def test_compatible_supervisor_is_followed(
    new_link: NewLink, stand_in: Callable[..., StandIn]
) -> None:
    there = stand_in("job-1", spec_with(version=NEWER, moon={"phase": "full"}), MORE)
    link = new_link()
    state = link.ask(AskJobState(job="job-1", part=0, attempt=1), PATIENCE)
    assert state.state == "running"
    assert state.ranks == {0: RankState(state="started", pid=99999999)}
    request = Follow(job="job-1", part=0, attempt=1, log=0, ranks=0, events=0, head=True)
    link.ask(request, PATIENCE)
    copy = Copy()
    for kind, content in link.frames():
        copy.take(kind, content)
        if copy.events():
            break
    assert copy.files[b"L"] == b"hello\n"  # before the events, which may tell of the end
    assert copy.events() == [event["event"] for event in MORE]
    # The stand-in has one listener at a time.
    link.close()
    other = new_link()
    other.ask(End(job="job-1", part=0, attempt=1, why="enough", grace=2.0), PATIENCE)
    stop = Stop(job="job-1", part=0, attempt=1, why="now", grace=0.0, wait=PATIENCE)
    receipt = other.ask(stop, PATIENCE)
    assert receipt.left == ()
    # Every version since the first reads these keys.
    assert {"head": "here"}.items() <= there.lines[0].items()
    orders = [{key: line[key] for key in ("why", "grace")} for line in there.lines[1:]]
    assert orders == [{"why": "enough", "grace": 2.0}, {"why": "now", "grace": 0.0}]


def start_former(home: Path, job: str) -> subprocess.Popen[bytes]:
    """Start a process like the supervisor of a version without a directory for each attempt."""
    place = home / "runs" / job / "0"
    place.mkdir(parents=True)
    (place / "spec.json").write_text(json.dumps({"version": {"protocol": 1, "package": "0.1"}}))
    words = [sys.executable, "-c", "import time; time.sleep(1000)", "supervise", job, "0"]
    return subprocess.Popen(words, env={"ORCHESTRATOR_RUN": str(place)}, start_new_session=True)


@pytest.mark.slow
def test_job_of_former_layout_is_refused_but_stoppable(new_link: NewLink, home: Path) -> None:
    link, former = new_link(), start_former(home, "job-1")
    who: dict[str, Any] = {"job": "job-1", "part": 0, "attempt": 1}
    with pytest.raises(Declined, match=r"attach with orchestrator 0\.1, or end the job"):
        link.ask(Follow(**who, log=0, ranks=0, events=0), PATIENCE)
    wait_until(lambda: link.ask(Living(parts=(("job-1", 0),)), PATIENCE).living)
    receipt = link.ask(Stop(**who, why="now", grace=0.0, wait=PATIENCE), PATIENCE)
    assert receipt.known and receipt.left == () and former.pid in receipt.killed
    assert former.wait(PATIENCE) < 0
    removed = link.ask(Remove(parts=(("job-1", 0),)), PATIENCE)
    assert [part.problem for part in removed.parts] == [""] and not list((home / "runs").iterdir())


@pytest.mark.slow
def test_incompatible_supervisor_is_refused_but_stoppable(
    new_link: NewLink,
    stand_in: Callable[..., StandIn],
) -> None:
    stand_in("job-1", {"version": STRANGE, "job": ["in", "another", "format"]}, [])
    link = new_link()
    request = Follow(job="job-1", part=0, attempt=1, log=0, ranks=0, events=0)
    with pytest.raises(Declined, match=r"attach with orchestrator 9\.0, or end the job") as refused:
        link.ask(request, PATIENCE)
    assert refused.value.kind == OTHER_VERSION
    assert f"speaks protocol {PROTOCOL + 8}; this is " in refused.value.what
    state = link.ask(AskJobState(job="job-1", part=0, attempt=1), PATIENCE)
    assert state.state == "running"
    stop = Stop(job="job-1", part=0, attempt=1, why="now", grace=0.0, wait=PATIENCE)
    assert link.ask(stop, PATIENCE).left == ()
