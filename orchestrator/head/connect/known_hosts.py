"""Reads which host keys are known, adds those of new hosts, and says which have changed.

paramiko compares the keys. Lines that it cannot read as OpenSSH does, with markers or patterns,
send a host to the ssh program (see way.py).
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import logging
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.ssh_config import Destination

if TYPE_CHECKING:
    import paramiko

log = logging.getLogger(__name__)

CHANGING = threading.Lock()


@dataclass(frozen=True)
class KnownLine:
    """A line of a known_hosts file."""

    names: str
    kind: str
    key: str  # base64
    marker: str  # @revoked, @cert-authority or nothing
    where: str  # file:line

    @property
    def needs_ssh(self) -> str:
        """Return what in the line only OpenSSH can judge; nothing for a plain line."""
        return self.marker or ("a pattern" if set(self.names) & set("*?!") else "")

    @cached_property
    def blob(self) -> bytes:
        try:
            return base64.b64decode(self.key, validate=True)
        except ValueError:
            return b""

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
            known = KnownLine(fields[0], fields[1], fields[2], marker, f"{path}:{number}")
            if known.needs_ssh or known.names.startswith("|"):
                self.others.append(known)
            else:
                for name in known.names.lower().split(","):
                    self.by_name.setdefault(name, []).append(known)

    def about(self, name: str) -> list[KnownLine]:
        found = [
            *self.by_name.get(name, ()),
            *(line for line in self.others if line.is_about(name)),
        ]
        return [line for line in found if line.blob]


def _is_hash_of(names: str, host: bytes) -> bool:
    """Return True if `|1|salt|digest`, as HashKnownHosts writes it, stands for a host."""
    try:
        _, kind, salt, digest = names.split("|")
        found = hmac.digest(binascii.a2b_base64(salt), host, "sha1")
        return kind == "1" and found == binascii.a2b_base64(digest)
    except ValueError:
        return False


def lines_about(destination: Destination, name: str | None = None) -> list[KnownLine]:
    """Return every line that may be about this host, the user's files first."""
    wanted = name or destination.listed_name
    files = destination.user_known_hosts + destination.global_known_hosts
    return [line for path in files for line in _read(path).about(wanted)]


def lines_without_port(destination: Destination) -> list[KnownLine]:
    """Return the lines about the name alone of a host on another port; ssh trusts them as well."""
    if destination.alias or destination.port == 22:
        return []
    return lines_about(destination, destination.host.lower())


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


def fingerprint(blob: bytes) -> str:
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def shown(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {fingerprint(key.asbytes())}"


def accept(destination: Destination, key: paramiko.PKey, *, strict: bool) -> None:
    """Write down the key of a host that is not known; raise where unknown hosts are refused.

    As for ssh, it is enough if a host on another port is known by its name alone.
    """
    known = lines_without_port(destination)
    if any(line.blob == key.asbytes() and not line.needs_ssh for line in known):
        return
    if strict or destination.strict:
        raise NodeError(f"its host key is not known ({shown(key)})", _how_to_add(destination))
    if destination.user_known_hosts:
        _append(destination.user_known_hosts[0], destination, key)


def _append(path: Path, destination: Destination, key: paramiko.PKey) -> None:
    name = destination.listed_name
    if destination.hash_known_hosts:
        from paramiko import HostKeys

        name = HostKeys.hash_host(name)
    line = f"{name} {key.get_name()} {key.get_base64()}\n".encode()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with CHANGING, path.open("a+b") as file:
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
    except OSError as error:
        raise NodeError(
            f"its host key cannot be recorded in {path}: {error.strerror}",
            "make the file writable, or name another one with UserKnownHostsFile in ssh_config",
        ) from error
    log.info("%s: new host key written to %s", destination.listed_name, path)


def _how_to_add(destination: Destination) -> str:
    scan = f"ssh-keyscan -p {destination.port} {destination.host}"
    if destination.alias:
        scan += f" | sed 's/^[^ ]*/{destination.alias}/'"
    return f"compare the fingerprint, then: {scan} >> ~/.ssh/known_hosts"


def has_changed(destination: Destination, key: paramiko.PKey) -> NodeError:
    """Return the error for a host that shows another key than known_hosts has."""
    known = lines_about(destination)
    old = next((line for line in known if line.kind == key.get_name()), known[0])
    return NodeError(
        f"its host key has changed: it shows {shown(key)}, {old.where} says "
        f"{old.kind} {fingerprint(old.blob)}",
        f"if you know that it was reinstalled: ssh-keygen -R '{destination.listed_name}'"
        f" -f '{old.where.rpartition(':')[0]}'; if not, someone may be"
        " intercepting the connection",
    )
