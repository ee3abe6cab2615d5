"""The head's end of the one channel to each node: ships the node's program, asks and receives."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import secrets
import shlex
import struct
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import NodeError
from orchestrator.head.connect.light_paramiko import paramiko
from orchestrator.head.connect.transport import Connection

HOUSE = Path(__file__).parents[2]
HEADER = struct.Struct(">cI")
READ = 1 << 20  # paramiko moves all that it keeps to the front after every read: read much
NOISE_LIMIT = 1 << 20

# What runs on nodes: the node's side, the engine, and what a user's script may import of us there.
TRAVELS = (
    *("__init__.py", "distributed.py", "errors.py", "files.py", "host_ranges.py"),
    *("slurm_environment.py", "text.py", "version.py"),
    *("config", "records", "node", "engine"),
)
# No character in these that any login shell (sh, bash, zsh, csh, fish) treats specially in quotes.
CHOOSE_PYTHON = (
    'c=$1; shift; for p; do case "$p" in "~/"*) p="$HOME/${p#??}";; esac; '
    'command -v "$p" >/dev/null 2>&1 && exec "$p" -c "$c"; done; echo "no-python-here"'
)
READ_PROGRAM = (
    'f=open(0,"rb",0,closefd=False);exec(b"".join(iter(lambda:f.read(1)or exit(9),bytes(1))))'
)


@functools.cache
def library() -> tuple[str, bytes]:
    """(digest, blob): our sources that run on nodes, where only Python and torch are installed."""
    paths = [
        path
        for name in TRAVELS
        for path in (sorted((HOUSE / name).rglob("*.py")) if "." not in name else [HOUSE / name])
    ]
    files = {
        f"orchestrator/{path.relative_to(HOUSE)}": path.read_text(encoding="utf-8")
        for path in paths
    }
    files["__main__.py"] = "from orchestrator.node.main import main\n\nmain()\n"
    text = json.dumps(files).encode("ascii")
    return hashlib.sha256(text).hexdigest()[:16], zlib.compress(text, 6)


@functools.cache
def installer() -> str:
    return (HOUSE / "node/install.py").read_text(encoding="utf-8")


def python_candidates(wanted: str | None) -> list[str]:
    """The one asked for, or: the head's own path if the node has it too, else the login's."""
    return [wanted] if wanted else [sys.executable, "python3", "python"]


class Declined(NodeError):
    """The node is there, and cannot do what was asked."""


class Link:
    """An open channel to one node's link program. Requests are asked one at a time."""

    def __init__(self, connection: Connection, pythons: Sequence[str], timeout: float) -> None:
        self.connection = connection
        self.nonce = f"orchestrator-{secrets.token_hex(8)}"
        self.rest = memoryview(b"")
        self.sending = threading.Lock()
        self.count = 0
        choose = [CHOOSE_PYTHON, "sh", READ_PROGRAM, *pythons]
        self.channel = connection.run("exec /bin/sh -c " + " ".join(map(quote, choose)), timeout)
        digest, blob = library()
        install = f"{installer()}\ninstall({digest!r}, {len(blob)}, {self.nonce!r})\n"
        with contextlib.suppress(NodeError):  # it left at once; begin() hears why
            self._send(install.encode() + b"\0" + blob)

    def begin(self, timeout: float) -> None:
        """Wait for the link program's first word, past whatever a banner or rc file prints."""
        mark = f"\n{self.nonce}\n".encode()
        deadline = time.monotonic() + timeout
        noise = b""
        while mark not in noise:
            data = self._receive(
                deadline - time.monotonic(), "its login shell never gets to our command"
            )
            if not data or len(noise) > NOISE_LIMIT:
                raise NodeError(*why_no_link(noise, self._errors()))
            noise += data
        rest = noise.partition(mark)[2]
        if rest.startswith(b"!"):
            raise NodeError(rest[1:].decode(errors="replace").strip())
        self.rest = memoryview(rest)

    def ask(self, do: str, timeout: float, **request: Any) -> dict[str, Any]:
        """One request, one answer; for as long as nobody streams."""
        number = self.tell(do, **request)
        deadline = time.monotonic() + timeout
        silence = f"it does not answer ({do}) within {timeout:.0f} s"
        while True:
            kind, size = self.header(deadline, silence)
            data = self.exactly(size, deadline, silence)
            answer: dict[str, Any] = json.loads(data) if kind == b"J" else {}
            if answer.get("id") == number:
                if "error" in answer:
                    raise Declined(answer["error"])
                found: dict[str, Any] = answer["ok"]
                return found

    def tell(self, do: str, **request: Any) -> int:
        """A request whose answer nobody waits for here; its number."""
        with self.sending:
            self.count += 1
            text = json.dumps({"id": self.count, "do": do, **request}).encode("ascii")
            self._send(HEADER.pack(b"J", len(text)) + text)
            return self.count

    def put(self, data: bytes, timeout: float) -> None:
        """Bytes that the next request is about."""
        self.channel.settimeout(timeout)
        with self.sending:
            self._send(HEADER.pack(b"P", len(data)) + data)

    def header(self, deadline: float, silence: str) -> tuple[bytes, int]:
        kind, size = HEADER.unpack(self.exactly(HEADER.size, deadline, silence))
        return kind, size

    def exactly(self, size: int, deadline: float, silence: str) -> bytes:
        parts = []
        while size:
            parts.append(self.some(size, deadline, silence))
            size -= len(parts[-1])
        return b"".join(parts)

    def some(self, limit: int, deadline: float, silence: str) -> memoryview:
        """What is there, up to a limit; NodeError when the channel ends or stays silent."""
        if not self.rest:
            self.rest = memoryview(self._receive(deadline - time.monotonic(), silence))
            if not self.rest:
                raise NodeError(f"the connection broke ({self._errors() or 'it hung up'})")
        data, self.rest = self.rest[:limit], self.rest[limit:]
        return data

    def _receive(self, timeout: float, silence: str) -> bytes:
        self.channel.settimeout(max(0.01, timeout))
        try:
            return self.channel.recv(READ)
        except TimeoutError:
            raise NodeError(silence) from None
        except OSError as error:
            raise NodeError(f"the connection broke ({error})") from error

    def _errors(self) -> str:
        """What the other side last said on standard error."""
        if not self.channel.recv_stderr_ready():
            return ""
        return self.channel.recv_stderr(1 << 16).decode(errors="replace").strip()[-500:]

    def _send(self, data: bytes) -> None:
        try:
            self.channel.sendall(data)
        except (OSError, paramiko.SSHException) as error:
            raise NodeError(f"the connection broke ({error})") from error

    def close(self) -> None:
        self.channel.close()


def quote(word: str) -> str:
    """One word for any login shell; ours hold nothing that single quotes would let through."""
    return shlex.quote(word)


def why_no_link(noise: bytes, errors: str) -> tuple[str, str]:
    said = (errors or noise.decode(errors="replace").strip())[-300:]
    if b"no-python-here" in noise:
        return "there is no such python", "name one with python=/path behind the node in the list"
    if said.startswith("srun: "):
        return f"Slurm starts no step there: {said}", "look at: squeue, scontrol show node"
    return (
        f"its login shell ends before our program starts{': ' + said if said else ''}",
        "try: ssh to it with the command `true`; look at its .bashrc for `exit` and `exec`",
    )
