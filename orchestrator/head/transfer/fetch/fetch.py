"""Fetches files from a node into a directory here, whole or not at all.

A file is written under a hidden name and renamed when its checksum is the node's. What a broken
fetch has left is continued, after its checksum was compared, too. A name from a node never leads
out of the directory: each part of it is opened in the one before, and no link is followed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from orchestrator.common.errors import NodeError
from orchestrator.common.files import digest
from orchestrator.common.folder import Folder, Partial
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.protocol.manifest import link_is_inside
from orchestrator.protocol.requests.request import Answered, Refused, Request
from orchestrator.protocol.requests.transfer import (
    Output,
    OutputFile,
    OutputPiece,
    OutputSum,
    SumOutput,
)

ANSWER_SECONDS = 60.0
AHEAD = 8  # requests that are on their way, so that a far node is no slower than its line
PIECE = 1 << 19  # as node/transfer/outputs.py has it
RANGE = 64 << 20  # bytes that have one checksum
SAME_TIME = 1e-4  # seconds: two floats of one time
ANOTHER = "another file has this name here"
PUBLISHING = threading.Lock()  # several nodes may have files of one name


@dataclass
class Fetched:
    """Count the files of one node that have come, and say why others have not."""

    fetched: list[str] = field(default_factory=list)
    kept: int = 0  # that were here already
    size: int = 0  # bytes that came
    failed: dict[str, str] = field(default_factory=dict)  # path -> why
    left_out: list[str] = field(default_factory=list)


def plain(path: str) -> bool:
    """Tell whether a path from a node stays below the directory it is for."""
    parts = PurePosixPath(path).parts
    try:
        named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a character
        return False
    return named and bool(parts) and not path.startswith("/") and not {"..", "."} & set(parts)


class Pipeline:
    """Requests to one node whose answers are taken in their order, some of them on their way."""

    def __init__(self, channel: NodeChannel) -> None:
        self.channel = channel
        self.waiting: deque[tuple[int, Callable[[Any, str], None]]] = deque()

    def ask(self, request: Request[Any], done: Callable[[Any, str], None]) -> None:
        """Send a request; done(answer, "") or done(None, why not) is called some time later."""
        if len(self.waiting) >= AHEAD:
            self.take()
        self.waiting.append((self.channel.tell(request), done))

    def take(self) -> None:
        number, done = self.waiting.popleft()
        deadline = time.monotonic() + ANSWER_SECONDS
        silence = f"it sends nothing for {ANSWER_SECONDS:.0f} s"
        while True:
            answer = self.channel.message(deadline, silence)
            if isinstance(answer, (Answered, Refused)) and answer.id != number:
                self.pass_over(answer.id)
                continue
            if isinstance(answer, Refused):
                self.channel.pending.pop(number, None)
                return done(None, answer.error)
            if isinstance(answer, Answered):
                return done(self.channel.answer_of(answer)[1], "")

    def pass_over(self, number: int) -> None:
        """Leave the answer to a request of somebody else: another thread may end the job."""
        ours = any(number == waiting for waiting, _ in self.waiting)
        if ours or self.channel.pending.pop(number, None) is None:
            raise NodeError("the node broke the protocol: its answers are in disorder")

    def finish(self) -> None:
        while self.waiting:
            self.take()


class Fetch:
    """Fetches listed files of one place on a node."""

    def __init__(
        self,
        channel: NodeChannel,
        place: str,
        folder: Folder,
        *,
        label: str,
        replace: bool,
        since: tuple[float, float] = (0.0, 0.0),
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.channel, self.place, self.folder = channel, place, folder
        self.label, self.replace, self.progress = label, replace, progress
        # What came before a time of this machine is replaced by what changed there since another.
        self.came_before, self.changed_since = since
        self.pipeline = Pipeline(channel)
        self.result = Fetched()

    def go(self, listed: Sequence[OutputFile]) -> Fetched:
        """Fetch what is missing here or differs, and go on after files that cannot be.

        Programs that know nothing of other nodes give their files the same names on each: those
        of a node that comes later go into a directory of its own.
        """
        self._fetch(listed)
        failed = self.result.failed
        aside = [file for file in listed if file.place and failed.get(file.path) == ANOTHER]
        if aside:
            self.folder = Folder(self.folder.root / self.label, private=self.folder.private)
            for file in aside:
                del failed[file.path]
            self._fetch(aside)
        return self.result

    def _fetch(self, listed: Sequence[OutputFile]) -> None:
        self.folder.make()
        for file in listed:
            if not plain(file.path):
                continue  # no node of ours would name such a path
            try:
                self._begin(file)
            except OSError as error:
                self.result.failed[file.path] = error.strerror or str(error)
        self.pipeline.finish()

    def _begin(self, file: OutputFile) -> None:
        parts = PurePosixPath(file.path).parts
        if file.kind == "directory":
            with self.folder.inside(parts):
                return
        if file.kind == "link":
            self._link(file, parts)
            return
        part = Partial(self.folder, parts, self.label)
        try:
            if self._is_here(part, file):
                self.result.kept += 1
                self.progress(file.size)
                part.close()
            else:
                part.is_first = part.here() is None and not self.replace
                self._receive(part, file, self._resume(part, file))
        except BaseException:
            part.close()
            raise

    def _link(self, file: OutputFile, parts: Sequence[str]) -> None:
        if not link_is_inside(file.path, file.target):
            self.result.left_out.append(f"{file.path} (a link that leads out, to {file.target})")
            return
        with self.folder.inside(parts[:-1]) as directory:
            try:
                os.symlink(file.target, parts[-1], dir_fd=directory)
                self.result.fetched.append(file.path)
            except FileExistsError:
                status = os.lstat(parts[-1], dir_fd=directory)
                link = stat.S_ISLNK(status.st_mode)
                if link and os.readlink(parts[-1], dir_fd=directory) == file.target:
                    self.result.kept += 1
                else:
                    raise another() from None

    def _is_here(self, part: Partial, file: OutputFile) -> bool:
        """Tell whether the file is here; a FileExistsError if another is, and is to stay."""
        status = part.here()
        if status is None or status.st_size != file.size:
            return False
        # Ranks of two nodes write files of one size within a tick of the clock, after a barrier:
        # time tells only where the file here came from this node.
        if self.replace and abs(status.st_mtime - file.changed) < SAME_TIME:
            return True
        source = os.open(part.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=part.directory)
        try:
            same = self._common(source, file, file.size) == file.size
            if same:
                os.utime(source, (file.changed, file.changed))
        finally:
            os.close(source)
        if not same and not self._may_replace(status, file):
            raise another()
        return same

    def _may_replace(self, here: os.stat_result, file: OutputFile) -> bool:
        is_new = here.st_ctime < self.came_before and file.changed > self.changed_since
        return self.replace or is_new

    def _resume(self, part: Partial, file: OutputFile) -> int:
        """Return from which byte on the file has to come."""
        size, status = part.open(), part.here()
        if not size and status is not None and status.st_size < file.size:
            size = part.take_over()  # it has grown there since it was fetched
        if size > file.size:
            size = 0
        have = self._common(part.file.fileno(), file, size) if size else 0
        os.ftruncate(part.file.fileno(), have)
        if status and have < status.st_size and not self._may_replace(status, file):
            part.discard()
            raise another()
        part.file.seek(have)
        self.progress(have)
        return have

    def _common(self, descriptor: int, file: OutputFile, size: int) -> int:
        """Return how many bytes are the node's, by the checksums of ranges."""
        self.pipeline.finish()
        for offset in range(0, size, RANGE):
            count = min(RANGE, size - offset)
            answer = self.channel.ask(self._sum(file, offset, count), ANSWER_SECONDS)
            if (answer.sum, answer.size) != (digest(descriptor, offset, count), count):
                return offset
        return size

    def _sum(self, file: OutputFile, offset: int, size: int) -> SumOutput:
        place = file.place or self.place
        return SumOutput(place=place, path=file.path, offset=offset, size=size)

    def _receive(self, part: Partial, file: OutputFile, at: int) -> None:
        """Ask for all that is missing; it is written when it comes, in order."""
        if at == file.size:
            return self._finish(part, file)

        def piece(answer: OutputPiece | None, why: str) -> None:
            self.result.size += part.write(answer.data, file.size) if answer else 0
            part.problem = part.problem or why
            self.progress(len(answer.data) if answer else 0)

        def whole(answer: OutputSum | None, why: str, first: int, end: int) -> None:
            part.problem = part.problem or why
            if not part.problem and answer and not part.is_as(answer.sum, answer.size, end - first):
                part.problem = "it changed while it was read: fetch it again"
            part.sum = hashlib.sha256()
            if end == file.size:
                self._finish(part, file)

        for first in range(at, file.size, RANGE):
            end = min(file.size, first + RANGE)
            for offset in range(first, end, PIECE):
                place = file.place or self.place
                request = Output(place=place, path=file.path, offset=offset)
                self.pipeline.ask(request, piece)
            done = partial(whole, first=first, end=end)
            self.pipeline.ask(self._sum(file, first, end - first), done)
        return None

    def _finish(self, part: Partial, file: OutputFile) -> None:
        try:
            if not part.problem:
                self._publish(part, file)
        except OSError as error:
            part.problem = error.strerror or str(error)
        finally:
            part.close()
        if part.problem:
            self.result.failed[file.path] = part.problem

    def _publish(self, part: Partial, file: OutputFile) -> None:
        with PUBLISHING:
            if part.is_first and part.here() is not None:  # of another node, meanwhile
                source = os.open(part.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=part.directory)
                try:
                    same = digest(source) == digest(part.file.fileno())
                finally:
                    os.close(source)
                part.discard()
                if not same:
                    raise another()
                self.result.kept += 1
                return
            part.publish(self.folder.mode(file.mode), int(file.changed * 1e9))
        self.result.fetched.append(file.path)


def another() -> OSError:
    return FileExistsError(errno.EEXIST, ANOTHER)
