"""Files of this machine that travel, as they were when they were read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.common.errors import OrchestratorError
from orchestrator.common.files import digest, open_plain
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import FILE, ManifestEntry


@dataclass
class Moved:
    """The files that one node was sent or gave, or why there are none."""

    node: int = 0
    name: str = ""
    into: str = ""
    files: list[str] = field(default_factory=list)
    kept: int = 0  # that were there already
    size: int = 0  # bytes that went or came
    failed: dict[str, str] = field(default_factory=dict)  # path -> why
    left_out: list[str] = field(default_factory=list)
    error: OrchestratorError | None = None


@dataclass(frozen=True)
class Tree:
    """A directory, or a part of it: what has to be elsewhere for a copy to be the same."""

    directory: bytes
    entries: tuple[ManifestEntry, ...]  # sorted
    listing: bytes  # the same, packed
    digest: str
    notes: tuple[str, ...] = ()
    names: Mapping[bytes, bytes] = field(default_factory=dict)  # path there -> here, if another

    @classmethod
    def of(
        cls,
        directory: bytes,
        entries: Iterable[ManifestEntry],
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

    def read(self, entry: ManifestEntry, offset: int, size: int) -> bytes:
        """Return some bytes of a file; an OSError where it has changed since it was listed."""
        path = os.path.join(self.directory, self.names.get(entry.path, entry.path))
        with open_plain(os.fsdecode(path)) as file:
            data = os.pread(file.fileno(), size, offset)
            status = os.fstat(file.fileno())
        if len(data) < size or entry.time not in (0, status.st_mtime_ns):
            raise OSError(0, "it changed while it was sent")
        return data


def of_files(directory: Path, mode: Callable[[Path], int]) -> Tree:
    """Read a directory that holds nothing but files; each gets a mode."""
    entries = []
    for path in directory.iterdir():
        with open_plain(path) as file:
            value = digest(file.fileno()).encode()
            size = os.fstat(file.fileno()).st_size
        entries.append(ManifestEntry(os.fsencode(path.name), FILE, mode(path), size, value))
    return Tree.of(os.fsencode(directory), entries)
