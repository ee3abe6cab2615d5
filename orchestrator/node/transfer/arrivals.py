"""Takes files that the head sends into a directory of the user's."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from orchestrator.common.files import digest
from orchestrator.common.folder import Folder, Partial
from orchestrator.node.transfer.store import unzip
from orchestrator.protocol import offer
from orchestrator.protocol.manifest import DIRECTORY, LINK
from orchestrator.protocol.offer import Offered
from orchestrator.protocol.requests.transfer import WantedFile, WantedFiles, WriteFile

LABEL = f"push {os.uname().nodename}"  # nodes may share this disk, and not its locks


class Arrivals:
    """An offer of files, and the one of them that is being written."""

    def __init__(self, directory: str, packed: bytes | bytearray, umask: int) -> None:
        root = os.path.expanduser(directory)
        if not os.path.isabs(root):
            raise ValueError(f"not an absolute path: {directory!r}")
        self.files = offer.unpacked(unzip(packed, offer.LARGEST))
        self.umask = umask
        with self.as_user():
            self.folder = Folder(Path(root), private=False)
        self.number = -1
        self.part: Partial | None = None

    @contextlib.contextmanager
    def as_user(self) -> Iterator[None]:
        """Make files as the login would; ours are for nobody else."""
        before = os.umask(self.umask)
        try:
            yield
        finally:
            os.umask(before)

    def compare(self, *, dry_run: bool) -> WantedFiles:
        """Look what is here by size and time; make directories and links."""
        wanted, failed = [], {}
        if dry_run and not self.folder.root.is_dir():
            return WantedFiles(wanted=tuple(map(self.nothing_of, self.numbers())), failed={})
        with self.as_user():
            if not dry_run:
                try:
                    self.folder.make()
                except OSError as error:
                    raise ValueError(f"{self.folder.root}: {error.strerror}") from None
            for number, file in enumerate(self.files):
                try:
                    answer = self.look(number, file, dry_run=dry_run)
                except OSError as error:
                    failed[number] = error.strerror or str(error)
                    continue
                wanted += [answer] if answer is not None else []
        return WantedFiles(wanted=tuple(wanted), failed=failed)

    def numbers(self) -> list[int]:
        return [number for number, file in enumerate(self.files) if file.kind != DIRECTORY]

    def nothing_of(self, number: int) -> WantedFile:
        return WantedFile(number=number, have=0, sum="", whole=False)

    def look(self, number: int, file: Offered, *, dry_run: bool) -> WantedFile | None:
        """Return what is lacking of a file, or None."""
        parts = os.fsdecode(file.path).split("/")
        if dry_run and not os.path.lexists(os.path.join(self.folder.root, *parts)):
            return None if file.kind == DIRECTORY else self.nothing_of(number)
        if file.kind == DIRECTORY:
            with self.folder.inside(parts):
                return None
        if file.kind == LINK:
            return self.link(number, file, parts, dry_run=dry_run)
        part = Partial(self.folder, parts, LABEL)
        try:
            status = part.here()
            if status is not None and status.st_size == file.size:
                if status.st_mtime_ns == file.changed:
                    return None
                own = os.open(part.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=part.directory)
                try:
                    total = digest(own, 0, file.size)
                finally:
                    os.close(own)
                return WantedFile(number=number, have=file.size, sum=total, whole=True)
            if dry_run:
                return self.nothing_of(number)
            have = min(part.open(), file.size)
            total = digest(part.file.fileno(), 0, have)
            return WantedFile(number=number, have=have, sum=total, whole=False)
        finally:
            part.close()

    def link(
        self, number: int, file: Offered, parts: list[str], *, dry_run: bool
    ) -> WantedFile | None:
        with self.folder.inside(parts[:-1]) as directory:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(parts[-1], dir_fd=directory)
                if stat.S_ISLNK(status.st_mode):
                    if os.readlink(os.fsencode(parts[-1]), dir_fd=directory) == file.target:
                        return None
                    if dry_run:
                        return self.nothing_of(number)
                    os.unlink(parts[-1], dir_fd=directory)
            os.symlink(file.target, os.fsencode(parts[-1]), dir_fd=directory)
        return None

    def write(self, request: WriteFile, data: bytes | bytearray) -> None:
        """Write a piece; with the last, see that the whole is what the head has."""
        if not request.number < len(self.files):
            raise ValueError("a file that was not offered")
        file = self.files[request.number]
        with self.as_user():
            if self.number != request.number:
                self.close()
                parts = os.fsdecode(file.path).split("/")
                self.part, self.number = Partial(self.folder, parts, LABEL), request.number
                if request.here:
                    self.take_time(self.part, request, file)
                    return
                self.part.open()
            assert self.part is not None
            self.part.file.seek(request.offset)
            self.part.file.truncate()
            self.part.put(data)
            if request.sum:
                self.finish(self.part, request, file)

    def take_time(self, part: Partial, request: WriteFile, file: Offered) -> None:
        """Give a file that is here the time and mode of the head's."""
        own = os.open(part.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=part.directory)
        try:
            if digest(own, 0, file.size + 1) != request.sum:
                raise ValueError("it changed while it was compared")
            os.fchmod(own, self.folder.mode(file.mode))
            os.utime(own, ns=(file.changed, file.changed))
        finally:
            os.close(own)
            self.close()

    def finish(self, part: Partial, request: WriteFile, file: Offered) -> None:
        try:
            if digest(part.file.fileno(), 0, file.size + 1) != request.sum:
                part.file.truncate(0)
                raise ValueError("its checksum is not that of the file that was sent")
            part.publish(self.folder.mode(file.mode), file.changed)
        finally:
            self.close()

    def close(self) -> None:
        if self.part is not None:
            self.part.close()
        self.part, self.number = None, -1
