"""Opens the one channel to a node, ships the node's program through it, asks and receives."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import secrets
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import server_command
from orchestrator.head.connect.beats import beats
from orchestrator.head.connect.transport import Channel, Connection
from orchestrator.head.nodes.environment import Environment
from orchestrator.protocol import frames
from orchestrator.protocol.frames import HEADER, JSON, PIECE
from orchestrator.protocol.message import Message, Nonsense, decode, parse
from orchestrator.protocol.requests.request import (
    Answered,
    Beat,
    Greeting,
    Incoming,
    Refused,
    Request,
    frame_of_request,
    read_incoming,
)
from orchestrator.protocol.timing import HEAD_BEAT_SECONDS
from orchestrator.protocol.version import OWN

HOUSE = Path(__file__).parents[2]
READ_BYTES = 1 << 20  # paramiko moves all that it keeps to the front after every read: read much
STEP_BYTES = 1 << 18  # it copies what is left after every 32 KB: 1.7 of 7.6 s with larger pieces
NOISE_LIMIT_BYTES = 1 << 20
LONGEST_REASON = 4000  # characters, of whatever a node says
ASKS = b"+"  # the installer's, in place of a greeting
# What `head -n1` in an rc file reads at once is 8192 bytes: something of ours is left then, and our
# Python sees that it is not the beginning. Without it, it would wait.
MORE_THAN_A_BLOCK_BYTES = 8192 + 256
LAST_WORDS_SECONDS = 2.0  # for what follows a refusal
HANGS = "is its link cut? if one of its disks hangs, so does `df` there: try it over ssh"
IN_A_CONTAINER = "a container reads no .bashrc: docker exec -i -e ORCHESTRATOR_HOME=/path NAME"
TOO_OLD = "its Python {} is too old: 3.9 is needed"
ANOTHER_PYTHON = "name one with python=/path after the node in the list, or --python /path"

# What runs on nodes: the node's side, the engine, and what a user's script may import of us there.
TRAVELS = (
    *("__init__.py", "distributed.py", "common", "config", "records", "protocol", "node"),
    *("engine", "traces", "trackers"),
)


A = TypeVar("A", bound=Message)


class Library(NamedTuple):
    """Our sources that run on nodes, which have only torch."""

    digest: str  # its name there
    checksum: int  # of all names and contents, in any order
    files: tuple[tuple[str, bytes], ...]  # names and sources


READING = threading.Lock()


def sources() -> list[Path]:
    return [
        path
        for name in TRAVELS
        for path in (sorted((HOUSE / name).rglob("*.py")) if "." not in name else [HOUSE / name])
    ]


def library() -> Library:
    """Return it, read once however many nodes are connected to at the same moment."""
    with READING:
        return read()


def parcel() -> bytes:
    """Return what a node is sent that lacks it: its size in a line, and {name: source}, packed."""
    with READING:
        return pack(read().files)


@functools.cache
def read() -> Library:
    files = {f"orchestrator/{path.relative_to(HOUSE)}": path.read_bytes() for path in sources()}
    files["__main__.py"] = b"from orchestrator.node.main import main\n\nmain()\n"
    sums = {name: zlib.crc32(data, zlib.crc32(name.encode())) for name, data in files.items()}
    digest = hashlib.sha256(repr(list(files)).encode())
    for data in files.values():
        digest.update(b"%d\n%b" % (len(data), data))
    return Library(digest.hexdigest()[:16], sum(sums.values()), tuple(files.items()))


@functools.lru_cache(maxsize=1)
def pack(files: tuple[tuple[str, bytes], ...]) -> bytes:
    texts = {name: data.decode("utf-8") for name, data in files}
    packed = zlib.compress(json.dumps(texts).encode("ascii"), 6)
    return b"%d\n%b" % (len(packed), packed)


@functools.cache
def installer() -> str:
    texts = [HOUSE / "common/permissions.py", HOUSE / "node/install.py"]
    return "\n".join(path.read_text(encoding="utf-8") for path in texts)


class Declined(NodeError):
    """The node is there, and cannot do what was asked. `kind`: see protocol/requests/."""

    def __init__(self, what: str, kind: str = "") -> None:
        super().__init__(what[:LONGEST_REASON])
        self.kind = kind


class Silent(NodeError):
    """Nothing came in time; what came before is kept, so one may wait again."""


class NotEntered(NodeError):
    """The node is there, and its container, or what else wraps it, cannot be entered."""


class NotActive(NodeError):
    """The node is there, and its environment cannot be activated."""


def nonsense(error: Nonsense) -> NodeError:
    return NodeError(f"the node broke the protocol: {error}")


class NodeChannel:
    """An open channel to one node's server. Requests are asked one at a time."""

    def __init__(self, connection: Connection, environment: Environment, timeout: float) -> None:
        self.connection = connection
        self.environment = environment
        self.nonce = f"orchestrator-{secrets.token_hex(8)}"
        self.rest = memoryview(b"")
        self.sending = threading.Lock()
        self.count, self.posted_at = 0, 0.0
        self.pending: dict[int, Request[Any]] = {}  # number -> request that is not answered yet
        self.channel: Channel = connection.run(
            server_command.command(environment, self.nonce), timeout
        )
        ours = library()
        install = f"{installer()}\ninstall({ours.digest!r}, {ours.checksum}, {self.nonce!r})\n"
        install = install.ljust(MORE_THAN_A_BLOCK_BYTES, "\n")
        with contextlib.suppress(NodeError):  # it left at once; begin() hears why
            self._send(server_command.preamble(environment) + server_command.sized(install))

    def begin(self, timeout: float) -> None:
        """Wait for the server's greeting, and send it the library if it has none."""
        said = self._marked(timeout + server_command.patience(self.environment))
        if said.startswith(ASKS):
            self.channel.settimeout(timeout)
            self._send(parcel())
            said = self._marked(timeout)
        if said.startswith((b"!", b"?")):
            raise self._refusal(said)
        self.rest = memoryview(said)
        deadline = time.monotonic() + timeout
        greeting = self.message(deadline, "its program does not greet")
        if not isinstance(greeting, Greeting):
            raise nonsense(Nonsense("no greeting"))
        if greeting.version != OWN:
            raise NodeError(
                f"its program is orchestrator {greeting.version.package}, and not {OWN.package},"
                " which was sent",
                "delete ~/.orchestrator/lib there",
            )
        beats.keep(self)

    def _marked(self, timeout: float) -> bytes:
        """Wait for what follows the nonce, past whatever a banner or an rc file prints."""
        mark = f"\n{self.nonce}\n".encode()
        deadline = time.monotonic() + timeout
        noise = b""
        while mark not in noise or noise.endswith(mark):
            try:
                data = self._receive(deadline - time.monotonic(), "")
            except Silent:
                said = noise.decode(errors="replace")
                raise Silent(*server_command.never_begins(said)) from None
            if not data or len(noise) > NOISE_LIMIT_BYTES:
                outside = self.environment.wrap and b"python-here" not in noise
                reason = no_server_reason(noise, self._errors(), self.environment)
                raise NotEntered(*reason) if outside else NodeError(*reason)
            noise += data
        return noise.partition(mark)[2]

    def ask(self, request: Request[A], timeout: float) -> A:
        """Ask and wait for the answer; for as long as nobody streams."""
        return self.wait_for(self.post(request), request, timeout)

    def wait_for(
        self, number: int, request: Request[A], timeout: float, since: float | None = None
    ) -> A:
        """Wait for the answer to a request; answers to earlier ones are passed over.

        The time counts from `since`, or from now.
        """
        deadline = (time.monotonic() if since is None else since) + timeout
        silence = f"it does not answer ({request.do}) within {timeout:.0f} s; {HANGS}"
        while True:
            answer = self.message(deadline, silence)
            if isinstance(answer, Refused):
                self.pending.pop(answer.id, None)
            if isinstance(answer, Refused) and answer.id == number:
                raise Declined(answer.error, answer.kind)
            if isinstance(answer, Answered):
                result: A = self.answer_of(answer)[1]  # type: ignore[assignment]
                if answer.id == number:
                    return result

    def post(self, request: Request[Any]) -> int:
        """Send a request whose answer nobody waits for here; return its number."""
        with self.sending:
            return self._post(request)

    def _post(self, request: Request[Any]) -> int:
        self.posted_at = time.monotonic()
        self.count += 1
        self.pending[self.count] = request
        text = json.dumps(frame_of_request(self.count, request)).encode("ascii")
        self._send(frames.header(JSON, len(text)) + text)
        return self.count

    def beat(self) -> None:
        """Send a sign of life, whose answer is passed over; none where something is on its way."""
        if self.sending.acquire(blocking=False):
            try:
                self._post(Beat())
            except NodeError:  # whoever needs the node hears that
                beats.drop(self)
            finally:
                self.sending.release()

    def beat_if_quiet(self) -> None:
        """Do so, unless the node has heard something not long ago."""
        if time.monotonic() - self.posted_at > HEAD_BEAT_SECONDS:
            self.beat()

    def answer_of(self, answer: Answered) -> tuple[Request[Any], Message]:
        """Return the request that this answers, and the answer."""
        request = self.pending.pop(answer.id, None)
        if request is None:
            raise nonsense(Nonsense(f"an answer to request {answer.id}, which was not asked"))
        try:
            return request, decode(request.answer, answer.ok)
        except Nonsense as error:
            raise nonsense(error) from error

    def put(self, data: bytes, timeout: float) -> None:
        """Send bytes that the next request is about."""
        self.channel.settimeout(timeout)
        for at in range(0, len(data), STEP_BYTES):
            piece = data[at : at + STEP_BYTES]
            self.put_frame(frames.header(PIECE, len(piece)) + piece)

    def put_frame(self, frame: bytes) -> None:
        with self.sending:
            self._send(frame)

    def message(self, deadline: float, silence: str) -> Incoming | None:
        """Read a frame: what it says, or None for one of a stream."""
        kind, size = self.header(deadline, silence)
        data = self.exactly(size, deadline, silence)
        return read_message(data) if kind == JSON else None

    def header(self, deadline: float, silence: str) -> tuple[bytes, int]:
        try:
            return frames.parse_header(self.exactly(HEADER.size, deadline, silence))
        except Nonsense as error:
            raise nonsense(error) from error

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
        """Return what is there, up to a limit; NodeError when the channel ends or stays silent."""
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
        """Return what the other side last said on standard error."""
        if not self.channel.recv_stderr_ready():
            return ""
        return self.channel.recv_stderr(1 << 16).decode(errors="replace").strip()[-500:]

    def _refusal(self, text: bytes) -> NodeError:
        """Read to the end why there is no server, and what to do about it."""
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
        return read_incoming(parse(data))
    except Nonsense as error:
        raise nonsense(error) from error


