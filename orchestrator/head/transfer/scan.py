"""Scan a directory into a tree: its files, links, modes, and the digest of each file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import CheckFailed
from orchestrator.common.text import format_bytes, plural
from orchestrator.head.transfer.listing import Rules, list_tree
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, ManifestEntry, link_is_inside

MOST_FILES = 200_000
MEGABYTE = 1_000_000
ELSEWHERE = "run in the project's own directory; leave something out with --set sync.exclude=[NAME]"


class Scan:
    """Scans a directory in its own thread, which starts with the constructor."""

    def __init__(self, directory: bytes, rules: Rules) -> None:
        self.directory, self.rules = directory, rules
        # The error for files that are too large to be sent; the tree is without them.
        self.refused: CheckFailed | None = None
        self.cancelled = threading.Event()
        pool = ThreadPoolExecutor(1)
        self.found = pool.submit(self._scan)
        pool.shutdown(wait=False)

    def _scan(self) -> Tree:
        paths, notes = list_tree(self.directory, self.rules, self.cancelled.is_set)
        states = states_of(self.directory, paths)
        if not self.cancelled.is_set():
            self.refused = without_large(os.fsdecode(self.directory), states, self.rules)
        index, entries = Index(self.directory), list[ManifestEntry]()
        for path, status in states.items():
            if self.cancelled.is_set():
                # The digests so far are saved below, for the next scan.
                break
            entry = entry_of(self.directory, path, status, index)
            if entry is not None:
                entries.append(entry)
            else:
                notes.append(
                    f"{os.fsdecode(path)} does not travel: it is neither a file nor a link"
                )
        index.save()
        return Tree.of(self.directory, entries, [*notes, *outward(sorted(entries))])

    def tree(self) -> Tree:
        """Wait for the tree and return it; raise CheckFailed for files that cannot be sent."""
        tree = self.found.result()
        if self.refused:
            raise self.refused
        return tree

    def ready(self, seconds: float) -> Tree | None:
        """Return the tree without files that are too large to be sent, if it is ready in time.

        Else cancel the scan and return None.
        """
        if not self.cancelled.is_set():
            with contextlib.suppress(Exception):
                return self.found.result(seconds)
        self.cancel()
        return None

    def cancel(self) -> None:
        """Stop the scan, as the tree is not needed."""
        self.cancelled.set()


def outward(entries: Sequence[ManifestEntry]) -> list[str]:
    """Return a note on links that lead out of the tree, [] if there are none."""
    links = [(os.fsdecode(e.path), os.fsdecode(e.value)) for e in entries if e.kind == LINK]
    out = [path for path, target in links if not link_is_inside(path, target)]
    return [f"links lead out of the tree: {', '.join(out[:3])}"] if out else []


def states_of(directory: bytes, paths: Sequence[bytes]) -> dict[bytes, os.stat_result]:
    """Return the status of each existing path; git also lists files that were deleted."""
    found = {}
    for path in paths:
        try:
            found[path] = os.lstat(os.path.join(directory, path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise unreadable(path, error) from error
    return found


def without_large(
    where: str, found: dict[bytes, os.stat_result], rules: Rules
) -> CheckFailed | None:
    """Remove files that are too large to be code, and return the error for one that is sent.

    Raises CheckFailed for a tree that is too large.
    """
    if len(found) > MOST_FILES:
        raise CheckFailed(f"{where} has {plural(len(found), 'file')}: too many to send", ELSEWHERE)
    refused = None
    for path, status in sorted(found.items(), key=lambda one: one[1].st_size):
        if stat.S_ISREG(status.st_mode) and status.st_size > rules.largest_file * MEGABYTE:
            shown, most = os.fsdecode(path), format_bytes(rules.largest_file * MEGABYTE)
            refused = CheckFailed(
                f"{shown} has {format_bytes(status.st_size)}; a file over {most} does not travel"
                " with the code",
                f"leave it out: --set 'sync.exclude=[{shown}]'; or allow it:"
                f" --set sync.largest_file={-(-status.st_size // MEGABYTE)}",
            )
            del found[path]
    total = sum(one.st_size for one in found.values() if stat.S_ISREG(one.st_mode))
    if total > rules.largest_tree * MEGABYTE:
        most = format_bytes(rules.largest_tree * MEGABYTE)
        raise CheckFailed(
            f"{where} has {format_bytes(total)}; more than {most} does not travel with the code",
            f"{ELSEWHERE}; or allow it: --set sync.largest_tree={-(-total // MEGABYTE)}",
        )
    return refused


def entry_of(
    directory: bytes, path: bytes, status: os.stat_result, index: Index
) -> ManifestEntry | None:
    """Return the entry of a path, None for special files, which are not sent."""
    where = os.path.join(directory, path)
    if stat.S_ISDIR(status.st_mode):
        return ManifestEntry(path, DIRECTORY, 0o755, 0, b"")
    try:
        if stat.S_ISLNK(status.st_mode):
            return ManifestEntry(path, LINK, 0, 0, os.readlink(where))
        if not stat.S_ISREG(status.st_mode):
            return None
        digest = index.digest(path, status)
        if not digest:
            status, digest = read_file(where, path, index)
    except OSError as error:
        raise unreadable(path, error) from error
    mode = stat.S_IMODE(status.st_mode) & 0o777 | 0o400
    return ManifestEntry(path, FILE, mode, status.st_size, digest.encode())


def read_file(where: bytes, path: bytes, index: Index) -> tuple[os.stat_result, str]:
    """Return a file's status and digest; raise if it changes while it is read."""
    now = time.time_ns()
    with files.open_plain(os.fsdecode(where)) as file:
        before = os.fstat(file.fileno())
        digest = files.file_digest(file.fileno())
        after = os.fstat(file.fileno())
    if files.state_of(before) != files.state_of(after):
        raise changed_error(path)
    index.note(path, after, digest, now)
    return after, digest


