"""Opens the one channel to a node, sends the node's program, and exchanges messages."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from typing import Any, TypeVar

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.beats import beats
from orchestrator.head.connect.transport import Channel, Connection
from orchestrator.head.nodes import server_command
from orchestrator.head.nodes.clock import NodeClock
from orchestrator.head.nodes.environment import Environment
from orchestrator.head.nodes.library import installer_program, own_library, packed_library
from orchestrator.protocol import frames
from orchestrator.protocol.frames import HEADER, JSON, PIECE
from orchestrator.protocol.message import Message, Nonsense, decode_value, parse_object
from orchestrator.protocol.requests.request import (
    ROUTINE,
    Answered,
    Clock,
    Greeting,
    Incoming,
    Ping,
    Refused,
    Request,
    frame_of_request,
    read_incoming,
)
from orchestrator.protocol.timing import HEAD_BEAT_SECONDS
from orchestrator.protocol.version import OWN

log = logging.getLogger(__name__)

# Large reads: paramiko moves its whole buffer to the front after each read.
READ_BYTES = 1 << 20
# Paramiko copies the rest of a piece after every 32 KB: 1.7 of 7.6 s with larger pieces.
STEP_BYTES = 1 << 18
NOISE_LIMIT_BYTES = 1 << 20
# The limit, in characters, of an error text that a node sends.
LONGEST_REASON = 4000
# The installer sends this in place of a greeting, to request the library.
ASKS = b"+"
# `head -n1` in an rc file swallows 8192 bytes of our input at once. With a longer input a rest is
# left, and our Python sees that its beginning is missing. Otherwise it would wait.
MORE_THAN_A_BLOCK_BYTES = 8192 + 256
# The time to wait for the text that follows a refusal.
LAST_WORDS_SECONDS = 2.0
HANGS = "is its link cut? if one of its disks hangs, so does `df` there: try it over ssh"
IN_A_CONTAINER = "a container reads no .bashrc: docker exec -i -e ORCHESTRATOR_HOME=/path NAME"


A = TypeVar("A", bound=Message)


class Declined(NodeError):
    """Raised if a node refuses a request. `kind`: see protocol/requests/."""

    def __init__(self, what: str, kind: str = "") -> None:
        super().__init__(what[:LONGEST_REASON])
        self.kind = kind


class Silent(NodeError):
    """Raised if no data came in time; partial data is kept, so the caller may wait again."""


class NotActive(NodeError):
    """Raised if the node answers but its environment cannot be activated."""


def nonsense_error(error: Nonsense) -> NodeError:
    return NodeError(f"the node broke the protocol: {error}")


class NodeChannel:
    """An open channel to one node's server, which answers requests in order."""

    # The name that log lines show.
    name = "a node"

    def __init__(self, connection: Connection, environment: Environment, timeout: float) -> None:
        self.connection = connection
        self.environment = environment
        self.nonce = f"orchestrator-{secrets.token_hex(8)}"
        self.rest = memoryview(b"")
        self.sending = threading.Lock()
        self.count, self.posted_at = 0, 0.0
        # Unanswered requests by their number, and the monotonic times at which they were sent.
        self.pending: dict[int, tuple[Request[Any], float]] = {}
        self.begun, self.clock = time.monotonic(), NodeClock()
        self.channel: Channel = connection.run(
            server_command.shell_command(environment, self.nonce), timeout
        )
        ours = own_library()
        install = (
            f"{installer_program()}\ninstall({ours.digest!r}, {ours.checksum}, {self.nonce!r})\n"
        )
        install = install.ljust(MORE_THAN_A_BLOCK_BYTES, "\n")
        # The server exited at once; begin() reads the reason.
        with contextlib.suppress(NodeError):
            self._send(
                server_command.preamble_bytes(environment) + server_command.sized_program(install)
            )

    def begin(self, timeout: float) -> None:
        """Wait for the server's greeting, and send it the library if it has none."""
        log.debug("%s: waits for its login shell, and for our server there", self.name)
        said = self._marked(timeout + server_command.activation_seconds(self.environment))
        if said.startswith(ASKS):
            log.debug("%s: is sent our program", self.name)
            self.channel.settimeout(timeout)
            self._send(packed_library())
            said = self._marked(timeout)
        if said.startswith((b"!", b"?")):
            raise self._refusal(said)
        self.rest = memoryview(said)
        deadline = time.monotonic() + timeout
        greeting = self.message(deadline, "its program does not greet")
        if not isinstance(greeting, Greeting):
            raise nonsense_error(Nonsense("no greeting"))
        if greeting.version != OWN:
            raise NodeError(
                f"its program is orchestrator {greeting.version.package}, and not {OWN.package},"
                " which was sent",
                "delete ~/.orchestrator/lib there",
            )
        self.clock.greeted(self.begun, greeting.time)
        log.debug("%s: its server greets", self.name)
        beats.keep(self)

    def _marked(self, timeout: float) -> bytes:
        """Return the bytes after the nonce; output of banners and rc files before it is skipped."""
        mark = f"\n{self.nonce}\n".encode()
        deadline = time.monotonic() + timeout
        noise = b""
        while mark not in noise or noise.endswith(mark):
            try:
                data = self._receive(deadline - time.monotonic(), "")
            except Silent:
                # The ssh program writes the server's login messages on standard error.
                said = noise.decode(errors="replace") or self._errors()
                raise Silent(*server_command.why_never_begins(said)) from None
            if not data or len(noise) > NOISE_LIMIT_BYTES:
                reason = server_command.no_server_reason(noise, self._errors(), self.environment)
                raise NodeError(*reason)
            noise += data
        return noise.partition(mark)[2]

    def ask(self, request: Request[A], timeout: float) -> A:
        """Send a request and return its answer; not for use while the node streams data."""
        return self.wait_for(self.post(request), request, timeout)

    def wait_for(
        self, number: int, request: Request[A], timeout: float, since: float | None = None
    ) -> A:
        """Wait for the answer to a request, and return it; answers to earlier requests are skipped.

        The timeout counts from `since`, or from now.
        """
        deadline = (time.monotonic() if since is None else since) + timeout
        silence = f"it does not answer ({request.do}) within {timeout:.0f} s; {HANGS}"
        while True:
            try:
                answer = self.message(deadline, silence)
            except NodeError as error:
                log.debug("%s: no answer to %s (%d): %s", self.name, request.do, number, error.what)
                raise
            if isinstance(answer, Refused):
                self.refused(answer)
            if isinstance(answer, Refused) and answer.id == number:
                raise Declined(answer.error, answer.kind)
            if isinstance(answer, Answered):
                result: A = self.answer_of(answer)[1]  # type: ignore[assignment]
                if answer.id == number:
                    return result

    def post(self, request: Request[Any]) -> int:
        """Send a request without waiting for its answer; return its number."""
        with self.sending:
            return self._post(request)

    def _post(self, request: Request[Any]) -> int:
        self.posted_at = time.monotonic()
        self.count += 1
        self.pending[self.count] = request, self.posted_at
        if request.do not in ROUTINE:
            log.debug("%s: is asked %s (%d)", self.name, request.do, self.count)
        text = frame_of_request(self.count, request).encode("ascii")
        self._send(frames.frame_header(JSON, len(text)) + text)
        return self.count

    def beat(self) -> None:
        """Send a heartbeat, unless another thread is sending; its answer is skipped."""
        if self.sending.acquire(blocking=False):
            try:
                self._post(Ping())
            except NodeError:
                # The next request to the node reports the loss.
                beats.drop(self)
            finally:
                self.sending.release()

    def beat_if_quiet(self) -> None:
        """Send a heartbeat if no request was sent within HEAD_BEAT_SECONDS."""
        if time.monotonic() - self.posted_at > HEAD_BEAT_SECONDS:
            self.beat()

    def answer_of(self, answer: Answered) -> tuple[Request[Any], Message]:
        """Return the request that an answer belongs to, and the answer with times of our clock."""
        request, sent = self.pending.pop(answer.id, (None, 0.0))
        if request is None:
            raise nonsense_error(Nonsense(f"an answer to request {answer.id}, which was not asked"))
        if request.do not in ROUTINE:
            log.debug("%s: answers %s (%d)", self.name, request.do, answer.id)
        try:
            known = decode_value(request.answer, answer.ok, ahead=self.clock.offset)
        except Nonsense as error:
            raise nonsense_error(error) from error
        if isinstance(known, Clock):
            # Clocks drift, so a recent exchange is preferred over one of an hour ago.
            self.clock.heard(sent, known.time)
        return request, known

    def refused(self, answer: Refused) -> Request[Any] | None:
        """Remove the refused request from the pending ones, and return it."""
        log.debug("%s: refuses request %d: %s", self.name, answer.id, answer.error)
        return self.pending.pop(answer.id, (None, 0.0))[0]

    def put(self, data: bytes, timeout: float) -> None:
        """Send the data that the next request refers to."""
        self.channel.settimeout(timeout)
        for at in range(0, len(data), STEP_BYTES):
            piece = data[at : at + STEP_BYTES]
            self.put_frame(frames.frame_header(PIECE, len(piece)) + piece)

    def put_frame(self, frame: bytes) -> None:
        with self.sending:
            self._send(frame)

    def message(self, deadline: float, silence: str) -> Incoming | None:
        """Read a frame and return its message, or None for a frame of a stream."""
        kind, size = self.header(deadline, silence)
        data = self.exactly(size, deadline, silence)
        return read_message(data) if kind == JSON else None

    def header(self, deadline: float, silence: str) -> tuple[bytes, int]:
        try:
            return frames.parse_header(self.exactly(HEADER.size, deadline, silence))
        except Nonsense as error:
            raise nonsense_error(error) from error

    def exactly(self, size: int, deadline: float, silence: str) -> bytes:
        parts: list[memoryview] = []
        while size:
            try:
                parts.append(self.some(size, deadline, silence))
            except Silent:
                self.rest = memoryview(b"".join(parts))
                raise
            size -= len(parts[-1])
        return b"".join(parts)

    def some(self, limit: int, deadline: float, silence: str) -> memoryview:
        """Return the next bytes, at most `limit`; raise NodeError at the end or the deadline."""
        if not self.rest:
            self.rest = memoryview(self._receive(deadline - time.monotonic(), silence))
            if not self.rest:
                raise NodeError(f"the connection broke ({self._errors() or 'it hung up'})")
        data, self.rest = self.rest[:limit], self.rest[limit:]
        return data

    def _receive(self, timeout: float, silence: str) -> bytes:
        self.channel.settimeout(max(0.0, timeout))
        try:
            return self.channel.recv(READ_BYTES)
        except TimeoutError:
            raise Silent(silence) from None
        except OSError as error:
            raise NodeError(f"the connection broke ({error})") from error

    def _errors(self) -> str:
        """Return the last 500 characters of the node's standard error, or ""."""
        if not self.channel.recv_stderr_ready():
            return ""
        return self.channel.recv_stderr(1 << 16).decode(errors="replace").strip()[-500:]

    def _refusal(self, text: bytes) -> NodeError:
        """Read the rest of the message that says why no server started; return it as an error."""
        with contextlib.suppress(NodeError):
            deadline = time.monotonic() + LAST_WORDS_SECONDS
            while data := self._receive(deadline - time.monotonic(), ""):
                text += data
        reason = text[1:].decode(errors="replace").partition("\n")[0].strip()
        if text.startswith(b"!") or not self.environment.activate:
            inside = self.environment.wrap and "ORCHESTRATOR_HOME" in reason
            return NodeError(reason, IN_A_CONTAINER if inside else "")
        activate, errors = self.environment.activate, self._errors()
        return NotActive(*server_command.activation_problem(activate, reason, errors))

    def _send(self, data: bytes) -> None:
        try:
            self.channel.sendall(data)
        except OSError as error:
            reason = str(error) or "it takes no more bytes: is the link to it cut?"
            raise NodeError(f"the connection broke ({reason})") from error

    def close(self) -> None:
        beats.drop(self)
        self.channel.close()


def read_message(data: bytes) -> Incoming:
    try:
        return read_incoming(parse_object(data))
    except Nonsense as error:
        raise nonsense_error(error) from error
