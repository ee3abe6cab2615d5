"""A directory that takes files by names from another machine; none of them leads out of it.

Each part of a name is opened in the one before, and no link is followed. A file is written under a
hidden name, which is the same at the next try, and renamed when it is whole.

Shipped to the nodes: the standard library alone, and Python 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

from orchestrator.common import files

IS_DIRECTORY = "a directory has this name"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BUSY = "another command or node is writing it here: do it again"


class Folder:
    """A directory here that takes files by the names that a node gives them."""

    def __init__(self, root: Path, *, private: bool, umask: int | None = None) -> None:
        self.root, self.private = root, private
        self.umask = files.current_umask() if umask is None else umask

    def make(self) -> None:
        """Create the directory and its missing parents."""
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        for path in reversed(missing):
            # Another thread has created it.
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                path.chmod(self.directory_mode if path == self.root else 0o777 & ~self.umask)
        if not self.root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    @property
    def directory_mode(self) -> int:
        return 0o700 if self.private else 0o777 & ~self.umask

    @contextlib.contextmanager
    def inside(self, parts: Sequence[str], *, make: bool = True) -> Iterator[int]:
        """Open a directory below, and create it if it is missing."""
        here = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                made = False
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=here)
                        made = True
                inner = os.open(part, files.DIRECTORY, dir_fd=here)
                if made:
                    os.fchmod(inner, self.directory_mode)
                os.close(here)
                here = inner
            yield here
        finally:
            os.close(here)

    def mode(self, mode: int) -> int:
        return 0o600 if self.private else mode & 0o777 & ~self.umask


def hidden_name(label: str, name: str) -> str:
    """Name a file for as long as it is not whole."""
    return f".orchestrator-{hashlib.sha256(os.fsencode(f'{label}/{name}')).hexdigest()[:16]}.part"


def is_half_file(name: str) -> bool:
    """Return True for a file that a transfer has left half done, or is writing now."""
    return name.startswith(".orchestrator-") and name.endswith(".part")


class PartialFile:
    """A file that is being written under a hidden name; close() removes it unless it is whole."""

    def __init__(self, folder: Folder, parts: Sequence[str], label: str) -> None:
        self.parts, self.name = parts, parts[-1]
        self.hidden, self.whole = hidden_name(label, self.name), False
        with contextlib.ExitStack() as stack:
            self.directory = stack.enter_context(folder.inside(parts[:-1]))
            self.here()
            self.file = stack.enter_context(self.open())
            stack.callback(self.discard)
            self.stack = stack.pop_all()

    def here(self) -> os.stat_result | None:
        """Look at what has the file's name; OSError where that is no file."""
        try:
            status = os.lstat(self.name, dir_fd=self.directory)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, IS_DIRECTORY)
        if not stat.S_ISREG(status.st_mode):
            raise FileExistsError(errno.EEXIST, "it exists, and is not a file")
        return status

    def open(self) -> FileIO:
        """Open the hidden file, empty."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = FileIO(os.open(self.hidden, flags, 0o600, dir_fd=self.directory), "rb+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise OSError(errno.EPERM, "not a file of its own")
            named = os.lstat(self.hidden, dir_fd=self.directory)
            # The file was renamed between our open and our lock.
            if not os.path.samestat(named, status):
                raise BlockingIOError
            file.truncate(0)
        except (BlockingIOError, FileNotFoundError):
            file.close()
            raise OSError(errno.EBUSY, BUSY) from None
        except BaseException:
            file.close()
            raise
        return file

    def put(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of it: the last room of a disk takes a part, without an error.

        What has no room gives back what it took: others use this disk, and their jobs write on it.
        """
        left = memoryview(data)
        try:
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            if error.errno in NO_ROOM:
                self.file.truncate(0)
            raise

    def publish(self, mode: int, time_ns: int) -> None:
        """Set the mode and time of the complete file, and rename it to its name."""
        os.fchmod(self.file.fileno(), mode)
        os.utime(self.file.fileno(), ns=(time_ns, time_ns))
        where = self.directory
        os.rename(self.hidden, self.name, src_dir_fd=where, dst_dir_fd=where)
        self.whole = True

    def discard(self) -> None:
        if not self.whole:
            with contextlib.suppress(OSError):
                os.unlink(self.hidden, dir_fd=self.directory)

    def close(self) -> None:
        self.stack.close()
