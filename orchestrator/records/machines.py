"""What this login remembers of machines: the name of each, and small JSON files on the head.

The files are under ~/.orchestrator. What they say decides where jobs run, so they count only if
nobody else can write them.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.permissions import others

LARGEST_BYTES = 16 << 20


class Place(Protocol):
    """A node of a list or of a record."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int | None: ...


def machine_of(node: Place) -> str:
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
    return Path(files.own_directory())


def read(name: str) -> dict[str, Any]:
    """Return what the file holds, nothing where there is none; UsageError if it does not count."""
    path = directory() / name
    try:
        with files.open_plain(path) as file:
            problem = others(os.fstat(file.fileno()))
            text = file.read(LARGEST_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if problem:
        raise UsageError(f"{path} {problem}, and is not believed", f"look at it, then: rm {path}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}", f"rm {path}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} is not a file of ours", f"rm {path}")
    return data


@contextlib.contextmanager
def changing(name: str) -> Iterator[dict[str, Any]]:
    """Give what the file holds to be changed, and replace the file with that; one at a time."""
    path = directory() / name
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data = read(name)
        yield data
        files.replace(path, json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        os.close(lock)
