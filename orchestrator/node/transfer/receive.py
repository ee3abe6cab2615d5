"""Files that arrive from another machine: each is complete, or does not appear at all.

`TargetDirectory` receives one manifest. Its subclasses decide which files are lacking, and which
are replaced.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path

from orchestrator.common.folder import Folder, PartialFile, hidden_name
from orchestrator.node.job.run_directory import PartDir
from orchestrator.protocol.manifest import DIRECTORY, LINK, ManifestEntry
from orchestrator.protocol.requests.transfer import FilePart, Lacking


class Arriving:
    """A file that arrives under a hidden name until it is complete."""

    def __init__(self, folder: Folder, entry: ManifestEntry, mode: int, label: str) -> None:
        self.entry, self.mode = entry, mode
        self.part = PartialFile(folder, parts_of_path(entry), label)
        self.digest = hashlib.sha256() if entry.value else None
        self.abandon = self.part.close

    def write(self, data: memoryview) -> None:
        if self.digest is not None:
            self.digest.update(data)
        self.part.put(data)

    def finish(self) -> None:
        """Publish the complete file under its name; raise OSError if its content is wrong."""
        if self.digest is not None and self.digest.hexdigest().encode() != self.entry.value:
            raise OSError(0, "it came with another content")
        time = self.entry.time or os.fstat(self.part.file.fileno()).st_mtime_ns
        self.part.publish(self.mode, time)
        self.part.close()


def parts_of_path(entry: ManifestEntry) -> list[str]:
    return os.fsdecode(entry.path).split("/")


def unzip_data(data: bytes | bytearray, most: int) -> bytes:
    """Return unpacked data from another machine; raise ValueError above a size limit."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(data, most)
    except zlib.error as error:
        raise ValueError(f"damaged on its way: {error}") from None
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError(f"more than {most} bytes, or cut off")
    return content


# -- a directory that takes files: the user's own, or one of a job ----------------------------

# Nodes may share this disk, but not its locks.
LABEL = f"push {os.uname().nodename}"


class TargetDirectory:
    """A directory that takes the files of one manifest; files that differ are overwritten."""

    def __init__(
        self, folder: Folder, entries: Sequence[ManifestEntry], label: str = LABEL
    ) -> None:
        self.folder, self.entries, self.label = folder, entries, label
        # The files that must still arrive.
        self.missing = set[int]()
        self.failed: dict[int, str] = {}
        # The number of the file that is being written, and the offset in it.
        self.number, self.at = -1, 0
        self.writing: Arriving | None = None

    def compare(self, *, dry_run: bool = False) -> Lacking:
        """Return the lacking files, which are expected from now on.

        Missing directories and links are created, except in a dry run.
        """
        if not dry_run:
            try:
                self.folder.make()
            except OSError as error:
                raise ValueError(f"{self.folder.root}: {error.strerror}") from None
        for number, entry in enumerate(self.entries):
            try:
                if not self.is_there(entry) and (dry_run or not self.make(entry)):
                    self.missing.add(number)
            except OSError as error:
                self.fail(number, error)
        if not (self.missing or dry_run):
            self.finish()
        return Lacking(numbers=tuple(sorted(self.missing)), failed=dict(self.failed))

    def is_there(self, entry: ManifestEntry) -> bool:
        """Return True if the directory has the same file or link, or a directory of that name."""
        path = self.path_of(entry)
        if entry.kind == DIRECTORY:
            return os.path.isdir(path) and not os.path.islink(path)
        return looks_of_path(path) == looks_of_entry(entry)

    def path_of(self, entry: ManifestEntry) -> str:
        return os.path.join(self.folder.root, os.fsdecode(entry.path))

    def make(self, entry: ManifestEntry) -> bool:
        """Create a directory or a link; return False for a file, whose contents have to come."""
        parts = parts_of_path(entry)
        if entry.kind == DIRECTORY:
            with self.folder.inside(parts):
                return True
        if entry.kind == LINK:
            with self.folder.inside(parts[:-1]) as directory:
                # Nodes that share the disk may do this at the same time.
                new = hidden_name(os.urandom(8).hex(), parts[-1])
                os.symlink(entry.value, os.fsencode(new), dir_fd=directory)
                os.rename(new, parts[-1], src_dir_fd=directory, dst_dir_fd=directory)
                return True
        return False

    def begin(self, number: int) -> Arriving:
        entry = self.entries[number]
        return Arriving(self.folder, entry, self.folder.mode(entry.mode), self.label)

    def publish(self, arriving: Arriving) -> None:
        """Rename a complete file to its name."""
        arriving.finish()

    def finish(self) -> None:
        """Run the final steps once every file has arrived."""

    def put(self, part: FilePart, data: memoryview) -> None:
        """Write a part of a file; the last part publishes the file."""
        if part.number in self.failed:
            return
        if part.number not in self.missing:
            raise ValueError("a file that was not lacking")
        try:
            self._put(part, data)
        except OSError as error:
            self.fail(part.number, error)

    def _put(self, part: FilePart, data: memoryview) -> None:
        size = self.entries[part.number].size
        if part.offset == 0:
            self.abandon()
            self.number, self.at, self.writing = part.number, 0, self.begin(part.number)
        if (part.number, part.offset) != (self.number, self.at) or self.at + len(data) > size:
            raise ValueError("parts of a file in disorder")
        assert self.writing is not None
        self.writing.write(data)
        self.at += len(data)
        if self.at == size:
            self.publish(self.writing)
            self.writing, self.number = None, -1
            self.missing.discard(part.number)
            if not self.missing:
                self.finish()

    def fail(self, number: int, error: OSError) -> None:
        """Record a file as failed."""
        self.abandon()
        self.failed[number] = error.strerror or str(error)

    def abandon(self) -> None:
        """Remove the incomplete file, if there is one."""
        writing, self.writing, self.number = self.writing, None, -1
        if writing is not None:
            writing.abandon()


def empty_target() -> TargetDirectory:
    """Return a receiver that takes no files."""
    return TargetDirectory(Folder(Path(), private=True), ())


# The size, the microseconds of the last change, and the target of a link.
Looks = tuple[int, int, str]


def looks_of_entry(entry: ManifestEntry) -> Looks:
    if entry.kind == LINK:
        return 0, 0, os.fsdecode(entry.value)
    return entry.size, entry.time // 1000, ""


def looks_of_path(path: str) -> Looks | None:
    """Return the size, time and link target of a path; None if nothing exists there."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return 0, 0, os.readlink(path)
    except OSError:
        return None
    return status.st_size, max(0, status.st_mtime_ns) // 1000, ""


# -- private files for the ranks of a job, sent before it starts ------------------------------


def waiting_place(part: PartDir) -> str:
    return part.home + ".payload"


def move_files(part: PartDir) -> None:
    """Move the files into the directory that all attempts share."""
    if os.path.isdir(waiting_place(part)):
        os.rename(waiting_place(part), part.payload)


def discard_files(part: PartDir) -> None:
    """Delete the files of a job that was never started."""
    shutil.rmtree(waiting_place(part), ignore_errors=True)