def no_server_reason(noise: bytes, errors: str, environment: Environment) -> tuple[str, str]:
    output = server_command.last_line(errors or noise.decode(errors="replace"))
    if b"no-python-here" in noise:
        return no_python(server_command.pythons(environment))
    another = server_command.another_user(noise.decode(errors="replace"))
    if another:
        return another
    old = re.search(rb"old-python ([0-9.]{1,20})", noise)
    if old:
        return TOO_OLD.format(old[1].decode()), ANOTHER_PYTHON
    # A line of its own: a shell that does not understand our command may print that.
    lines = (noise.decode(errors="replace") + "\n" + errors).splitlines()
    taken = server_command.TAKEN in map(str.strip, lines)
    if taken and not environment.wrap:
        return server_command.INPUT_TAKEN
    python = re.search(rb"^python-here (.{1,500})$", noise, re.MULTILINE)
    if python and not taken:
        return no_sound_python(python[1].decode(errors="replace"), errors or output)
    if output.startswith("srun: "):
        return f"Slurm starts no step there: {output}", "look at: squeue, scontrol show node"
    said = f": {output}" if output and not taken else ""
    if environment.wrap:
        return (
            f"`{environment.wrap}` ends before our program starts{said}",
            f"try there: {environment.wrap} /bin/sh -c 'cat' </etc/hostname  (docker exec needs -i"
            " and no -t)",
        )
    return (
        f"its login shell ends before our program starts{said}",
        server_command.LOOK_FOR_EXIT,
    )


def no_sound_python(path: str, output: str) -> tuple[str, str]:
    if "Unknown option: -X" in output:  # Python 2
        return TOO_OLD.format(path), ANOTHER_PYTHON
    lines = [line for line in output.splitlines() if not line.startswith("python-here ")]
    # What Python says when it cannot begin has the place after the error.
    last = server_command.last_line("\n".join([line for line in lines if "Error" in line] or lines))
    said = f": {last}" if last else ""
    return f"its Python, {path}, ends before our program starts{said}", (
        f"try there: {path} -c 'import json, selectors'; if that works, look for PYTHONHOME and"
        " PYTHONPATH in its rc files; if not, name another with python= after the node in the list,"
        " or --python"
    )


def no_python(pythons: Sequence[str]) -> tuple[str, str]:
    if len(pythons) == 1:
        return (
            f"there is no {pythons[0]} that can be executed",
            "correct --python, or the node's python= in the list",
        )
    return (
        f"there is no Python: neither {', '.join(pythons[:-1])} nor {pythons[-1]}",
        ANOTHER_PYTHON,
    )
