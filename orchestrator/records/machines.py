"""Remembers machines for this login, under the name of each.

What is known of them is kept in small JSON files under ~/.orchestrator. It decides where jobs run,
so a file counts only if nobody else can write it.
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
    """Write host:port, or [v6]:port; the host alone where the list gives no port."""
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
    """Return what the file holds, as of an empty one where there is none.

    UsageError, if it does not count.
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
    """Give what the file holds to be changed, and replace the file with that; one at a time."""
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
