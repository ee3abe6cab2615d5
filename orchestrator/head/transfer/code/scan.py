"""Read a directory as a tree: its files, links and modes, and the digest of each content."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import CheckFailed
from orchestrator.common.files import state_of
from orchestrator.common.text import plural, size
from orchestrator.head.transfer.code.listing import Listed, Rules, list_tree
from orchestrator.head.transfer.index import Index
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, Entry

TRIES = 3
READ_BYTES = 1 << 20
MOST_FILES = 200_000
MEGABYTE = 1_000_000
SKIPPED = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "pipe", stat.S_IFBLK: "device"}
# The beginnings of files that hold private keys, whatever they are called.
KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File-")
ELSEWHERE = "run in the project's own directory; leave something out with --set sync.exclude=[NAME]"


@dataclass(frozen=True)
class Limits:
    """The sizes up to which files travel, in megabytes, and what is done about a larger file."""

    largest_file: float = 200.0
    largest_tree: float = 2000.0
    leave_out: bool = False  # and what cannot be read, and say so; else it is refused


class Scan:
    """Reads a directory in a thread of its own, from its making on."""

    def __init__(self, directory: bytes, rules: Rules, limits: Limits) -> None:
        self.directory, self.rules, self.limits = directory, rules, limits
        self.cancelled = threading.Event()
        self.states_known = threading.Event()  # there is the state of every file, or an error
        self.states: dict[bytes, os.stat_result] = {}
        self._tree: Tree | None = None
        self._error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._tree = self._scan()
        except Exception as error:  # noqa: BLE001  raised where the tree is asked for
            self._error = error
        finally:
            self.states_known.set()

    def _scan(self) -> Tree:
        directory = self.directory
        if self.limits.leave_out and directory in (b"/", os.fsencode(Path.home())):
            what = f"{os.fsdecode(directory)} holds more of yours than code, and is not sent"
            raise CheckFailed(what, ELSEWHERE.partition(";")[0])
        listed = list_tree(directory, self.rules, self.cancelled.is_set)
        if self.cancelled.is_set():
            raise unwanted(directory)
        if len(listed.paths) > MOST_FILES:
            shown = os.fsdecode(directory)
            what = f"{shown} has {plural(len(listed.paths), 'file')}: too many to send to the nodes"
            raise CheckFailed(what, ELSEWHERE)
        entries, notes = [], list(listed.notes)
        states = states_of(directory, listed)
        if self.limits.leave_out and (large := take_out_large(states, self.limits)):
            notes.append(f"warning: larger than code, and so not sent: {', '.join(large)}")
        self.states = states
        self.states_known.set()
        refuse_large(directory, states, self.limits)
        index, left = Index(directory), list[str]()
        for path, status in states.items():
            if self.cancelled.is_set():
                break  # nobody waits for it; what was read is remembered
            try:
                entry = entry_of(directory, path, status, index, asked=path in listed.asked)
            except CheckFailed as error:
                if not self.limits.leave_out:
                    raise
                left.append(f"warning: not sent, because {error.what}")
                continue
            if isinstance(entry, Entry):
                entries.append(entry)
            elif entry:
                notes.append(entry)
        index.save()
        notes += left if len(left) < 5 else [*left[:3], f"warning: nor {len(left) - 3} more files"]
        return Tree.of(directory, entries, [*notes, *outward(sorted(entries))])

    def tree(self) -> Tree:
        """Wait for the tree; CheckFailed says what cannot travel."""
        self.thread.join()
        if self._error is not None:
            raise self._error
        assert self._tree is not None
        return self._tree

    def ready(self, seconds: float) -> Tree | None:
        """Return the tree if it is read within that time; else nobody waits for it any more."""
        if not self.cancelled.is_set():
            self.thread.join(seconds)
        if self.thread.is_alive():
            self.cancel()
        return None if self.cancelled.is_set() else self._tree

    def cancel(self) -> None:
        """Stop reading: nobody needs the tree."""
        self.cancelled.set()


def unwanted(directory: bytes) -> CheckFailed:
    """Say why there is no tree; seen by nobody, as nobody waits for it."""
    return CheckFailed(f"{os.fsdecode(directory)} was not read to its end")


def outward(entries: Sequence[Entry]) -> list[str]:
    """Say which links lead out of the tree: to whatever is there on a node."""
    out = []
    for entry in entries:
        if entry.kind == LINK:
            leads = os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.value))
            if leads.startswith((b"/", b"../")) or leads == b"..":
                out.append(os.fsdecode(entry.path))
    more = f" and {len(out) - 3} more" if len(out) > 3 else ""
    links = "links lead" if len(out) > 1 else "a link leads"
    return [f"{links} out of the tree: {', '.join(out[:3])}{more}"] if out else []


def states_of(directory: bytes, listed: Listed) -> dict[bytes, os.stat_result]:
    """Return the state of all that is there; git also lists files that were deleted."""
    found = {}
    for path in listed.paths:
        try:
            found[path] = os.lstat(os.path.join(directory, path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise unreadable(path, error) from error
    return found


def take_out_large(found: dict[bytes, os.stat_result], limits: Limits) -> list[str]:
    """Take out the files that are too large to be code, and name them."""
    most = limits.largest_file * MEGABYTE
    large = [p for p, s in found.items() if stat.S_ISREG(s.st_mode) and s.st_size > most]
    return [f"{os.fsdecode(path)} ({size(found.pop(path).st_size)})" for path in large]


def refuse_large(directory: bytes, found: dict[bytes, os.stat_result], limits: Limits) -> None:
    """Refuse a file or a whole that is too large to be code."""
    sizes = {p: s.st_size for p, s in found.items() if stat.S_ISREG(s.st_mode)}
    largest = max(sizes, key=lambda path: sizes[path], default=b"")
    if sizes and sizes[largest] > limits.largest_file * MEGABYTE:
        shown, most = os.fsdecode(largest), size(limits.largest_file * MEGABYTE)
        raise CheckFailed(
            f"{shown} has {size(sizes[largest])}; a file over {most} does not travel with the code",
            f"leave it out: --set 'sync.exclude=[{shown}]'; or allow it:"
            f" --set sync.largest_file={-(-sizes[largest] // MEGABYTE)}",
        )
    total = sum(sizes.values())
    if total > limits.largest_tree * MEGABYTE:
        where, most = os.fsdecode(directory), size(limits.largest_tree * MEGABYTE)
        raise CheckFailed(
            f"{where} has {size(total)}; more than {most} does not travel with the code",
            f"{ELSEWHERE}; or allow it: --set sync.largest_tree={-(-total // MEGABYTE)}",
        )


def entry_of(
    directory: bytes, path: bytes, status: os.stat_result, index: Index, *, asked: bool
) -> Entry | str | None:
    """Return the entry of a path, or why it has none."""
    kind = stat.S_IFMT(status.st_mode)
    where = os.path.join(directory, path)
    if kind == stat.S_IFDIR:
        return Entry(path, DIRECTORY, 0o755, 0, b"")
    if kind == stat.S_IFREG:
        digest = index.digest(path, status)
        if not digest:
            status, digest, is_key = read(where, path, index)
            if is_key and not asked:
                shown = os.fsdecode(path)
                sends = f"--set 'sync.include=[{shown}]' sends it"
                return f"warning: not sent, because it is a private key: {shown}; {sends}"
        mode = stat.S_IMODE(status.st_mode) & 0o777 | 0o400
        return Entry(path, FILE, mode, status.st_size, digest.encode())
    shown = os.fsdecode(path)
    if kind == stat.S_IFLNK:
        try:
            return Entry(path, LINK, 0, 0, os.readlink(where))
        except OSError as error:
            raise unreadable(path, error) from error
    return f"{shown} does not travel: it is a {SKIPPED.get(kind, 'device')}"


def read(where: bytes, path: bytes, index: Index) -> tuple[os.stat_result, str, bool]:
    """Hash a file that does not change meanwhile, and tell whether it is a private key.

    A private key is not remembered: its next scan asks again whether it may travel.
    """
    for _ in range(TRIES):
        now = time.time_ns()
        digest = hashlib.sha256()
        try:
            descriptor = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb", buffering=0) as file:
                before = os.fstat(descriptor)
                data = file.read(READ_BYTES)
                is_key = bool(KEY.match(data))
                while data:
                    digest.update(data)
                    data = file.read(READ_BYTES)
                after = os.fstat(descriptor)
        except OSError as error:
            raise unreadable(path, error) from error
        if state_of(before) == state_of(after) and stat.S_ISREG(after.st_mode):
            if not is_key:
                index.note(path, after, digest.hexdigest(), now)
            return after, digest.hexdigest(), is_key
    raise changing(path)


def changing(path: bytes) -> CheckFailed:
    """Say that a file is written to while it should travel."""
    shown = os.fsdecode(path)
    return CheckFailed(
        f"{shown} changes while it is read ({TRIES} times)",
        f"leave it out, if it is not code: --set 'sync.exclude=[{shown}]'",
    )


def unreadable(path: bytes, error: OSError) -> CheckFailed:
    shown = os.fsdecode(path)
    return CheckFailed(
        f"{shown} cannot be read: {error.strerror}",
        f"leave it out, if it is not needed: --set 'sync.exclude=[{shown}]'",
    )
