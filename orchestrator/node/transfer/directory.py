"""A directory that takes files: the user's own, or one of a job.

A file counts as here with its size and time. Nothing is written through a link: see
common/folder.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from orchestrator.common.folder import Folder, Partial
from orchestrator.node.transfer.receive import IncomingFiles
from orchestrator.protocol.manifest import DIRECTORY, LINK, Entry, ranges
from orchestrator.protocol.requests.transfer import Lacking

LABEL = f"push {os.uname().nodename}"  # nodes may share this disk, and not its locks


class TargetDirectory(IncomingFiles):
    """A directory that takes files; what differs is overwritten."""

    def __init__(
        self, root: Path, entries: Sequence[Entry], umask: int, *, private: bool = False
    ) -> None:
        super().__init__(entries)
        self.folder = Folder(root, private=private, umask=umask)

    def look(self, *, dry_run: bool) -> Lacking:
        """Return what is lacking; make directories and links."""
        lacking, failed = [], {}
        if not dry_run:
            try:
                self.folder.make()
            except OSError as error:
                raise ValueError(f"{self.folder.root}: {error.strerror}") from None
        for number, entry in enumerate(self.entries):
            try:
                if self.lacks(entry, dry_run=dry_run):
                    lacking.append(number)
            except OSError as error:
                failed[number] = error.strerror or str(error)
        return Lacking(ranges=ranges(lacking), failed=failed)

    def lacks(self, entry: Entry, *, dry_run: bool) -> bool:
        """Return True if an entry is not here; make it if it needs no contents."""
        parts = parts_of_path(entry)
        if dry_run and not os.path.lexists(os.path.join(self.folder.root, *parts)):
            return entry.kind != DIRECTORY
        if entry.kind == DIRECTORY:
            with self.folder.inside(parts):
                return False
        with self.folder.inside(parts[:-1], make=not dry_run) as directory:
            try:
                status = os.lstat(parts[-1], dir_fd=directory)
            except FileNotFoundError:
                status = None
            if entry.kind == LINK:
                return self._lacks_link(entry, parts[-1], directory, status, dry_run=dry_run)
            there = status is not None and stat.S_ISREG(status.st_mode) and status
            return not there or (there.st_size, there.st_mtime_ns) != (entry.size, entry.time)

    def _lacks_link(
        self,
        entry: Entry,
        name: str,
        directory: int,
        status: os.stat_result | None,
        *,
        dry_run: bool,
    ) -> bool:
        if status is not None and stat.S_ISLNK(status.st_mode):
            if os.readlink(os.fsencode(name), dir_fd=directory) == entry.value:
                return False
            if not dry_run:
                os.unlink(name, dir_fd=directory)
        if not dry_run:
            os.symlink(entry.value, os.fsencode(name), dir_fd=directory)
        return dry_run

    def begin(self, number: int) -> Arriving:
        return Arriving(self.folder, self.entries[number])


class Arriving:
    """A file that comes, under a hidden name until it is whole."""

    def __init__(self, folder: Folder, entry: Entry) -> None:
        self.folder, self.entry = folder, entry
        self.part = Partial(folder, parts_of_path(entry), LABEL)
        self.write, self.abandon = self.part.put, self.part.close

    def finish(self) -> None:
        time = self.entry.time or os.fstat(self.part.file.fileno()).st_mtime_ns
        self.part.publish(self.folder.mode(self.entry.mode), time)
        self.part.close()


def parts_of_path(entry: Entry) -> list[str]:
    return os.fsdecode(entry.path).split("/")
