"""A node may say anything: it is lost then, as after a cut link, and the head goes on."""

import itertools
import json
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orchestrator.head.commands.stop import may_run_on
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.subprocess_transport import (
    LocalTransport,
    ProcessChannel,
    ProcessConnection,
)
from orchestrator.head.follow import verdict as verdicts
from orchestrator.head.follow.reports import CLOCK_IS_OFF_SECONDS
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.streams.updates import (
    Failed,
    Happened,
    Lost,
    NodeUpdate,
    Over,
    Warned,
)
from orchestrator.head.nodes.environment import Environment
from orchestrator.head.transfer import fetch
from orchestrator.protocol import events, frames
from orchestrator.protocol.frames import EVENTS, JSON, LARGEST, LOG, OFFSET, RANKS
from orchestrator.protocol.requests.follow import StopReceipt
from orchestrator.records import experiments
from orchestrator.records.experiment import JobRecord, NodeRecord
from tests.head.follow.conftest import Follow
from tests.protocol.test_message import json_data, made

NODES = [NodeRecord(i, f"n{i}", f"n{i}", None, None, f"10.0.0.{i}", "py", i, 1) for i in range(2)]
RECORD = JobRecord("run-1", "run", "running", ["x"], NODES[:1], 1000.0)
many = settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
count = itertools.count()


def frame(kind: bytes, payload: bytes) -> bytes:
    return frames.frame_header(kind, len(payload)) + payload


def in_json(data: Any) -> bytes:
    return frame(JSON, json.dumps(data).encode())


class Liar(ProcessConnection):
    """A connection whose other end sends these bytes and then closes."""

    def __init__(self, says: bytes) -> None:
        super().__init__((), "")
        self.says = says

    def run(self, command: str, timeout: float) -> ProcessChannel:
        ours, theirs = socket.socketpair()
        complaints, stderr = socket.socketpair()
        stderr.close()

        def speak() -> None:
            with theirs:
                theirs.sendall(self.says)
                theirs.shutdown(socket.SHUT_WR)
                while theirs.recv(1 << 20):
                    pass

        threading.Thread(target=speak, daemon=True).start()
        self.open.append(ProcessChannel(ours, complaints, subprocess.Popen(["true"])))
        return self.open[-1]


# The time that the clock of the node shows.
CLOCK = 1e9


class Impatient(threading.Event):
    """An event that is never set and never waits."""

    def wait(self, timeout: float | None = None) -> bool:
        return False


def hear(directory: Path, says: bytes, refusal: str = "") -> list[NodeUpdate]:
    """Return the head's news of a node that sends these bytes after it has been followed."""
    answers: list[dict[str, Any]] = [{"id": 1, "ok": {"time": CLOCK}}, {"id": 2, "ok": {}}]
    if refusal:
        answers[-1:] = [{"id": 2, "error": refusal, "kind": ""}]
    connection = Liar(b"".join(map(in_json, answers)) + says)
    place = experiments.create_experiment(directory, f"run{next(count)}")
    heard: list[NodeUpdate] = []
    channel = NodeChannel(connection, Environment("python3"), 10)
    follower = NodeFollower(LocalTransport(), RECORD, NODES[0], place, heard.append, channel)
    follower.closing = Impatient()
    assert follower._follow_once() is False
    follower.text.close()
    follower.ranks.close()
    connection.close()
    return heard


streams = st.sampled_from([LOG, RANKS, EVENTS])
payloads = st.one_of(
    st.binary(max_size=40),
    st.tuples(st.integers(0, 80), st.binary(max_size=60)).map(lambda p: OFFSET.pack(p[0]) + p[1]),
)
any_frame = st.one_of(
    st.binary(max_size=30),
    st.tuples(streams, payloads).map(lambda pair: frame(*pair)),
    st.tuples(st.sampled_from([JSON, b"P", b"?"]), st.integers(0, LARGEST[JSON] * 2)).map(
        lambda pair: frames.HEADER.pack(*pair)
    ),
    json_data.map(in_json),
    st.dictionaries(st.sampled_from(["id", "ok", "error", "kind", "beat"]), json_data).map(in_json),
    json_data.map(lambda data: frame(EVENTS, OFFSET.pack(0) + json.dumps(data).encode() + b"\n")),
)


