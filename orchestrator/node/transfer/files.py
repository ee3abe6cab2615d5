"""Gives files of a directory to other nodes, and takes them: each whole and checked, or not."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from orchestrator.common import files
from orchestrator.common.folder import Folder, Partial
from orchestrator.node.transfer.take import Taking
from orchestrator.protocol.manifest import is_inside
from orchestrator.protocol.requests.transfer import NamedFile, TakeFiles

LABEL = "taken"
LOOK_SECONDS = 0.02
SECOND = 1_000_000_000  # nanoseconds
COARSE, FINE = 2 * SECOND, 10_000  # FAT keeps every other second, NTFS counts by 100 ns


class Given:
    """The files that may be given; what else is in the directory is not."""

    def __init__(
        self, directory: str, names: Sequence[str], coming: Sequence[NamedFile] = ()
    ) -> None:
        self.directory = absolute(directory)
        self.names = frozenset(names)
        self.coming = {named.path: named for named in coming}
        if not all(is_inside(os.fsencode(name)) for name in (*names, *self.coming)):
            raise ValueError("a path that leads out of the directory")
        self.folder = Folder(Path(self.directory), private=True)

    def open(self, name: str) -> BinaryIO | None:
        named = self.coming.get(name)
        if named is None and name not in self.names:
            raise LookupError(name)
        *above, last = name.split("/")
        try:
            with self.folder.inside(above, make=False) as directory:
                file = files.open_plain(last, dir_fd=directory)
        except OSError:
            if named is not None:
                return None
            raise LookupError(name) from None
        if named is None or is_as_named(file, named):
            return file
        file.close()  # what was here before
        return None

    def wait(self, seconds: float) -> None:
        """Look again soon: another session's arrivals say nothing, and a look costs little."""
        time.sleep(min(seconds, LOOK_SECONDS))


def is_as_named(file: BinaryIO, named: NamedFile) -> bool:
    """Tell whether a file has come, by its size and time; who takes it looks at its checksum."""
    status = os.fstat(file.fileno())
    if named.changed is None or status.st_size != named.size:
        return False
    between = COARSE if status.st_mtime_ns % SECOND == 0 else FINE
    return abs(status.st_mtime_ns - named.changed) < between


class Arriving:
    """Writes the contents that come, one by one, under hidden names until they are whole."""

    def __init__(self, folder: Folder, expected: Sequence[NamedFile], label: str = LABEL) -> None:
        self.folder, self.label = folder, label
        self.expected = list(expected)[::-1]
        self.part: Partial | None = None
        self.left = 0

    def take(self, data: memoryview) -> None:
        while data or (self.part is None and self.expected and not self.expected[-1].size):
            if self.part is None:
                if not self.expected:
                    raise ValueError("more came than was asked for")
                named = self.expected[-1]
                self.part = Partial(self.folder, named.path.split("/"), self.label)
                self.part.open()
                self.part.file.truncate(0)
                self.left = named.size
            piece, data = data[: self.left], data[self.left :]
            self.part.put(piece)
            self.part.sum.update(piece)
            self.left -= len(piece)
            if not self.left:
                self.finish(self.part, self.expected.pop())

    def finish(self, part: Partial, named: NamedFile) -> None:
        if part.sum.hexdigest() != named.sum:
            raise ValueError(f"{named.path} came with another content")
        os.fsync(part.file.fileno())
        changed = named.changed
        if changed is None:
            changed = os.fstat(part.file.fileno()).st_mtime_ns
        part.publish(self.folder.mode(named.mode), changed)
        part.close()
        self.part = None

    def abandon(self) -> None:
        """Remove what did not come whole, unless the head goes on with it."""
        if self.part is not None:
            if self.label == LABEL:
                self.part.discard()
            self.part.close()
            self.part = None


def take(request: TakeFiles, umask: int) -> Taking:
    """Begin to take files from another node, private ones or as the login would make them."""
    directory = Path(absolute(request.directory))
    if not all(is_inside(os.fsencode(named.path)) for named in request.files):
        raise ValueError("a path that leads out of the directory")

    def work(taking: Taking) -> None:
        folder = Folder(directory, private=not request.label)
        folder.mask = umask
        folder.make()
        lacking = [named for named in request.files if not is_here(folder, named)]
        taking.files = len(lacking)
        if not lacking:
            return
        label = (
            f"{request.label} {os.uname().nodename}" if request.label else LABEL
        )  # as arrivals.py
        caller = taking.call(request.giver, request.seconds)
        wanted = [(named.path, named.size) for named in lacking]
        taking.receive(caller, wanted, Arriving(folder, lacking, label))

    return Taking(work)


def is_here(folder: Folder, named: NamedFile) -> bool:
    """Tell whether a file has come before."""
    *above, last = named.path.split("/")
    try:
        with (
            folder.inside(above, make=False) as directory,
            files.open_plain(last, dir_fd=directory) as file,
        ):
            same = os.fstat(file.fileno()).st_size == named.size
            return same and files.digest(file.fileno()) == named.sum
    except OSError:
        return False


def absolute(directory: str) -> str:
    path = os.path.expanduser(directory)
    if not os.path.isabs(path):
        raise ValueError(f"not an absolute path: {directory!r}")
    return path
