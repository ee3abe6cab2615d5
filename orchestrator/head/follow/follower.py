"""One node's stream home: log bytes into the local file, events to the run, across reconnects.

The local file's length is all the state there is: a new process goes on where a killed one stopped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import NodeError, OrchestratorError, UsageError
from orchestrator.head.connect.channel import Declined, Link
from orchestrator.head.connect.fleet import open_link
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow import outputs
from orchestrator.head.follow.clock_offset import Clock
from orchestrator.records.experiment import Experiment, NodeRecord

OFFSET = struct.Struct(">Q")
SILENCE = 8.0  # the node's link says something every second
BEAT = 10.0
CLOCK_READS = 3  # the shortest round trip of these tells best
RETRY_TIMEOUT = 5.0
SWEEP_SECONDS = 10.0


@dataclass(frozen=True)
class Message:
    """What a follower tells the run."""

    node: int
    kind: str  # event, grew, lost, back, clock, over, refused, disk_full, crashed, stuck, stays
    data: dict[str, Any] = field(default_factory=dict)


class Follower(threading.Thread):
    def __init__(
        self,
        ssh: Transport,
        job: str,
        node: NodeRecord,
        experiment: Experiment,
        post: Callable[[Message], None],
        link: Link | None = None,
        *,
        head: float | None = None,
    ) -> None:
        super().__init__(daemon=True, name=f"follow-{node.index}")
        self.ssh = ssh
        self.job = job
        self.node = node
        self.text = AppendOnly(experiment.log(node))
        self.ranks = AppendOnly(experiment.ranks(node))
        self.outputs = experiment.path / "outputs"
        self.post = post
        self.link = link
        self.head = head  # when this head came; None for one that only looks on
        self.left = threading.Event()
        self.writing = threading.Lock()
        self.ended = False
        self.event_rest = b""
        self.closing = threading.Event()
        self.asked_to_end: dict[str, Any] | None = None
        self.next_beat = 0.0
        self.activity: dict[str, float] = {}  # seconds since the node last printed, or moved
        self.clock = Clock()
        self.beats: dict[int, float] = {}  # request -> when it was sent

    def end(self, why: str, grace: float) -> None:
        """Ask the node to end its part: now, or as soon as it is back."""
        self.asked_to_end = {"why": why, "grace": grace}
        self._tell_end()

    def _tell_end(self) -> None:
        link, words = self.link, self.asked_to_end
        if link is not None and words is not None:
            with contextlib.suppress(NodeError):  # the stream notices too, and repeats it
                link.tell("end", job=self.job, node=self.node.index, **words)

    def leave(self) -> None:
        """Tell the node that this head goes on purpose; `left` is set when it has heard it."""
        link = self.link
        if link is None:
            self.left.set()  # it cannot be told, and will hear it from the others
            return
        with contextlib.suppress(NodeError):
            link.tell("leave", at=time.time())

    def close(self) -> None:
        """Stop following; the job goes on. Once this returns, no byte is written any more."""
        self.closing.set()
        with self.writing:
            pass
        link = self.link
        if link is not None:
            link.connection.close()

    def run(self) -> None:
        try:
            while not self.closing.is_set():
                if self._follow_once():
                    return
        except Exception as error:  # noqa: BLE001  a defect of ours: raised again in the run
            self.post(Message(self.node.index, "crashed", {"error": error}))
        finally:
            self.text.close()
            self.ranks.close()

    def _follow_once(self) -> bool:
        """Follow until the job has ended there (True) or the connection is lost."""
        try:
            if self.link is None:
                self.link = self._reopen()
            self._begin(self.link)
            self._tell_end()
            self._stream(self.link)
            if not self.ended:
                self._sweep(self.link)
            self._bring_outputs(self.link)
            self.post(Message(self.node.index, "over"))
            return True
        except OrchestratorError as error:
            if self.closing.is_set():
                return True
            if isinstance(error, Refused):
                self.post(Message(self.node.index, "refused", {"why": error.what}))
                return True
            link, self.link = self.link, None
            if link is not None:
                link.connection.close()
            self.post(Message(self.node.index, "lost", {"why": error.what}))
            self.closing.wait(0.5)
            return False

    def _bring_outputs(self, link: Link) -> None:
        try:
            stays = outputs.bring(link, self.job, self.node.index, self.outputs)
        except OSError as error:
            stays = f"its outputs stay there: {self.outputs}: {error.strerror}"
        except Declined as error:
            stays = f"its outputs stay there: {error.what}"
        if stays:
            self.post(Message(self.node.index, "stays", {"what": stays}))

    def _sweep(self, link: Link) -> None:
        """Its supervisor is gone and left no last word: what it watched over must not live on."""
        words = {"why": "its supervisor was killed", "grace": 0.0, "wait": SWEEP_SECONDS}
        link.ask("end", 3 * SWEEP_SECONDS, job=self.job, node=self.node.index, **words)

    def _reopen(self) -> Link:
        node = self.node
        destination = self.ssh.config.destination(node.host, node.user, node.port)
        connection = self.ssh.connect(destination, min(RETRY_TIMEOUT, self.ssh.timeout))
        return open_link(connection, node.python, self.ssh.timeout)

    def _begin(self, link: Link) -> None:
        self.event_rest = b""
        for _ in range(CLOCK_READS):
            sent = time.time()
            self.clock.heard(sent, link.ask("beat", SILENCE)["time"], time.time())
        self.beats.clear()
        words = {"log": self.text.size, "ranks": self.ranks.size, "events": 0}
        attach = {"head": self.head} if self.head is not None else {}
        try:
            link.ask("follow", SILENCE, job=self.job, node=self.node.index, **words, **attach)
        except NodeError as error:
            raise (Refused(error.what) if "knows nothing" in error.what else error) from error
        self.post(Message(self.node.index, "back", {"clock": self.clock.offset}))

    def _stream(self, link: Link) -> None:
        silence = f"no word for {SILENCE:.0f} s"
        while True:
            self._beat(link)
            deadline = time.monotonic() + SILENCE
            kind, size = link.header(deadline, silence)
            if kind in (b"L", b"R"):
                self._append(link, self.text if kind == b"L" else self.ranks, size)
            elif kind == b"E":
                self._take_events(link.exactly(size, deadline + SILENCE, silence))
            else:
                message = json.loads(link.exactly(size, deadline + SILENCE, silence))
                if message.get("supervisor_gone"):
                    return
                if "idle" in message:
                    self.activity = message
                elif "left" in (message.get("ok") or {}):
                    self.left.set()
                elif "stuck" in (message.get("ok") or {}):
                    self.post(Message(self.node.index, "stuck", message["ok"]))
                self._beat_answered(message)

    def _beat(self, link: Link) -> None:
        """The node's link leaves when it hears nothing for a minute."""
        if time.monotonic() >= self.next_beat:
            self.next_beat = time.monotonic() + BEAT
            sent = time.time()
            self.beats[link.tell("beat")] = sent

    def _beat_answered(self, message: dict[str, Any]) -> None:
        """Clocks drift apart: a good exchange is better than one of an hour ago."""
        sent = self.beats.pop(message.get("id", 0), 0.0)
        if sent and self.clock.heard(sent, message["ok"]["time"], time.time()):
            self.post(Message(self.node.index, "clock", {"clock": self.clock.offset}))

    def _append(self, link: Link, file: AppendOnly, size: int) -> None:
        silence = f"no word for {SILENCE:.0f} s"
        (offset,) = OFFSET.unpack(link.exactly(8, time.monotonic() + SILENCE, silence))
        if offset != file.size:
            raise NodeError(f"it sent bytes from {offset} on, {file.size} are here")
        size -= OFFSET.size
        while size:
            data = link.some(size, time.monotonic() + SILENCE, silence)
            self._keep(link, file, data)
            size -= len(data)
        self.post(Message(self.node.index, "grew"))

    def _keep(self, link: Link, file: AppendOnly, data: memoryview) -> None:
        """Append; while the disk is full here, wait: the node has it all, and the job goes on."""
        rest = self._write(file, data)
        while rest and not self.closing.wait(1.0):
            self.post(Message(self.node.index, "disk_full"))
            self._beat(link)
            rest = self._write(file, rest)

    def _write(self, file: AppendOnly, data: memoryview) -> memoryview:
        with self.writing:  # whoever closed this follower may have given the file to another
            return data if self.closing.is_set() else file.append(data)

    def _take_events(self, data: bytes) -> None:
        lines = (self.event_rest + data[OFFSET.size :]).split(b"\n")
        self.event_rest = lines.pop()
        for line in lines:
            event = json.loads(line)
            self.ended = self.ended or event["event"] == "ended"
            self.post(Message(self.node.index, "event", event))


class Refused(OrchestratorError):
    """The node is there and has no such job."""


class AppendOnly:
    """A local file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        self.size = os.fstat(self.fd).st_size

    def append(self, data: memoryview) -> memoryview:
        """What did not fit on the disk."""
        while data:
            try:
                done = os.write(self.fd, data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise NodeError(f"{self.path}: {error.strerror}") from error
                break
            self.size += done
            data = data[done:]
        return data

    def close(self) -> None:
        os.close(self.fd)