@many
@given(st.lists(any_frame, max_size=6))
@example([in_json({"id": 1, "ok": {}})])
@example([frame(JSON, b"[" * 100_000)])
@example([frame(EVENTS, OFFSET.pack(0) + b'{"event": "started", "time": 1e30}\n')])
def test_any_bytes_end_as_lost_node(tmp_path: Path, said: list[bytes]) -> None:
    heard = hear(tmp_path, b"".join(said))
    assert isinstance(heard[-1], Lost) and not any(isinstance(updates, Failed) for updates in heard)


def test_damaged_event_lines_are_skipped(tmp_path: Path) -> None:
    """Half a line of a full disk, NUL bytes of a power failure; what is whole still counts."""
    ending = {"event": "ending", "time": 5.0, "why": "swept", "grace": 0.0}
    lines = b'{"event": "rank_sta\n' + json.dumps(ending).encode() + b"\n\0\0\0\0\n"
    heard = hear(tmp_path, frame(EVENTS, OFFSET.pack(0) + lines))
    (happened,) = (updates for updates in heard if isinstance(updates, Happened))
    assert happened.event.replace(time=5.0) == events.Ending(time=5.0, why="swept", grace=0.0)
    ahead = CLOCK - time.time()
    assert happened.event.time == pytest.approx(5.0 - ahead, abs=60.0), "by the head's clock"
    assert isinstance(heard[-1], Lost) and "hung up" in heard[-1].why


# -- what it says in the right form -----------------------------------------------------------


@many
@given(
    st.lists(st.sampled_from([*events.EVENTS.values()]).flatmap(made), max_size=5),
    st.floats(-1e11, 1e11),
)
@example([events.Ending(time=1.0, why="", grace=0.0, lost=-77)], 0.0)
@example([events.Ending(time=1.0, why="", grace=0.0, lost=77)], 0.0)
def test_any_events_end_in_record_and_verdict(
    follow: Follow, said: list[events.Event], clock: float
) -> None:
    run = follow(2)
    run.reports.set_clock(run.job.nodes[0], clock)
    for event in said:
        run.reports.handle(
            Happened(
                0,
                events.event_from_data(json.loads(json.dumps(events.event_to_data(event)))),
            )
        )
    run.reports.handle(Over(0))
    run.reports.handle(Over(1))
    run.conclude()
    written = run.experiment.read_record()
    assert written.state == run.record.state
    assert written.nodes[0].clock == (clock if abs(clock) > CLOCK_IS_OFF_SECONDS else 0.0)
    if written.verdict is not None:
        assert verdicts.verdict_to_lines(written.verdict)


def test_unproved_end_may_still_run_on_its_node(follow: Follow) -> None:
    run = follow(2)
    full = events.RankError(
        type="OSError", message="[Errno 28] No space left on device", traceback="", time=1.0
    )
    first = events.RankEnded(time=1.0, rank=0, local=0, pid=1, code=1, error=full)
    run.reports.handle(Happened(0, first))
    swept = StopReceipt(job="another's", part=7, ended={}, killed={}, left=(77,), gpu_memory={},
                        gpu_unknown="", took=1.0)  # fmt: skip
    run.reports.handle(Warned(1, "they live", swept))
    for node in run.job.nodes:
        run.reports.handle(Over(node.record.index))
    run.conclude()
    written = run.experiment.read_record()
    assert written.over and written.verdict is not None and written.verdict.kind == "disk_full"
    assert [may_run_on(written, node) for node in written.nodes] == [False, True]
    assert written.receipts["n1"].left == (77,)


@given(st.text() | st.sampled_from(["../x", "/x", "a/../../b", "a\0b", "\ud800", "results/\udcff"]))
@example("a\0b")
@example("\ud800")
def test_output_paths_stay_below_directory(path: str) -> None:
    if fetch.is_plain_path(path):
        there = Path("/outputs") / path
        there.exists()  # a name that the file system takes
        assert there.is_relative_to("/outputs") and ".." not in there.parts


def test_plain_refuses_invalid_names() -> None:
    assert [fetch.is_plain_path(name) for name in ("a\0b", "\ud800", "\udcff", "ä")] == [
        *(False, False, True, True)
    ]