def changed_error(path: bytes) -> CheckFailed:
    """Return the error for a file that changes while it is read or sent."""
    shown = os.fsdecode(path)
    return CheckFailed(
        f"{shown} was changed while it was read or sent",
        f"launch again; or, if it is not code: --set 'sync.exclude=[{shown}]'",
    )


def unreadable(path: bytes, error: OSError) -> CheckFailed:
    shown = os.fsdecode(path)
    return CheckFailed(
        f"{shown} cannot be read: {error.strerror}",
        f"leave it out, if it is not needed: --set 'sync.exclude=[{shown}]'",
    )


# -- digests of files that did not change -----------------------------------------------------

# The size, mtime and ctime in ns, the inode, and the SHA-256 digest.
Known = tuple[int, int, int, int, str]
FRESH_NANOSECONDS = 1_000_000_000


def cache_directory() -> Path:
    """Return this package's directory in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "orchestrator"


class Index:
    """A persistent cache of the digests of one directory's files."""

    def __init__(self, directory: bytes) -> None:
        self.path = (
            cache_directory() / "trees" / f"{hashlib.sha256(directory).hexdigest()[:32]}.json"
        )
        self.known: dict[str, Known] = {}
        self.seen: dict[str, Known] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):
            rows = json.loads(self.path.read_text(encoding="ascii"))
            self.known = {path: tuple(row) for path, row in rows.items()}

    def digest(self, path: bytes, status: os.stat_result) -> str:
        """Return the cached digest of an unchanged file, else ""."""
        name = os.fsdecode(path)
        row = self.known.get(name)
        if row is None or row[:4] != files.state_of(status):
            return ""
        self.seen[name] = row
        return row[4]

    def note(self, path: bytes, status: os.stat_result, digest: str, now: int) -> None:
        """Cache a digest unless the file changed just before `now`, the time of the read in ns."""
        if max(status.st_mtime_ns, status.st_ctime_ns) + FRESH_NANOSECONDS < now:
            self.seen[os.fsdecode(path)] = (*files.state_of(status), digest)

    def save(self) -> None:
        """Write the cache; if that fails, the next scan reads all files again."""
        if self.seen == self.known:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace_file(self.path, json.dumps(self.seen))
