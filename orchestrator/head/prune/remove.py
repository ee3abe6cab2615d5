"""Taking an experiment away: whole or gone, whenever it is interrupted, and nothing but it.

prune.py calls it. All is done by names in directories that are held open, so that no symbolic
link is ever followed, whoever puts one where. An experiment is hidden by one rename, and then
deleted; what an interruption left hidden, the next prune deletes.

    multinode_20260101_000000                  an experiment
    .multinode_20260101_000000.gone-0123abcd   being deleted
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records.checkpoint_store import shown

GONE = re.compile(r"\.(.+)\.gone-[0-9a-f]{8}", re.DOTALL)
PIN = ".pin"
HEAD = ".head"
MOUNTS = Path("/proc/self/mountinfo")
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class InTheWay(Exception):
    """Why it stays as it is, in words."""


@dataclass(frozen=True)
class Held:
    """An experiment that no head and no other prune can take up meanwhile."""

    name: str
    directory: int
    locks: tuple[int, ...]

    def release(self) -> None:
        for fd in (*self.locks, self.directory):
            os.close(fd)


# -- looking ----------------------------------------------------------------------------------


def pinned(directory: int) -> bool:
    try:
        os.stat(PIN, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def pin(root: int, name: str, *, wanted: bool) -> None:
    """Never to be removed; or again like any other."""
    directory = os.open(name, DIRECTORY, dir_fd=root)
    try:
        if wanted:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(PIN, flags, 0o644, dir_fd=directory))
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(PIN, dir_fd=directory)
    finally:
        os.close(directory)


def in_use(root: int, name: str) -> str:
    """By whom it is followed now, if by anybody. A look: nothing is created, nothing kept."""
    with contextlib.suppress(OSError):
        directory = os.open(name, DIRECTORY, dir_fd=root)
        try:
            os.close(_lock_of_head(directory, create=False))
        except InTheWay as reason:
            return str(reason)
        finally:
            os.close(directory)
    return ""


@dataclass
class Measure:
    """What deleting a directory would free, and the first thing that would be in the way."""

    size: int = 0
    obstacle: str = ""


def measure(root: int, name: str, path: Path) -> Measure:
    found = Measure()
    try:
        directory = os.open(name, DIRECTORY, dir_fd=root)
    except FileNotFoundError:
        return found  # another prune was faster
    except OSError as error:
        return Measure(0, str(error.strerror))
    try:
        _add_up(directory, "", found, set())
    except RecursionError:
        found.obstacle = "its directories are nested too deeply"
    finally:
        os.close(directory)
    for point in _mounts_below(path):
        found.obstacle = f"{shown(point)} is mounted there: what it holds is not ours to delete"
    return found


def _add_up(directory: int, where: str, found: Measure, linked: set[int]) -> None:
    with os.scandir(directory) as listing:
        entries = list(listing)
    allowed = os.access(".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True)
    there = os.fstat(directory).st_nlink  # none: another prune has just deleted it
    if entries and there and not allowed and not found.obstacle:
        found.obstacle = f"{shown(where or '.')} is read-only for us"
    for entry in entries:
        inner = f"{where}/{entry.name}" if where else entry.name
        try:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                below = os.open(entry.name, DIRECTORY, dir_fd=directory)
                try:
                    _add_up(below, inner, found, linked)
                finally:
                    os.close(below)
            elif status.st_nlink > 1:
                if status.st_ino in linked:
                    continue
                linked.add(status.st_ino)
            found.size += status.st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError as error:
            found.obstacle = found.obstacle or f"{shown(inner)}: {error.strerror}"


def _mounts_below(path: Path) -> list[str]:
    inside = os.path.realpath(path)
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return []
    octal = re.compile(rb"\\([0-7]{3})")
    points = [
        os.fsdecode(octal.sub(lambda found: bytes([int(found[1], 8)]), line.split()[4]))
        for line in lines
    ]
    return [point for point in points if point == inside or point.startswith(inside + "/")]


# -- holding ----------------------------------------------------------------------------------


def hold(root: int, name: str, identity: tuple[int, int]) -> Held:
    """Keep everybody else off. InTheWay and OSError say why that cannot be."""
    directory = os.open(name, DIRECTORY, dir_fd=root)
    locks: list[int] = []
    try:
        _lock_of_prune(directory)
        locks.append(_lock_of_head(directory, create=True))
        status = os.fstat(directory)
        if (status.st_dev, status.st_ino) != identity:
            raise InTheWay("it is another one than a moment ago")
        if pinned(directory):
            raise InTheWay("it has just been pinned")
    except BaseException:
        Held(name, directory, tuple(locks)).release()
        raise
    return Held(name, directory, tuple(locks))


def _lock_of_prune(directory: int) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InTheWay("another prune is removing it") from None
    except OSError:
        pass  # NFS locks no directories; two prunes then both delete it, which does no harm


def _lock_of_head(directory: int, *, create: bool) -> int:
    """The lock that a head holds as long as it follows the job: experiment.lock()."""
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
    """From here on it is gone for everybody; its name until it is deleted."""
    hidden = f".{held.name}.gone-{secrets.token_hex(4)}"
    os.rename(held.name, hidden, src_dir_fd=root, dst_dir_fd=root)
    now = os.stat(hidden, dir_fd=root, follow_symlinks=False)
    same = os.path.samestat(now, os.fstat(held.directory))
    if not same or pinned(held.directory):
        os.rename(hidden, held.name, src_dir_fd=root, dst_dir_fd=root)
        raise InTheWay("it has just been pinned" if same else "something else has taken its name")
    with contextlib.suppress(OSError):  # some network file systems cannot
        os.fsync(root)
    return hidden


def take(root: int, held: Held, seen: Callable[[int], None]) -> list[str]:
    """Hide it and delete it."""
    return delete(root, hide(root, held), held.directory, seen)


def finish(root: int, hidden: str, seen: Callable[[int], None]) -> list[str]:
    """Delete what an interrupted prune left; what is still there, in words."""
    try:
        directory = os.open(hidden, DIRECTORY, dir_fd=root)
    except FileNotFoundError:
        return []
    try:
        _lock_of_prune(directory)
        return delete(root, hidden, directory, seen)
    finally:
        os.close(directory)


def delete(root: int, hidden: str, directory: int, seen: Callable[[int], None]) -> list[str]:
    """What could not be deleted, in words."""
    problems: list[str] = []
    try:
        _empty(directory, hidden, seen, problems)
        if not problems:
            os.rmdir(hidden, dir_fd=root)
    except FileNotFoundError:
        pass
    except RecursionError:
        problems.append(f"{shown(hidden)}: its directories are nested too deeply")
    except OSError as error:
        problems.append(f"{shown(hidden)}: {error.strerror}")
    return problems


def _empty(directory: int, where: str, seen: Callable[[int], None], problems: list[str]) -> None:
    with os.scandir(directory) as listing:
        entries = list(listing)
    for entry in entries:
        inner, before = f"{where}/{entry.name}", len(problems)
        try:
            size = entry.stat(follow_symlinks=False).st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
                below = os.open(entry.name, DIRECTORY, dir_fd=directory)
                try:
                    _empty(below, inner, seen, problems)
                finally:
                    os.close(below)
                if len(problems) == before:
                    os.rmdir(entry.name, dir_fd=directory)
            else:
                os.unlink(entry.name, dir_fd=directory)
            seen(size)
        except FileNotFoundError:
            continue  # another prune is at it too
        except OSError as error:
            problems.append(f"{shown(inner)}: {error.strerror}")
