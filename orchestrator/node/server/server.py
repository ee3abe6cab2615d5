"""The node's end of the one channel between the head and this node.

Reads requests from standard input, writes answers, heartbeats and the stream of a job's files to
standard output, all in frames (protocol/frames.py). Ends when the head disconnects; jobs go on.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

from orchestrator.node.job.run_directory import LARGEST_SERVER_LOG_BYTES, SystemLog, server_log
from orchestrator.node.server.session import LIBRARY, Refusal, ServerSession
from orchestrator.protocol import frames
from orchestrator.protocol.frames import HEADER, JSON, PIECE, Splitter
from orchestrator.protocol.message import Nonsense, parse_object, to_json
from orchestrator.protocol.requests.request import (
    ROUTINE,
    SLOW_SECONDS,
    Greeting,
    Heartbeat,
    Refused,
    number_of,
    read_request,
)
from orchestrator.protocol.timing import SERVER_BEAT, SERVER_PATIENCE
from orchestrator.protocol.version import OWN

# The log is not read while more than this waits to be sent.
BACKLOG_BYTES = 1 << 19


class ChannelServer:
    """Serves one head until it disconnects."""

    def __init__(self, session: ServerSession) -> None:
        self.session = session
        self.system = SystemLog(server_log(), LARGEST_SERVER_LOG_BYTES)
        self.waiting: list[memoryview] = []
        self.waiting_bytes = 0
        self.splitter = Splitter()
        self.heard = time.monotonic()
        self.next_beat = self.heard + SERVER_BEAT

    def send(self, kind: bytes, *parts: bytes) -> None:
        """Queue a frame whose payload is the concatenation of these parts."""
        size = sum(map(len, parts))
        for part in (frames.frame_header(kind, size), *parts):
            self.waiting.append(memoryview(part))
        self.waiting_bytes += size + HEADER.size

    def send_message(self, message: object) -> None:
        self.send(JSON, to_json(message).encode("ascii"))

    def flush(self) -> None:
        while self.waiting:
            try:
                done = os.writev(1, self.waiting[:64])
            except BlockingIOError:
                return
            self.waiting_bytes -= done
            while self.waiting and done >= len(self.waiting[0]):
                done -= len(self.waiting.pop(0))
            if done:
                self.waiting[0] = self.waiting[0][done:]

    def loop(self) -> None:
        self.session.input = 0
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        while time.monotonic() - self.heard < SERVER_PATIENCE:
            self.flush()
            self.stream()
            for fd, events in self.ready():
                if fd == 0 and not self.receive():
                    return
                if fd == 1 and events & (select.POLLERR | select.POLLHUP):
                    return
                if self.session.streamer and fd == self.session.streamer.wakeup:
                    self.session.streamer.drain_wakeup()
            self.beat()

    def stream(self) -> None:
        """Send new bytes of the followed job's files."""
        streamer = self.session.streamer
        if streamer and self.waiting_bytes < BACKLOG_BYTES:
            streamer.pump(self.send, self.send_message)
            self.flush()
            if streamer.end_announced:
                self.session.job_over()

    def ready(self) -> list[tuple[int, int]]:
        """Wait until something can be read or written, or an action is due; return the events."""
        poll = select.poll()
        streamer = self.session.streamer
        poll.register(0, select.POLLIN)
        if self.waiting:
            poll.register(1, select.POLLOUT)
        elif streamer and streamer.wakeup is not None:
            poll.register(streamer.wakeup, select.POLLIN)
        left = max(0.0, self.next_beat - time.monotonic())
        if streamer is not None and not self.waiting:
            left = min(left, streamer.left)
        return poll.poll(left * 1000)

    def beat(self) -> None:
        if time.monotonic() >= self.next_beat:
            self.next_beat = time.monotonic() + SERVER_BEAT
            self.session.beat()
            # Queued data shows that the server is alive, so no heartbeat is needed.
            if not self.waiting:
                activity = self.session.activity
                silent, idle = activity.check() if activity else (None, None)
                self.send_message(Heartbeat(beat=time.time(), silent=silent, idle=idle))

    def receive(self) -> bool:
        """Serve the requests that arrived; return False if the head has disconnected."""
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return True
        self.heard = time.monotonic()
        for kind, payload in self.splitter.feed(data):
            if kind == PIECE:
                self.session.piece += payload
                self.session.waits = self.session.waits or not payload
            elif kind == JSON:
                self.serve(payload)
            else:
                raise Nonsense(f"a head sends no frame {kind.decode()}")
        return bool(data)

    def serve(self, payload: bytes) -> None:
        number, fields = number_of(parse_object(payload))
        do, since, how = str(fields.get("do"))[:50], time.monotonic(), "is answered"
        if do not in ROUTINE:
            self.system.line("%s (%d) is asked", do, number)
        try:
            answer = self.session.answer(read_request(fields))
            said: object = {"id": number, "ok": answer}
        except Refusal as refusal:
            # The reason may quote the output of a user's command, so it goes only to the head.
            how = f"is refused ({refusal.kind or 'the head says why'})"
            said = Refused(id=number, error=str(refusal), kind=refusal.kind)
        except Nonsense as error:
            how = "is nonsense"
            said = Refused(id=number, error=f"the head broke the protocol: {error}")
        if do not in ROUTINE or time.monotonic() - since > SLOW_SECONDS:
            self.system.line("%s (%d) %s after %.3f s", do, number, how, time.monotonic() - since)
        # The time that a request took does not count as silence of the head.
        self.heard = time.monotonic()
        self.send_message(said)


def main(nonce: str, umask: int, *, fresh: bool) -> None:
    """Serve one session of a head; `fresh` is True for the first one with this library version."""
    os.write(1, f"\n{nonce}\n".encode())
    session = ServerSession(umask)
    server = ChannelServer(session)
    server.send_message(Greeting(version=OWN, time=time.time()))
    server.system.line("serves a head, from library %s", os.path.basename(LIBRARY))
    step = "SLURM_STEP_ID" in os.environ
    # Slurm signals all processes of a step, but the server must still report the job's end.
    if step:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    try:
        # The head is gone; the files hold everything.
        with contextlib.suppress(BrokenPipeError):
            server.loop()
        server.system.line("leaves: the head has hung up, or was silent for too long")
    except Nonsense as error:
        sys.exit(f"the head broke the protocol: {error}")
    finally:
        session.leave()
        if fresh:
            # Only the first session of a library needs this import.
            from orchestrator.node.job import cleanup

            with contextlib.suppress(OSError, ValueError):
                # This removes earlier versions that were unused for a week.
                cleanup.remove_libraries(LIBRARY)
    if step and session.supervisor is not None:
        # Slurm kills the rest of a step when its task ends, and the task is this process.
        session.supervisor.wait()
