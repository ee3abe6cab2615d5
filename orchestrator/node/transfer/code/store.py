"""Keeps the contents of files under ~/.orchestrator/code, each once, named by what it holds.

    objects/ab/REST-MODE    a content: its SHA-256 and its permission bits
    trees/DIGEST            the list of a tree that was here
    snapshots/NAME/TITLE/   the tree of one launch (snapshot.py)

A file's time is made from its digest. One that somebody changed in place has another size, time or
time of change, is thrown away and comes again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from orchestrator.common import files
from orchestrator.common.permissions import others
from orchestrator.node.job.run_directory import home
from orchestrator.node.transfer.receive import FileTarget, OtherContent, unzip
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import FILE, LARGEST_LIST_BYTES, Entry
from orchestrator.protocol.requests.transfer import Lacking

KEPT_TREES = 64  # lists of the newest trees
OLD_SECONDS = 7 * 86400.0  # since a tree was last used
YOUNG = 86400.0  # an object that came since may belong to a tree that is on its way
READ_BYTES = 1 << 20


def moment(digest: bytes) -> int:
    """Return the time of a content's file, in seconds: other contents, almost surely others."""
    return 1_000_000_000 + int(digest[:7], 16)


class Incomplete(Exception):
    """A tree's list or contents are not here, or not what they were: they have to come first."""


class Checked:
    """Remembers which contents were right when they were read, by their state, as git's index does.

    A program may write into a file of its snapshot, which may be the content itself, and put the
    time back. The time of the inode's change is the kernel's.
    """

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.changed = False

    @functools.cached_property
    def rows(self) -> dict[bytes, bytes]:
        """The notes, read when they are first needed: a small tree is copied and needs none."""
        with contextlib.suppress(OSError, ValueError), open(self.path, "rb") as file:
            return dict(row.split(b" ", 1) for row in file.read().splitlines())
        return {}

    def has(self, name: bytes, status: os.stat_result) -> bool:
        return self.rows.get(name) == row_of(status)

    def note(self, name: bytes, status: os.stat_result) -> None:
        self.rows[name] = row_of(status)
        self.changed = True

    def linked(self, name: bytes, status: os.stat_result) -> None:
        """Note the state of a content that was right and got another name; else it is a copy."""
        if self.rows.get(name, b"").endswith(b" %d" % status.st_ino):
            self.note(name, status)

    def forget(self, name: bytes) -> None:
        if self.rows.pop(name, None) is not None:
            self.changed = True

    def save(self) -> None:
        """Keep the notes, if not safe on the disk: without them contents are read again."""
        if self.changed:
            new = b"%b.%b.new" % (self.path, os.urandom(4).hex().encode())
            with contextlib.suppress(OSError):
                with open(new, "xb") as file:
                    file.write(b"\n".join(b"%b %b" % row for row in self.rows.items()))
                os.replace(new, self.path)
            self.changed = False


def row_of(status: os.stat_result) -> bytes:
    return b"%d %d %d %d" % files.state_of(status)


