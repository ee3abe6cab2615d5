"""Remembers the newest environment of `orchestrator bootstrap` on each machine, for this login.

It is for machines whose own Python has no torch: no launch could run there without it. It decides
what runs on nodes, so a file that other users can write is refused.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.permissions import other_writers
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.message import Nonsense, decode_value, parse_object

NAME = "activations.json"
LARGEST_BYTES = 16 << 20


def machine_of(node: Node) -> str:
    """Return host:port or [v6]:port, or only the host if the list gives no port."""
    host = node.host.lower()
    if ":" in host:
        host = canonical_host(host)
    if node.port is None:
        return host
    return f"[{host}]:{node.port}" if ":" in host else f"{host}:{node.port}"


def canonical_host(host: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        return host


def activations_file() -> Path:
    return Path(files.our_directory(), NAME)


def read_activations() -> dict[str, str]:
    """Return the activation of each machine.

    Raise UsageError if other users can write the file, or if it is not valid.
    """
    path = activations_file()
    try:
        with files.open_plain(path) as opened:
            problem, text = other_writers(os.fstat(opened.fileno())), opened.read(LARGEST_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if problem:
        raise UsageError(f"{path} {problem}, and is not used", f"look at it, then: rm {path}")
    try:
        return decode_value(dict[str, str], parse_object(text))
    except Nonsense as error:
        raise UsageError(f"{path} is damaged: {error}", f"rm {path}") from error


def remember_activations(new: Mapping[str, str]) -> None:
    """Save the activation of each of these machines. A lock keeps other processes out."""
    path = activations_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(lock):
            fcntl.flock(lock, fcntl.LOCK_EX)
            files.replace_file(path, json.dumps({**read_activations(), **new}, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
