"""Gives files of a directory to other nodes, and takes them: each whole and checked, or not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from orchestrator.common import files
from orchestrator.common.folder import Folder, Partial
from orchestrator.node.transfer.take import Taking
from orchestrator.protocol.manifest import is_inside
from orchestrator.protocol.requests.transfer import NamedFile, TakeFiles

LABEL = "taken"


class Given:
    """The files that may be given; what else is in the directory is not."""

    def __init__(self, directory: str, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        if not all(is_inside(os.fsencode(name)) for name in names):
            raise ValueError("a path that leads out of the directory")
        self.folder = Folder(Path(absolute(directory)), private=True)

    def open(self, name: str) -> BinaryIO | None:
        if name not in self.names:
            raise LookupError(name)
        *above, last = name.split("/")
        try:
            with self.folder.inside(above, make=False) as directory:
                return files.open_plain(last, dir_fd=directory)
        except OSError:
            raise LookupError(name) from None

    def wait(self, seconds: float) -> None:
        """Return at once: all is here."""


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
        folder = Folder(directory, private=True)
        folder.mask = umask
        folder.make()
        lacking = [named for named in request.files if not is_here(folder, named)]
        taking.files = len(lacking)
        if not lacking:
            return
        caller = taking.call(request.giver, request.seconds)
        wanted = [(named.path, named.size) for named in lacking]
        taking.receive(caller, wanted, Arriving(folder, lacking))

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
