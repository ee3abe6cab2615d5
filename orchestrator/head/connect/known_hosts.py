"""Reads the known_hosts files; paramiko compares their keys with the key that a host presents.

Paramiko does not support markers and patterns as OpenSSH does. A host with such a line, or with
no line, is reached by the ssh program (see way.py). Only ssh writes into the files.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hmac
import threading
from dataclasses import dataclass
from pathlib import Path

from orchestrator.head.connect.ssh_config import Destination

CHANGING = threading.Lock()


@dataclass(frozen=True)
class KnownLine:
    """A line of a known_hosts file."""

    names: str
    kind: str
    blob: bytes
    # "@revoked", "@cert-authority" or "".
    marker: str
    # The place of the line, as file:line.
    where: str

    @property
    def needs_ssh(self) -> str:
        """Return the feature of the line that only OpenSSH supports; "" for a plain line."""
        return self.marker or ("a pattern" if set(self.names) & set("*?!") else "")

    def is_about(self, name: str) -> bool:
        """Return True if the line may apply to a host."""
        if self.names.startswith("|"):
            return _is_hash_of(self.names, name.encode())
        names = self.names.lower().split(",")
        return any(fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in names)


class KnownFile:
    """The lines of a known_hosts file: plain names indexed by name, other lines in order."""

    def __init__(self, text: str, path: Path) -> None:
        self.by_name: dict[str, list[KnownLine]] = {}
        self.others: list[KnownLine] = []
        for number, line in enumerate(text.splitlines(), 1):
            fields = line.split()
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            if len(fields) < 3 or fields[0].startswith("#"):
                continue
            try:
                blob = base64.b64decode(fields[2], validate=True)
            except ValueError:
                continue
            known = KnownLine(fields[0], fields[1], blob, marker, f"{path}:{number}")
            if known.needs_ssh or known.names.startswith("|"):
                self.others.append(known)
            else:
                for name in known.names.lower().split(","):
                    self.by_name.setdefault(name, []).append(known)

    def about(self, name: str) -> list[KnownLine]:
        return self.by_name.get(name, []) + [line for line in self.others if line.is_about(name)]


def _is_hash_of(names: str, host: bytes) -> bool:
    """Return True if `|1|salt|digest`, as HashKnownHosts writes it, stands for a host."""
    try:
        _, kind, salt, digest = names.split("|")
        found = hmac.digest(binascii.a2b_base64(salt), host, "sha1")
        return kind == "1" and found == binascii.a2b_base64(digest)
    except ValueError:
        return False


def lines_about(destination: Destination) -> list[KnownLine]:
    """Return every known_hosts line that may apply to this host, the user's files first."""
    files = destination.user_known_hosts + destination.global_known_hosts
    return [line for path in files for line in _read(path).about(destination.listed_name)]


_files: dict[Path, tuple[tuple[int, int], KnownFile]] = {}


def _read(path: Path) -> KnownFile:
    """Return the lines of a file; it is read again only if its size or mtime has changed."""
    with CHANGING:
        try:
            status = path.stat()
            state = status.st_size, status.st_mtime_ns
            if path not in _files or _files[path][0] != state:
                _files[path] = state, KnownFile(path.read_text(errors="replace"), path)
            return _files[path][1]
        except OSError:
            return KnownFile("", path)