class Store:
    """The contents that this node has."""

    def __init__(self) -> None:
        self.root = os.fsencode(os.path.join(home(), "code"))
        self.objects = os.path.join(self.root, b"objects")
        self.trees = os.path.join(self.root, b"trees")
        self.snapshots = os.path.join(self.root, b"snapshots")
        self.checked = Checked(os.path.join(self.root, b"checked"))

    def prepare(self) -> None:
        """Make the directories, and refuse those that somebody else could change."""
        os.makedirs(os.path.dirname(self.root), mode=0o700, exist_ok=True)
        for path in (self.root, self.objects, self.trees, self.snapshots):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            problem = others(os.lstat(path))
            if problem or not stat.S_ISDIR(os.lstat(path).st_mode):
                where = os.fsdecode(path)
                raise ValueError(
                    f"{where} {problem or 'is not a directory'}: chmod go-w {where} there"
                )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Say in words why the store cannot be written, such as a full disk."""
        try:
            yield
        except OSError as error:
            root = os.fsdecode(self.root)
            where = "" if self.root in os.fsencode(error.filename or b"") else error.filename
            raise ValueError(f"{where or root} cannot be written: {files.reason(error)}") from error

    # -- contents ----------------------------------------------------------------------------

    def path_of(self, entry: Entry) -> bytes:
        return b"%s/%s/%s-%o" % (self.objects, entry.value[:2], entry.value[2:], entry.mode)

    def has(self, entry: Entry) -> bool:
        try:
            return is_as_kept(os.lstat(self.path_of(entry)), entry)
        except OSError:
            return False

    def lacking(self, entries: Iterable[Entry]) -> list[int]:
        """Return the positions of the files whose contents are not here, each content once."""
        known: set[tuple[bytes, int]] = set()
        positions = []
        for position, entry in enumerate(entries):
            key = (entry.value, entry.mode)
            if entry.kind == FILE and key not in known:
                known.add(key)
                if not self.has(entry):
                    positions.append(position)
        return positions

    def check(self, entry: Entry) -> None:
        """Read a content, unless it is as it was when that was done last; Incomplete if it is bad.

        Who links it afterwards changes its state, and notes that.
        """
        path = self.path_of(entry)
        if not self.checked.has(key_of(entry), os.lstat(path)):
            if hash_of(path) != entry.value:
                os.unlink(path)
                raise Incomplete(os.fsdecode(entry.path))
            self.checked.note(key_of(entry), os.lstat(path))

    @contextlib.contextmanager
    def unlinking(self, entries: Iterable[Entry]) -> Iterator[None]:
        """Note what contents are like after other names of theirs have gone."""
        known = [entry for entry in entries if entry.kind == FILE and self._is_checked(entry)]
        yield
        self.note(known)

    def note(self, entries: Iterable[Entry]) -> None:
        """Note what contents are like that are known to be right."""
        for entry in entries:
            with contextlib.suppress(OSError):
                self.checked.note(key_of(entry), os.lstat(self.path_of(entry)))
        self.checked.save()

    def _is_checked(self, entry: Entry) -> bool:
        try:
            return self.checked.has(key_of(entry), os.lstat(self.path_of(entry)))
        except OSError:
            return False

    def discard(self, entry: Entry) -> None:
        """Throw a content away that is not what its name says."""
        with contextlib.suppress(OSError):
            os.unlink(self.path_of(entry))

    # -- lists -------------------------------------------------------------------------------

    def keep_tree(self, digest: str, listing: bytes) -> None:
        """Keep the list of a tree; those of old trees go."""
        files.replace(os.fsdecode(self._tree(digest)), zlib.compress(listing, 1))
        with contextlib.suppress(OSError):  # another head may do the same
            times = {entry.path: entry.stat().st_mtime for entry in os.scandir(self.trees)}
            for path in sorted(times, key=times.__getitem__)[:-KEPT_TREES]:
                os.unlink(path)

    def tree(self, digest: str) -> tuple[Entry, ...]:
        """Return the entries of a tree that was here."""
        return manifest.unpacked(self.listing(digest))

    def listing(self, digest: str) -> bytes:
        """Return the packed list of a tree that was here."""
        path = self._tree(digest)
        try:
            with files.open_plain(os.fsdecode(path)) as file:
                packed = file.read()
        except FileNotFoundError:
            raise Incomplete(digest) from None
        with contextlib.suppress(OSError):
            os.utime(path)
        listing = unzip(packed, LARGEST_LIST_BYTES)
        if manifest.digest_of(listing) != digest:
            os.unlink(path)
            raise Incomplete(digest)
        return listing

    def _tree(self, digest: str) -> bytes:
        if not manifest.HEXADECIMAL.fullmatch(digest.encode()):
            raise ValueError(f"not the digest of a tree: {digest[:80]!r}")
        return os.path.join(self.trees, digest.encode())

    # -- tidying -----------------------------------------------------------------------------

    def collect(self, now: float) -> int:
        """Delete the contents that no tree of the last days has; return how many bytes went."""
        needed: set[bytes] = set()
        for entry in os.scandir(self.trees):
            if now - entry.stat(follow_symlinks=False).st_mtime > OLD_SECONDS:
                os.unlink(entry.path)
                continue
            with contextlib.suppress(Incomplete, ValueError):
                needed.update(map(self.path_of, self.tree(os.fsdecode(entry.name))))
        freed = 0
        for directory, _, names in os.walk(self.objects):
            for name in names:
                path = os.path.join(directory, name)
                status = os.lstat(path)
                if path not in needed and now - status.st_ctime > YOUNG:
                    os.unlink(path)
                    self.checked.forget(os.path.basename(directory) + name)
                    freed += status.st_blocks * 512 if status.st_nlink == 1 else 0
        self.checked.save()
        return freed


def is_as_kept(status: os.stat_result, entry: Entry) -> bool:
    """Tell whether a file is as the store wrote it, by its size, time and mode."""
    return (
        status.st_mode == stat.S_IFREG | entry.mode
        and status.st_size == entry.size
        and status.st_mtime_ns == moment(entry.value) * 1_000_000_000
    )


def hash_of(path: bytes) -> bytes:
    """Return the SHA-256 of a plain file."""
    with files.open_plain(os.fsdecode(path)) as file:
        return files.digest(file.fileno()).encode()


def key_of(entry: Entry) -> bytes:
    return b"%b-%o" % (entry.value, entry.mode)


class ToStore(FileTarget):
    """The store as a place for the files of a manifest: each content once, by its digest."""

    goes_on = False

    def __init__(self, store: Store, entries: Sequence[Entry], listing: bytes) -> None:
        if any(entry.kind == FILE and not entry.value for entry in entries):
            raise ValueError("the store takes no file without its checksum")
        super().__init__(entries)
        self.store, self.listing = store, listing

    def compare(self, *, dry_run: bool) -> Lacking:
        """Keep the list, and say which contents are lacking."""
        if not dry_run:
            with self.store.writing():
                self.store.keep_tree(manifest.digest_of(self.listing), self.listing)
        return Lacking(ranges=manifest.ranges(self.store.lacking(self.entries)), failed={})

    def begin(self, number: int, offset: int) -> Content:
        if offset:
            raise ValueError("a part of a content that nothing comes before")
        with self.store.writing():
            return Content(self.store, self.entries[number])

    def open(self, number: int) -> BinaryIO | None:
        """Open a content; None for one that was thrown away, and comes again."""
        entry = self.entries[number]
        if entry.kind != FILE:
            raise LookupError(number)
        try:
            return files.open_plain(os.fsdecode(self.store.path_of(entry)))
        except OSError:
            return None


class Content:
    """A content that is being written, whole and checked or not at all."""

    def __init__(self, store: Store, entry: Entry) -> None:
        self.store, self.entry = store, entry
        self.new = os.path.join(store.objects, b".new-" + os.urandom(6).hex().encode())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.file = os.open(self.new, flags, 0o600)
        self.digest = hashlib.sha256()

    def write(self, data: memoryview) -> None:
        self.digest.update(data)
        with self.store.writing():
            while data:
                data = data[os.write(self.file, data) :]

    def finish(self, total: str) -> None:
        if not self.digest.hexdigest().encode() == self.entry.value == total.encode():
            raise OtherContent(self.entry.path)
        with self.store.writing():
            os.fchmod(self.file, self.entry.mode)
            os.utime(self.file, (moment(self.entry.value), moment(self.entry.value)))
            os.close(self.file)
            self.file = -1
            path = self.store.path_of(self.entry)
            try:
                os.rename(self.new, path)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(path), 0o700)
                os.rename(self.new, path)
            self.store.checked.note(key_of(self.entry), os.lstat(path))

    def abandon(self) -> None:
        """Forget a content that did not come whole."""
        if self.file >= 0:
            os.close(self.file)
        with contextlib.suppress(OSError):
            os.unlink(self.new)
