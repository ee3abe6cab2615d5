"""Keeps the contents of files under ~/.orchestrator/code, each once, named by its digest.

    objects/ab/REST-MODE    a content: its SHA-256 and its permission bits
    snapshots/NAME/TITLE/   the tree of one launch (snapshot.py)

A content is verified when it arrives. Its file gets a time derived from its digest. A file with
another size or time was changed by hand, is discarded and sent again.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.folder import Folder
from orchestrator.common.permissions import other_writers
from orchestrator.node.transfer.receive import Arriving, TargetDirectory
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import FILE, ManifestEntry

# The time since a snapshot last used a content, or since an ended job began.
OLD_SECONDS = 7 * 86400.0


def moment(digest: bytes) -> int:
    """Return the time of a content's file, in seconds, derived from its digest."""
    return 1_000_000_000 + int(digest[:7], 16)


class Store:
    """The contents stored on this node."""

    def __init__(self) -> None:
        self.root = os.fsencode(os.path.join(files.our_directory(), "code"))
        self.objects = os.path.join(self.root, b"objects")
        self.snapshots = os.path.join(self.root, b"snapshots")
        # The offered trees, by the digest of the list.
        self.trees: dict[str, Sequence[ManifestEntry]] = {}

    def prepare(self) -> None:
        """Create the directories, and refuse those that other users could change."""
        os.makedirs(os.path.dirname(self.root), mode=0o700, exist_ok=True)
        for path in (self.root, self.objects, self.snapshots):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            problem = other_writers(os.lstat(path))
            if problem or not stat.S_ISDIR(os.lstat(path).st_mode):
                where = os.fsdecode(path)
                raise ValueError(
                    f"{where} {problem or 'is not a directory'}: chmod go-w {where} there"
                )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Raise a ValueError with the reason if the store cannot be written (disk full)."""
        try:
            yield
        except OSError as error:
            path = os.fsencode(error.filename or b"")
            elsewhere = path.startswith(b"/") and self.root not in path
            where = os.fsdecode(path if elsewhere else self.root)
            raise ValueError(
                f"{where} cannot be written: {files.reason_of_error(error)}"
            ) from error

    def path_of(self, entry: ManifestEntry) -> bytes:
        return b"%s/%s/%s-%o" % (self.objects, entry.value[:2], entry.value[2:], entry.mode)

    def tree(self, digest: str) -> Sequence[ManifestEntry]:
        """Return the entries of a tree that was offered."""
        if digest not in self.trees:
            raise ValueError("such a tree was not offered")
        return self.trees[digest]

    def collect(self, now: float) -> int:
        """Delete contents that no recent snapshot used; return the number of bytes freed."""
        freed = 0
        for directory, _, names in os.walk(self.objects):
            for name in names:
                path = os.path.join(directory, name)
                status = os.lstat(path)
                if now - status.st_ctime > OLD_SECONDS:
                    os.unlink(path)
                    freed += status.st_blocks * 512
        return freed


def is_kept(path: bytes, entry: ManifestEntry) -> bool:
    """Return True if a content is stored unchanged, by its size, time and mode."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return (
        status.st_mode == stat.S_IFREG | entry.mode
        and status.st_size == entry.size
        and status.st_mtime_ns == moment(entry.value) * 1_000_000_000
    )


class ToStore(TargetDirectory):
    """Receives the files of a manifest into the store: each content once, by its digest."""

    def __init__(self, store: Store, entries: Sequence[ManifestEntry], listing: bytes) -> None:
        if any(entry.kind == FILE and not entry.value for entry in entries):
            raise ValueError("the store takes no file without its checksum")
        # Other heads may send the same content at the same time.
        label = os.urandom(8).hex()
        super().__init__(Folder(Path(os.fsdecode(store.objects)), private=True), entries, label)
        self.store, self.seen = store, set[bytes]()
        store.trees[manifest.digest_of(listing)] = entries

    def is_there(self, entry: ManifestEntry) -> bool:
        path = self.store.path_of(entry)
        if entry.kind != FILE or path in self.seen:
            return True
        self.seen.add(path)
        return is_kept(path, entry)

    def fail(self, number: int, error: OSError) -> None:
        """Record a file with another content; raise ValueError if the store cannot be written."""
        super().fail(number, error)
        if error.errno:
            with self.store.writing():
                raise error

    def begin(self, number: int) -> Arriving:
        entry = self.entries[number]
        path = os.path.relpath(self.store.path_of(entry), self.store.objects)
        stored = entry._replace(path=path, time=moment(entry.value) * 1_000_000_000)
        return Arriving(self.folder, stored, entry.mode, self.label)


def settle_content(descriptor: int, entry: ManifestEntry) -> None:
    """Set the mode and the time of a content's file."""
    os.fchmod(descriptor, entry.mode)
    os.utime(descriptor, (moment(entry.value), moment(entry.value)))
