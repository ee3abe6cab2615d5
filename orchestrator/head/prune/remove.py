"""Remove an experiment: whole or gone, whenever that is interrupted, and nothing but it.

All is done by names in directories that are held open, so that no symbolic link is ever followed,
whoever puts one where. What an interruption left hidden, the next prune deletes.

    multinode_20260101_000000                  an experiment
    .multinode_20260101_000000.gone-0123abcd   being deleted
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.common import files
from orchestrator.records.checkpoint_store import shown

PIN = ".pin"
HEAD = ".head"


class InTheWay(Exception):
    """The reason why an experiment stays as it is, as a sentence."""


@dataclass(frozen=True)
class Held:
    """An experiment that no head and no other prune can take up meanwhile."""

    name: str
    directory: int
    locks: list[int]

    def unlock(self) -> None:
        while self.locks:
            os.close(self.locks.pop())

    def release(self) -> None:
        self.unlock()
        os.close(self.directory)


# -- looking ----------------------------------------------------------------------------------


def pinned(directory: int) -> bool:
    """Tell whether this experiment must never be removed."""
    try:
        os.stat(PIN, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def pin(root: int, name: str, *, wanted: bool) -> None:
    """Protect an experiment from being removed, or make it again like any other."""
    with files.opened(name, root) as directory:
        if wanted:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(PIN, flags, files.PRIVATE, dir_fd=directory))
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(PIN, dir_fd=directory)


def in_use(root: int, name: str) -> str:
    """Return which head follows the job now, or nothing; no file is created or kept open."""
    with contextlib.suppress(OSError), files.opened(name, root) as directory:
        try:
            os.close(_lock_of_head(directory, create=False))
        except InTheWay as reason:
            return str(reason)
    return ""


@dataclass
class Measure:
    """The bytes that deleting a directory would free, and the first obstacle to that."""

    size: int = 0
    obstacle: str = ""

    def note(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle


def measure(root: int, name: str, path: os.PathLike[str]) -> Measure:
    """Measure an experiment without changing it."""
    measured = Measure()

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # another prune was faster
            measured.note(f"{shown(error.filename)}: {error.strerror}")

    linked: set[int] = set()
    try:
        for where, inner, names, directory in os.fwalk(name, onerror=note, dir_fd=root):
            there = os.fstat(directory).st_nlink  # none: another prune has just deleted it
            writable = os.access(".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True)
            if (inner or names) and there and not writable:
                measured.note(f"{shown(os.path.relpath(where, name))} is read-only for us")
            for entry in (*inner, *names):
                with contextlib.suppress(FileNotFoundError):
                    measured.size += _size(entry, directory, linked)
    except RecursionError:
        measured.obstacle = "its directories are nested too deeply"
    except OSError as error:
        note(error)
    for point in files.mounts_below(path):
        measured.obstacle = f"{shown(point)} is mounted there: what it holds is not ours to delete"
    return measured


def _size(name: str, directory: int, linked: set[int]) -> int:
    """Return the bytes of one entry; a file with several names counts once."""
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
        if status.st_ino in linked:
            return 0
        linked.add(status.st_ino)
    return status.st_blocks * 512


# -- holding ----------------------------------------------------------------------------------


def hold(root: int, name: str, identity: tuple[int, int]) -> Held:
    """Lock an experiment against everybody else; InTheWay and OSError say why that failed."""
    directory = os.open(name, files.DIRECTORY, dir_fd=root)
    locks: list[int] = []
    try:
        _lock_of_prune(directory)
        locks.append(_lock_of_head(directory, create=True))
        status = os.fstat(directory)
        if (status.st_dev, status.st_ino) != identity:
            raise InTheWay("it was replaced a moment ago")
        if pinned(directory):
            raise InTheWay("it has just been pinned")
    except BaseException:
        Held(name, directory, locks).release()
        raise
    return Held(name, directory, locks)


def _lock_of_prune(directory: int) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InTheWay("another prune is removing it") from None
    except OSError:
        pass  # NFS locks no directories; two prunes then both delete it, which does no harm


def _lock_of_head(directory: int, *, create: bool) -> int:
    """Take the lock that a head holds as long as it follows the job: Experiment.lock()."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(HEAD, flags | (os.O_CREAT if create else 0), 0o600, dir_fd=directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            holder = json.loads(os.pread(fd, 4096, 0))
            who = f"process {holder['pid']} on {holder['host']}"
        except (ValueError, KeyError, TypeError):
            who = "a head that starts"
        os.close(fd)
        raise InTheWay(f"it is in use by {who}") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


# -- removing ---------------------------------------------------------------------------------


def hide(root: int, held: Held) -> str:
    """Give an experiment a hidden name until it is deleted, and return that name."""
    hidden = files.hidden_name(held.name)
    files.hide(held.name, hidden, root)
    now = os.stat(hidden, dir_fd=root, follow_symlinks=False)
    same = os.path.samestat(now, os.fstat(held.directory))
    if not same or pinned(held.directory):
        os.rename(hidden, held.name, src_dir_fd=root, dst_dir_fd=root)
        raise InTheWay("it has just been pinned" if same else "something else has taken its name")
    return hidden


def take(root: int, held: Held, seen: Callable[[int], None]) -> list[str]:
    """Hide an experiment and delete it; return what could not be deleted.

    A network disk keeps a deleted file that is open, and with it the directory: as the lock is
    found by its name, which is hidden by now, nobody can miss it.
    """
    hidden = hide(root, held)
    held.unlock()
    return files.delete(hidden, seen, root)


def finish(root: int, hidden: str, seen: Callable[[int], None]) -> list[str]:
    """Delete what an interrupted prune left; return what could not be deleted."""
    with contextlib.suppress(FileNotFoundError), files.opened(hidden, root) as directory:
        _lock_of_prune(directory)
        return files.delete(hidden, seen, root)
    return []
