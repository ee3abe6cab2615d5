"""Lists what is below a directory of this node; also used on the head, for its own files."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable

from orchestrator.common.folder import is_half_file
from orchestrator.protocol.requests.transfer import OutputFile, OutputFiles

# The limit of files in one listing.
MOST = 1_000_000
MOST_LEFT_OUT = 100

# Returns True for a path, or a directory with all below it, that is not listed.
Skip = Callable[[str, "os.DirEntry[str]"], bool]


class Listing:
    """A list of everything below a directory; links are not followed.

    Files that have not changed since the time `since`, in nanoseconds, are left out. With `inputs`,
    the node's own files are listed as files of the snapshot (see snapshot.link_own).
    """

    def __init__(
        self,
        root: str,
        skip: Skip = lambda path, entry: False,
        *,
        since: int = 0,
        until: float = math.inf,
        most: int = MOST,
        inputs: bool = False,
    ) -> None:
        self.root, self.skip, self.since, self.until, self.most = root, skip, since, until, most
        self.inputs, self.files = inputs, list[OutputFile]()
        self.left_out: list[str] = []
        self.workdir = ""

    def answer(self, *, checkpoints: bool = False) -> OutputFiles:
        more = len(self.left_out) - MOST_LEFT_OUT
        left_out = self.left_out[:MOST_LEFT_OUT] + ([f"and {more} more"] if more > 0 else [])
        return OutputFiles(
            files=tuple(self.files),
            place=self.root,
            workdir=self.workdir,
            checkpoints=checkpoints,
            left_out=tuple(left_out),
        )

    def walk(self, below: str = "") -> None:
        """Add everything in a directory, in the order of names.

        Raises TimeoutError after the monotonic time `until`.
        """
        if time.monotonic() > self.until:
            raise TimeoutError
        try:
            entries = sorted(os.scandir(os.path.join(self.root, below)), key=lambda e: e.name)
        except OSError as error:
            if below:
                self.left_out.append(f"{below} ({error.strerror})")
            return
        for entry in entries:
            path = os.path.join(below, entry.name)
            if is_half_file(entry.name) or self.skip(path, entry):
                continue
            try:
                target = os.readlink(entry.path) if entry.is_symlink() else ""
                status = entry.stat(
                    follow_symlinks=self.inputs
                    and target.endswith(f"/{path}")
                    and os.path.isfile(entry.path)
                )
            except OSError as error:
                self.left_out.append(f"{path} ({error.strerror})")
                continue
            self.add(path, status, target)

    def add(self, path: str, status: os.stat_result, target: str = "") -> None:
        file = OutputFile(
            path=path, mode=stat.S_IMODE(status.st_mode), changed=max(0, status.st_mtime_ns)
        )
        if stat.S_ISDIR(status.st_mode):
            file = file.replace(kind="directory")
        elif not is_since(status, self.since):
            return
        elif stat.S_ISREG(status.st_mode):
            # The program wrote through a link to the node's own file.
            file = file.replace(size=status.st_size, target=target)
        elif target:
            file = OutputFile(path=path, kind="link", target=target)
        else:
            self.left_out.append(f"{path} (neither a file nor a directory)")
            return
        self.files.append(file)
        if len(self.files) > self.most:
            raise ValueError(f"{self.root} holds more than {self.most} files: name a part of it")
        if file.kind == "directory":
            self.walk(path)


def is_since(status: os.stat_result, nanoseconds: int) -> bool:
    """Return True if a file was written, moved or changed since then.

    A file with several names belongs to the store: each launch that links it changes its ctime.
    """
    moved = status.st_ctime_ns > nanoseconds and status.st_nlink == 1
    return moved or status.st_mtime_ns >= nanoseconds
