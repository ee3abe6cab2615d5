"""Stores facts on machines for this login, by the name of each machine.

They are small JSON files under ~/.orchestrator. The facts decide where jobs run, so a file that
other users can write is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.permissions import others
from orchestrator.protocol.message import Nonsense, decode, encode, parse

T = TypeVar("T")

LARGEST_BYTES = 16 << 20


class ListedNode(Protocol):
    """A node of a list or of a record."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int | None: ...


def machine_of(node: ListedNode) -> str:
    """Return host:port or [v6]:port, or only the host if the list gives no port."""
    host = node.host.lower()
    if ":" in host:
        host = canonical(host)
    if node.port is None:
        return host
    return f"[{host}]:{node.port}" if ":" in host else f"{host}:{node.port}"


def canonical(host: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        return host


# -- the files --------------------------------------------------------------------------------


def directory() -> Path:
    return Path(files.our_directory())


def read(name: str, kind: type[T]) -> T:
    """Return the content of a file. A missing file counts as an empty one.

    Raise UsageError if other users can write it, or if it is not valid.
    """
    path = directory() / name
    try:
        with files.open_plain(path) as file:
            problem = others(os.fstat(file.fileno()))
            text = file.read(LARGEST_BYTES)
    except FileNotFoundError:
        problem, text = "", b"{}"
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if problem:
        raise UsageError(f"{path} {problem}, and is not believed", f"look at it, then: rm {path}")
    try:
        return decode(kind, parse(text), newer=True)
    except Nonsense as error:
        raise UsageError(f"{path} is not a file of ours: {error}", f"rm {path}") from error


@contextlib.contextmanager
def changing(name: str, kind: type[T]) -> Iterator[T]:
    """Yield the content of a file, to be changed in place, and write it at the end.

    A lock keeps other processes out until then.
    """
    path = directory() / name
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(lock):
            fcntl.flock(lock, fcntl.LOCK_EX)
            data = read(name, kind)
            yield data
            files.replace(path, json.dumps(encode(data), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
