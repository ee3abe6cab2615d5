"""Is the machine that answers the one we knew? known_hosts as OpenSSH reads it.

An unknown host is recorded on first use (accept-new), a changed one is refused. One table is shared
by all connections of a launch: a file of a thousand lines is read once, not once per node.
"""

from __future__ import annotations

import base64
import fnmatch
import functools
import hashlib
import hmac
import threading
from dataclasses import dataclass
from pathlib import Path

from paramiko.hostkeys import HostKeys

from orchestrator.errors import NodeError
from orchestrator.head.connect.light_paramiko import paramiko
from orchestrator.head.connect.ssh_config import Destination

_recording = threading.Lock()


@dataclass(frozen=True)
class KnownKey:
    patterns: str
    kind: str
    blob: bytes
    revoked: bool
    where: str  # file:line

    def names(self, host: str) -> bool:
        named = False
        for pattern in self.patterns.split(","):
            if pattern.startswith("|"):
                named = named or _hashed(host, pattern)
            elif pattern.startswith("!"):
                if _matches(host, pattern[1:]):
                    return False
            else:
                named = named or _matches(host, pattern)
        return named


def _matches(host: str, pattern: str) -> bool:
    """Match a pattern of ssh's, which knows * and ?; fnmatch would read "[host]" as a set."""
    return fnmatch.fnmatchcase(host, pattern.lower().replace("[", "[[]"))


def _hashed(host: str, pattern: str) -> bool:
    """Match `|1|salt|digest`, as HashKnownHosts writes it."""
    try:
        _, kind, salt, digest = pattern.split("|")
        wanted = base64.b64decode(digest)
        return kind == "1" and hmac.digest(base64.b64decode(salt), host.encode(), "sha1") == wanted
    except ValueError:
        return False


def fingerprint(blob: bytes) -> str:
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def listed_name(destination: Destination) -> str:
    name = destination.known_as.lower()
    return name if destination.port == 22 else f"[{name}]:{destination.port}"


@functools.cache
def _read(path: Path) -> tuple[KnownKey, ...]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ()
    keys = []
    for number, line in enumerate(lines, 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#") or marker == "@cert-authority":
            continue
        try:
            blob = base64.b64decode(fields[2])
        except ValueError:
            continue
        where = f"{path}:{number}"
        keys.append(KnownKey(fields[0], fields[1], blob, marker == "@revoked", where))
    return tuple(keys)


def known_keys(destination: Destination) -> list[KnownKey]:
    """Return every line about this host, the user's files first."""
    name = listed_name(destination)
    files = destination.user_known_hosts + destination.global_known_hosts
    return [key for file in files for key in _read(file) if key.names(name)]


def check(destination: Destination, key: paramiko.PKey, *, strict: bool) -> None:
    """Return if the host may be trusted; a host seen for the first time is recorded."""
    blob, name = key.asbytes(), listed_name(destination)
    known = known_keys(destination)
    shown = f"{key.get_name()} {fingerprint(blob)}"
    for entry in known:
        if entry.blob == blob and entry.revoked:
            raise NodeError(
                f"its host key is revoked in {entry.where}: {shown}", "do not connect to it"
            )
    if any(entry.blob == blob for entry in known):
        return
    valid = [entry for entry in known if not entry.revoked]
    if valid:
        old = next((entry for entry in valid if entry.kind == key.get_name()), valid[0])
        raise NodeError(
            f"its host key has changed: it shows {shown}, {old.where} says "
            f"{old.kind} {fingerprint(old.blob)}",
            f"if you know that it was reinstalled: ssh-keygen -R '{name}'"
            f" -f '{old.where.rpartition(':')[0]}'; if not, someone may be"
            " intercepting the connection",
        )
    if strict or destination.strict:
        raise NodeError(
            f"its host key is not known ({shown})",
            f"compare the fingerprint, then: ssh-keyscan -p {destination.port} {destination.host}"
            " >> ~/.ssh/known_hosts",
        )
    _record(destination, name, key)


def _record(destination: Destination, name: str, key: paramiko.PKey) -> None:
    if not destination.user_known_hosts:
        return
    file = destination.user_known_hosts[0]
    listed = HostKeys.hash_host(name) if destination.hash_known_hosts else name
    line = f"{listed} {key.get_name()} {key.get_base64()}\n"
    with _recording:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with file.open("a+b") as known:
                known.seek(0, 2)
                if known.tell():
                    known.seek(-1, 2)
                    line = line if known.read(1) == b"\n" else "\n" + line
                known.write(line.encode())
        except OSError as error:
            raise NodeError(
                f"its host key cannot be recorded in {file}: {error.strerror}",
                "make the file writable, or name another one with UserKnownHostsFile in ssh_config",
            ) from error
        _read.cache_clear()
