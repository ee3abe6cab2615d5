"""Passes JSON messages and open files between the processes of a hand-over, and identifies files.

Imports nothing of ours: agent.py loads it by its path, into the process that becomes torchrun.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

HEADER = struct.Struct(">I")
LARGEST_BYTES = 1 << 26
MOST_FILES = 8


def send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message; the other process gets these files opened, too."""
    text = json.dumps(message).encode("ascii")
    header = [HEADER.pack(len(text))]
    if files:
        socket.send_fds(connection, header, list(files))
    else:
        connection.sendall(header[0])
    connection.sendall(text)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its files; an EOFError says that the other one is gone."""
    flags = socket.MSG_CMSG_CLOEXEC
    head, files, _, _ = socket.recv_fds(connection, HEADER.size, MOST_FILES, flags)
    head += exactly(connection, HEADER.size - len(head)) if head else b""
    if not head:
        raise EOFError("the other process is gone")
    (size,) = HEADER.unpack(head)
    if size > LARGEST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    message = json.loads(exactly(connection, size))
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message, files


def exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the other process is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def mark(path: str) -> list[int]:
    """Return what changes with a file; nothing for one that is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return []
    return [status.st_mtime_ns, status.st_size, status.st_ino]
