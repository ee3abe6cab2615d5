"""The files to send, as they were when they were read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.common.errors import OrchestratorError
from orchestrator.common.files import file_digest, open_plain
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, ManifestEntry
from orchestrator.protocol.requests.transfer import OutputFile

KINDS = {"file": FILE, "directory": DIRECTORY, "link": LINK}


@dataclass
class Moved:
    """The result of a transfer to or from one node: its files, or the error."""

    node: int = 0
    name: str = ""
    into: str = ""
    files: list[str] = field(default_factory=list)
    # The number of files that were already there.
    kept: int = 0
    # The number of bytes that were transferred.
    size: int = 0
    # The reason by path.
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    error: OrchestratorError | None = None


@dataclass(frozen=True)
class Tree:
    """A manifest of a directory or a part of it, which makes a copy comparable by its digest."""

    directory: bytes
    # In the order of their paths.
    entries: tuple[ManifestEntry, ...]
    # The entries in packed form.
    listing: bytes
    digest: str
    notes: tuple[str, ...] = ()
    # The path here by the path on the node, where they differ.
    names: Mapping[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        directory: bytes,
        entries: Iterable[ManifestEntry],
        notes: Iterable[str] = (),
        names: Mapping[bytes, bytes] | None = None,
    ) -> Tree:
        ordered = tuple(sorted(entries))
        listing = manifest.pack_entries(ordered)
        digest = manifest.digest_of(listing)
        return cls(directory, ordered, listing, digest, tuple(notes), names or {})

    @property
    def files(self) -> int:
        return sum(entry.kind == FILE for entry in self.entries)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    def read(self, entry: ManifestEntry, offset: int, size: int) -> bytes:
        """Return some bytes of a file; raise OSError if it has changed since it was listed."""
        path = os.path.join(self.directory, self.names.get(entry.path, entry.path))
        with open_plain(os.fsdecode(path)) as file:
            data = os.pread(file.fileno(), size, offset)
            status = os.fstat(file.fileno())
        if len(data) < size or entry.time not in (0, status.st_mtime_ns):
            raise OSError(0, "it changed while it was sent")
        return data


def entry_of(file: OutputFile) -> ManifestEntry:
    path, target = os.fsencode(file.path), os.fsencode(file.target * (file.kind == "link"))
    return ManifestEntry(path, KINDS[file.kind], file.mode & 0o777, file.size, target, file.changed)


def tree_of_files(directory: Path, mode: Callable[[Path], int]) -> Tree:
    """Return the tree of a directory that holds only files; `mode` gives the mode of each."""
    entries = []
    for path in directory.iterdir():
        with open_plain(path) as file:
            value = file_digest(file.fileno()).encode()
            size = os.fstat(file.fileno()).st_size
        entries.append(ManifestEntry(os.fsencode(path.name), FILE, mode(path), size, value))
    return Tree.of(os.fsencode(directory), entries)
