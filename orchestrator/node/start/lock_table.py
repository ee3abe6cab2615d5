"""The lock table of a machine: which GPUs and slots are held, by which jobs, and the queue.

It is a directory shared by all users, with one file of locks and one file for each entry. A name is
locked as long as a process has that open file, so the kernel frees it with its last holder. The
contents of an entry are its owner's claim. The owner is that of the file, and the lock proves that
it is alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import time

from orchestrator.common import files
from orchestrator.common.files import F_OFD_SETLK, FLOCK
from orchestrator.common.permissions import user_name
from orchestrator.node.machine import sysfs
from orchestrator.node.machine.probe import network_space
from orchestrator.protocol.message import decode_value, parse_object, to_json
from orchestrator.protocol.requests.claims import ClaimEntry

ID = re.compile(r"[0-9a-f]{16}")
# This variable names another directory, for machines that share a disk.
VARIABLE = "ORCHESTRATOR_CLAIMS"
EVERYBODY = 0o1777
FOR_ALL, TO_READ = 0o666, 0o644
LARGEST_ENTRY_BYTES = 1 << 16
MOST_ENTRIES = 10_000
# The first user has created the file of locks within this time.
NEW_SECONDS = 2.0
F_OFD_GETLK = 36
LAST_BYTE = (1 << 62) - 1


def table_directory() -> str:
    """Return the directory: one for each machine and boot, even on a disk that machines share."""
    return os.environ.get(VARIABLE) or f"/tmp/orchestrator-claims-{machine_identity()}"


def machine_identity() -> str:
    """Return an identifier of this machine, its boot and its network, the same for all logins."""
    boot = sysfs.read_text("/proc/sys/kernel/random/boot_id")[:8]
    return f"{boot}-{network_space()}"


class LockTable:
    """A machine's lock table, opened once. Locks taken through it last until it is closed."""

    def __init__(self, path: str = "") -> None:
        self.path = path or table_directory()
        open_directory(self.path)
        self.fd = open_locks(os.path.join(self.path, "locks"))
        # The kernel only reports locks of other open files.
        self.ours: set[str] = set()

    def lock(self, name: str) -> bool:
        """Lock a name; return False if another process holds it."""
        try:
            fcntl.fcntl(self.fd, F_OFD_SETLK, lock_of(name, fcntl.F_WRLCK))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        self.ours.add(name)
        return True

    def unlock(self, name: str) -> None:
        fcntl.fcntl(self.fd, F_OFD_SETLK, lock_of(name, fcntl.F_UNLCK))
        self.ours.discard(name)

    def locked(self, name: str) -> bool:
        """Return True if a process has locked the name."""
        if name in self.ours:
            return True
        found = fcntl.fcntl(self.fd, F_OFD_GETLK, lock_of(name, fcntl.F_WRLCK))
        return bool(FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def write(self, entry: ClaimEntry) -> None:
        """Write an entry that all can read; its id must be locked."""
        files.replace_file(self.file(entry.id), to_json(entry), TO_READ, exactly=True)

    def remove(self, name: str) -> None:
        """Remove an entry of this user; the sticky bit keeps those of others."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.file(name))

    def file(self, name: str) -> str:
        if not ID.fullmatch(name):
            raise ValueError(f"not an entry: {name!r}")
        return os.path.join(self.path, f"{name}.json")

    def entries(self) -> list[ClaimEntry]:
        """Return the entries of all users whose writers live; remove dead ones of this user."""
        found = []
        for name in sysfs.list_names(self.path)[:MOST_ENTRIES]:
            if name.startswith(".") or not name.endswith(".json"):
                continue
            entry = self.read(name[: -len(".json")])
            if entry is not None:
                found.append(entry)
        return sorted(found, key=lambda entry: (entry.order or entry.since, entry.id))

    def read(self, name: str) -> ClaimEntry | None:
        try:
            with files.open_plain(self.file(name)) as file:
                owner = os.fstat(file.fileno()).st_uid
                entry = decode_value(
                    ClaimEntry, parse_object(file.read(LARGEST_ENTRY_BYTES)), newer=True
                )
        except (OSError, ValueError):
            return None
        if entry.id != name:
            return None
        if not self.locked(name):
            if owner == os.getuid():
                with contextlib.suppress(OSError):
                    self.remove(name)
            return None
        return printable_entry(entry).replace(user=user_name(owner))

    def touch(self) -> None:
        """Update the file's time, so that programs that delete old files keep it."""
        with contextlib.suppress(OSError):
            os.utime(self.fd)

    def close(self) -> None:
        os.close(self.fd)


def lock_of(name: str, kind: int) -> bytes:
    """Return the lock of a name: one byte of the file, at an offset derived from the name."""
    digest = hashlib.sha256(name.encode()).digest()
    return FLOCK.pack(kind, os.SEEK_SET, int.from_bytes(digest[:8], "big") & LAST_BYTE, 1, 0)


def printable_entry(entry: ClaimEntry) -> ClaimEntry:
    """Return the entry with unprintable characters replaced, so that it fits on any terminal."""
    texts = {name: printable_text(getattr(entry, name)) for name in ("state", "job", "head")}
    return entry.replace(**texts, names=tuple(map(printable_text, entry.names)))


def printable_text(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def open_directory(path: str) -> None:
    """Create the directory if needed; refuse one in which other users could replace files."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        os.chmod(path, EVERYBODY)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    safe = stat.S_IMODE(status.st_mode) & EVERYBODY == EVERYBODY
    if not safe and status.st_uid not in (0, os.getuid()):
        words = f"it belongs to {user_name(status.st_uid)}, and is not for all with a sticky bit"
        raise PermissionError(errno.EPERM, words, path)


def open_locks(path: str) -> int:
    """Open the file of locks; the first user creates it, for all users."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    deadline = time.monotonic() + NEW_SECONDS
    while True:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                os.fchmod(fd, FOR_ALL)
                return fd
        # The first user may be about to open it to all.
        except PermissionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
