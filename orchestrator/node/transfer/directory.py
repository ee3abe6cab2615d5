"""A directory that takes files: the user's own, or one of a job.

A file counts as here with its size and time, or by its checksum where the time differs or is none.
Nothing is written through a link: see common/folder.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from orchestrator.common import files
from orchestrator.common.folder import Folder, Partial
from orchestrator.node.transfer.receive import FileTarget, OtherContent, Writing
from orchestrator.protocol.manifest import DIRECTORY, LINK, Entry, ranges
from orchestrator.protocol.requests.transfer import Lacking, PartlyThere

LABEL = f"push {os.uname().nodename}"  # nodes may share this disk, and not its locks


class FoundFile(NamedTuple):
    """Describes what is here of a file that is lacking."""

    have: int
    digest: hashlib._Hash
    status: os.stat_result | None  # of a whole file with another time or content
    grown: bool = False  # it is what has the name, and no half file


class TargetDirectory(FileTarget):
    """A directory that takes files; what differs is overwritten.

    Half files are continued by the next transfer.
    """

    def __init__(
        self,
        root: Path,
        entries: Sequence[Entry],
        umask: int,
        *,
        private: bool = False,
    ) -> None:
        super().__init__(entries)
        self.label = LABEL
        self.folder = Folder(root, private=private, umask=umask)
        self.begun: dict[int, FoundFile] = {}

    # -- what is here ------------------------------------------------------------------------

    def compare(self, *, dry_run: bool) -> Lacking:
        """Look what is here; make directories and links."""
        if dry_run and not self.folder.root.is_dir():
            lacking = [n for n, entry in enumerate(self.entries) if entry.kind != DIRECTORY]
            return Lacking(ranges=ranges(lacking), failed={})
        lacking, failed = [], {}
        if not dry_run:
            self._make()
        for number, entry in enumerate(self.entries):
            try:
                if self._is_lacking(number, entry, dry_run=dry_run):
                    lacking.append(number)
            except OSError as error:
                failed[number] = error.strerror or str(error)
        begun = tuple(
            PartlyThere(
                number=number,
                have=known.have,
                sum=known.digest.hexdigest(),
                whole=known.status is not None,
            )
            for number, known in self.begun.items()
        )
        return Lacking(ranges=ranges(lacking), begun=begun, failed=failed)

    def _make(self) -> None:
        try:
            self.folder.make()
        except OSError as error:
            raise ValueError(f"{self.folder.root}: {error.strerror}") from None

    def _is_lacking(self, number: int, entry: Entry, *, dry_run: bool) -> bool:
        parts = parts_of_path(entry)
        if dry_run and not os.path.lexists(os.path.join(self.folder.root, *parts)):
            return entry.kind != DIRECTORY
        if entry.kind == DIRECTORY:
            with self.folder.inside(parts):
                return False
        if entry.kind == LINK:
            return self._lacks_link(entry, parts, dry_run=dry_run)
        part = Partial(self.folder, parts, self.label)
        try:
            status = part.here()
            if status is not None and status.st_size == entry.size:
                return self._differs(number, entry, part, status)
            if not dry_run:
                self._find_begun(number, entry, part, status)
            return True
        finally:
            part.close()

    def _find_begun(
        self, number: int, entry: Entry, part: Partial, status: os.stat_result | None
    ) -> None:
        """Note what a broken transfer has left of a file."""
        if size := part.begun_size():
            with files.open_plain(part.hidden, part.directory) as half:
                self.begun[number] = here(half, min(size, entry.size), None)

    def _differs(self, number: int, entry: Entry, part: Partial, status: os.stat_result) -> bool:
        """Return True if a file of this size is another one, as far as that is known here."""
        if status.st_mtime_ns == entry.time:
            return False
        with files.open_plain(part.name, part.directory) as file:
            known = here(file, entry.size, os.fstat(file.fileno()))
            if entry.value and known.digest.hexdigest().encode() == entry.value:
                self.settle(file.fileno(), entry)
                return False
        self.begun[number] = known
        return True

    def _lacks_link(self, entry: Entry, parts: list[str], *, dry_run: bool) -> bool:
        last = os.fsencode(parts[-1])
        with self.folder.inside(parts[:-1]) as directory:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(last, dir_fd=directory)
                if stat.S_ISLNK(status.st_mode):
                    if os.readlink(last, dir_fd=directory) == entry.value:
                        return False
                    if dry_run:
                        return True
                    os.unlink(last, dir_fd=directory)
            os.symlink(entry.value, last, dir_fd=directory)
        return False

    def settle(self, descriptor: int, entry: Entry) -> None:
        """Give a file that is here already the mode and time that it has where it comes from."""
        if entry.time:
            os.fchmod(descriptor, self.folder.mode(entry.mode))
            os.utime(descriptor, ns=(entry.time, entry.time))

    # -- what comes --------------------------------------------------------------------------

    def begin(self, number: int, offset: int) -> Writing:
        known = self.begun.get(number)
        if known is not None and known.status is not None and offset == known.have:
            return Settling(self, self.entries[number], known)
        if offset and (known is None or offset != known.have):
            raise ValueError("a part of a file that nothing comes before")
        return self.arriving(self.entries[number], known if offset else None)

    def arriving(self, entry: Entry, known: FoundFile | None) -> Arriving:
        return Arriving(self, entry, known)

    def open(self, number: int) -> BinaryIO | None:
        *above, last = parts_of_path(self.entries[number])
        try:
            with self.folder.inside(above, make=False) as directory:
                return files.open_plain(last, dir_fd=directory)
        except OSError:
            raise LookupError(number) from None


class Arriving:
    """A file that comes, under a hidden name until it is whole."""

    def __init__(self, place: TargetDirectory, entry: Entry, known: FoundFile | None) -> None:
        self.place, self.entry = place, entry
        self.part = Partial(place.folder, parts_of_path(entry), place.label)
        self.digest = known.digest.copy() if known else hashlib.sha256()
        try:
            self.part.here()
            have = known.have if known else 0
            size = self.part.open()
            if known is not None and known.grown:
                size = self.part.take_over()
            if size < have:
                raise OSError(0, "what was here of it has gone")
            self.part.file.seek(have)
            self.part.file.truncate()
        except BaseException:
            self.part.close()
            raise

    def write(self, data: memoryview) -> None:
        self.part.put(data)
        self.digest.update(data)

    def finish(self, total: str) -> None:
        try:
            if self.digest.hexdigest() != total:
                self.part.discard()
                raise OtherContent(self.entry.path)
            time = self.entry.time or os.fstat(self.part.file.fileno()).st_mtime_ns
            self.part.publish(self.place.folder.mode(self.entry.mode), time)
        finally:
            self.part.close()

    def abandon(self) -> None:
        self.part.close()


class Settling:
    """A file that is here already, and lacks only the time and mode of the other."""

    def __init__(self, place: TargetDirectory, entry: Entry, known: FoundFile) -> None:
        self.place, self.entry, self.known = place, entry, known

    def write(self, data: memoryview) -> None:
        pass

    def finish(self, total: str) -> None:
        *above, last = parts_of_path(self.entry)
        with (
            self.place.folder.inside(above, make=False) as directory,
            files.open_plain(last, dir_fd=directory) as file,
        ):
            status, before = os.fstat(file.fileno()), self.known.status
            same = before is not None and files.state_of(status) == files.state_of(before)
            if not same or self.known.digest.hexdigest() != total:
                raise OSError(0, "it changed while it was compared")
            self.place.settle(file.fileno(), self.entry)

    def abandon(self) -> None:
        pass


def here(file: BinaryIO, size: int, status: os.stat_result | None) -> FoundFile:
    """Read the first bytes of a file that is here."""
    digest, left = hashlib.sha256(), size
    while left and (data := file.read(min(left, files.READ_BYTES))):
        digest.update(data)
        left -= len(data)
    return FoundFile(size - left, digest, status)


def parts_of_path(entry: Entry) -> list[str]:
    return os.fsdecode(entry.path).split("/")
