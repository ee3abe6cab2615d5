"""Reads which host keys are known; paramiko compares them with what a host shows.

Lines that it cannot read as OpenSSH does, with markers or patterns, send a host to the ssh program
(see way.py), as does a host without a line. Only ssh writes into the files.
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
    marker: str  # @revoked, @cert-authority or nothing
    where: str  # file:line

    @property
    def needs_ssh(self) -> str:
        """Return what in the line only OpenSSH can judge; nothing for a plain line."""
        return self.marker or ("a pattern" if set(self.names) & set("*?!") else "")

    def is_about(self, name: str) -> bool:
        """Return True if the line may be about a host."""
        if self.names.startswith("|"):
            return _is_hash_of(self.names, name.encode())
        names = self.names.lower().split(",")
        return any(fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in names)


class KnownFile:
    """The lines of a file: those of plain names by name, and the others in order."""

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
        others = [line for line in self.others if line.is_about(name)]
        return [*self.by_name.get(name, ()), *others]


def _is_hash_of(names: str, host: bytes) -> bool:
    """Return True if `|1|salt|digest`, as HashKnownHosts writes it, stands for a host."""
    try:
        _, kind, salt, digest = names.split("|")
        found = hmac.digest(binascii.a2b_base64(salt), host, "sha1")
        return kind == "1" and found == binascii.a2b_base64(digest)
    except ValueError:
        return False


def lines_about(destination: Destination) -> list[KnownLine]:
    """Return every line that may be about this host, the user's files first."""
    files = destination.user_known_hosts + destination.global_known_hosts
    return [line for path in files for line in _read(path).about(destination.listed_name)]


_files: dict[Path, tuple[tuple[int, int], KnownFile]] = {}


def _read(path: Path) -> KnownFile:
    """Return the lines of a file, which is read once in each state of it."""
    with CHANGING:
        try:
            status = path.stat()
            state = status.st_size, status.st_mtime_ns
            if path not in _files or _files[path][0] != state:
                _files[path] = state, KnownFile(path.read_text(errors="replace"), path)
            return _files[path][1]
        except OSError:
            return KnownFile("", path)
