"""Files of this machine that travel, as they were when they were read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.common.files import digest, open_plain, state_of
from orchestrator.head.transfer.index import Index
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import FILE, Entry

READERS = 8  # files that are read at the same time for their checksums


class Changed(Exception):
    """A file is not what it was when the tree was read."""

    def __init__(self, path: bytes) -> None:
        super().__init__(os.fsdecode(path))
        self.path = path


class Gone(OSError):
    """A file is not what it was when the tree was read."""


@dataclass(frozen=True)
class Tree:
    """A directory, or a part of it: what has to be elsewhere for a copy to be the same."""

    directory: bytes
    entries: tuple[Entry, ...]  # sorted
    listing: bytes  # the same, packed
    digest: str
    notes: tuple[str, ...] = ()
    names: Mapping[bytes, bytes] = field(default_factory=dict)  # path there -> here, if another

    @classmethod
    def of(
        cls,
        directory: bytes,
        entries: Iterable[Entry],
        notes: Iterable[str] = (),
        names: Mapping[bytes, bytes] | None = None,
    ) -> Tree:
        ordered = tuple(sorted(entries))
        listing = manifest.packed(ordered)
        digest = manifest.digest_of(listing)
        return cls(directory, ordered, listing, digest, tuple(notes), names or {})

    @property
    def files(self) -> int:
        return sum(entry.kind == FILE for entry in self.entries)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    def where(self, entry: Entry) -> bytes:
        return os.path.join(self.directory, self.names.get(entry.path, entry.path))

    def open(self, entry: Entry) -> int:
        """Open a file for reading; a link is followed nowhere, and a pipe's writer not awaited."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(self.where(entry), flags)

    def read(self, entry: Entry, offset: int, size: int) -> bytes:
        """Return some bytes of a file; an OSError where it has not so many."""
        descriptor = self.open(entry)
        try:
            data = b""
            while len(data) < size:
                more = os.pread(descriptor, size - len(data), offset + len(data))
                if not more:
                    raise Gone(0, "it became shorter while it was sent")
                data = data + more if data else more
        finally:
            os.close(descriptor)
        return data

    def sum(self, entry: Entry, size: int) -> str:
        """Return the SHA-256 of a file's first bytes."""
        descriptor = self.open(entry)
        try:
            return digest(descriptor, 0, size)
        finally:
            os.close(descriptor)

    def content(self, entry: Entry) -> bytes:
        """Return what a file holds; Changed where that is not what the tree says."""
        with contextlib.suppress(FileNotFoundError), open(self.open(entry), "rb") as file:
            data = file.read(entry.size)
            if hashlib.sha256(data).hexdigest().encode() == entry.value:
                return data
        raise Changed(entry.path)


def of_files(directory: Path, mode: Callable[[Path], int]) -> Tree:
    """Read a directory that holds nothing but files; each gets a mode."""
    entries = []
    for path in directory.iterdir():
        with open_plain(path) as file:
            value = digest(file.fileno()).encode()
            size = os.fstat(file.fileno()).st_size
        entries.append(Entry(os.fsencode(path.name), FILE, mode(path), size, value))
    return Tree.of(os.fsencode(directory), entries)


class TreeSums:
    """The checksums of files that have none in their tree: each is made once, and remembered."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.index: Index | None = None
        self.known: dict[bytes, str] = {}
        self.making: dict[bytes, threading.Lock] = {}
        self.lock = threading.Lock()  # of `making`, and of the index

    def of(self, entry: Entry) -> str:
        """Return the SHA-256 of a file, as far as its entry says that it goes."""
        if entry.value:
            return entry.value.decode()
        with self.lock:
            self.index = self.index or Index(b"push " + self.tree.directory)
            making = self.making.setdefault(entry.path, threading.Lock())
        with making:
            if entry.path not in self.known:
                descriptor = self.tree.open(entry)
                try:
                    self.known[entry.path] = self._make(entry, descriptor)
                finally:
                    os.close(descriptor)
            return self.known[entry.path]

    def _make(self, entry: Entry, descriptor: int) -> str:
        assert self.index is not None
        path = self.tree.names.get(entry.path, entry.path)
        now, status = time.time_ns(), os.fstat(descriptor)
        total = self.index.digest(path, status)
        if not total or status.st_size != entry.size:
            total = digest(descriptor, 0, entry.size)
            if state_of(os.fstat(descriptor)) == state_of(status):
                self.index.note(path, status, total, now)
        return total

    def tree_with_sums(self) -> tuple[Tree, dict[bytes, str]]:
        """Return the tree with all checksums, and why it is without some files."""
        from concurrent.futures import ThreadPoolExecutor

        failed: dict[bytes, str] = {}

        def known(entry: Entry) -> Entry | None:
            try:
                return entry._replace(value=self.of(entry).encode())
            except OSError as error:
                failed[entry.path] = error.strerror or str(error)
                return None

        files = [entry for entry in self.tree.entries if entry.kind == FILE]
        others = [entry for entry in self.tree.entries if entry.kind != FILE]
        with ThreadPoolExecutor(READERS) as pool:
            read = [entry for entry in pool.map(known, files) if entry is not None]
        self.keep()
        return Tree.of(self.tree.directory, [*others, *read], names=self.tree.names), failed

    def keep(self) -> None:
        """Keep the checksums for later, also those that were not asked for this time."""
        if self.index is not None:
            self.index.seen = {**self.index.known, **self.index.seen}
            self.index.save()
