"""The socket of the process that holds connections: where it is, and what goes through it.

Only processes of the same user on the same machine get through: the directory is the user's alone,
and each end asks the kernel who the other is.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.version import __version__
from orchestrator.head.connect import tasks

LARGEST_BYTES = 1 << 24  # of a message: the names of all nodes
SIZE = struct.Struct(">I")
CREDENTIALS = struct.Struct("3i")
OPEN = contextlib.ExitStack()  # what stays open until this process ends


def directory() -> Path:
    return Path(files.our_directory()).absolute() / "connections"


def name() -> str:
    """Return the socket's name: machines may share a home, and none reaches another's socket."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname())[:60] + ".socket"


@contextlib.contextmanager
def entered() -> Iterator[str]:
    """Give a short path of the directory: that of a socket may have 107 bytes and no more."""
    with files.opened(directory()) as descriptor:
        yield private(descriptor)


def private(descriptor: int) -> str:
    """Return a path of an open directory; PermissionError if it is not ours alone."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{directory()} is not ours alone")
    return f"/proc/self/fd/{descriptor}"


@functools.lru_cache(maxsize=1)
def doorway(path: Path) -> int:
    """Open the directory for as long as this process lives: each node is asked for through it."""
    return OPEN.enter_context(files.opened(path))


def call() -> tasks.Socket | None:
    """Connect to the process that holds connections, if there is one."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(f"{private(doorway(directory()))}/{name()}")
        if peer(sock)[1] == os.geteuid():
            return tasks.Socket.of(sock)
    except OSError:
        pass  # there is none
    sock.close()
    return None


@functools.cache
def program() -> str:
    """Return what only processes with the same program of ours have in common."""
    room = Path(__file__).parents[1]
    newest = max(path.stat().st_mtime_ns for path in room.rglob("*.py"))
    return f"{__version__} {room} {newest}"


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the kernel knows them."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(data)
    return pid, uid


def send(sock: socket.socket, message: Mapping[str, Any], passed: Sequence[int] = ()) -> None:
    """Send a message, and with its first byte some open files."""
    text = json.dumps(message).encode("ascii")
    data = SIZE.pack(len(text)) + text
    sent = socket.send_fds(sock, [data], passed) if passed else 0
    if sent < len(data):  # else it may be answered and closed by now, and even b"" would fail
        sock.sendall(data[sent:])


def ask(sock: socket.socket, request: Mapping[str, Any], *passed: int) -> dict[str, Any]:
    """Ask the process that holds the connections; {} if it is gone, or runs another program."""
    send(sock, {"program": program(), **request}, passed)
    return receive(sock)[0]


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message, {} at the end, and the open files that came with it."""
    data, passed, _, _ = socket.recv_fds(sock, SIZE.size, 2)
    try:
        while data and len(data) < SIZE.size:
            data += sock.recv(SIZE.size - len(data)) or _cut_short()
        if not data:
            return {}, passed
        (size,) = SIZE.unpack(data)
        text = bytearray()
        while len(text) < min(size, LARGEST_BYTES):
            text += sock.recv(size - len(text)) or _cut_short()
        message = json.loads(text)
        return message if isinstance(message, dict) else {}, passed
    except BaseException:
        for descriptor in passed:
            os.close(descriptor)
        raise


def _cut_short() -> bytes:
    raise ConnectionResetError("a message was cut short")
