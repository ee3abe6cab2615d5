"""Fetch files from a node into a local directory, each completely or not at all.

A path from a node never leads out of the directory. The node declines to send a file that changes
during the transfer.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from orchestrator.common import files
from orchestrator.common.folder import Folder, PartialFile
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.transfer.tree import Moved
from orchestrator.protocol.manifest import link_is_inside
from orchestrator.protocol.requests.transfer import PIECE_BYTES, FilePiece, OutputFile, ReadFile
from orchestrator.protocol.timing import FILE_ANSWER_SECONDS

# The number of pending requests, so that latency does not limit the speed of a distant node.
AHEAD = 8
ANOTHER = "another file has this name here"
CHANGED = "it changed while it was read: fetch it again"
# Several nodes may have files of the same name.
PUBLISHING = threading.Lock()


def plain(path: str) -> bool:
    """Return True if a path from a node stays below its directory."""
    parts = PurePosixPath(path).parts
    try:
        named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        # The path contains a lone surrogate.
        return False
    return named and bool(parts) and not path.startswith("/") and not {"..", "."} & set(parts)


class Fetch:
    """Fetches listed files of one directory on a node."""

    def __init__(
        self,
        channel: NodeChannel,
        place: str,
        folder: Folder,
        *,
        label: str,
        replace: Callable[[str], bool],
        since: tuple[float, float] | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`replace` returns True for paths whose local files may be overwritten.

        `since` is the end of the attempt before, by this machine's clock and by the node's. A
        local file that is older counts as the node's if size and time are equal, and is replaced
        by a newer one. A local file that is newer may be another node's, so contents are compared.
        """
        self.channel, self.place, self.folder = channel, place, folder
        self.label, self.replace, self.progress = label, replace, progress
        self.since = since
        self.result = Moved()

    def go(self, listed: Sequence[OutputFile]) -> Moved:
        """Fetch the files that are missing here or differ; continue after files that fail.

        A program may write different files of the same name on each node. Those of later nodes go
        into a directory per node.
        """
        self._receive([file for file in listed if self._is_wanted(file)])
        failed = self.result.failed
        if aside := [file for file in listed if file.place and failed.get(file.path) == ANOTHER]:
            for file in aside:
                del failed[file.path]
            self.folder = Folder(self.folder.root / self.label, private=self.folder.private)
            self.replace = lambda _: True
            self.go(aside)
        return self.result

    def _is_wanted(self, file: OutputFile) -> bool:
        """Return True if a file has to be fetched; create directories and links right away."""
        if not plain(file.path):
            # Our node program never sends such a path.
            return False
        if file.kind == "link" and not link_is_inside(file.path, file.target):
            self.result.left_out.append(f"{file.path} (a link that leads out, to {file.target})")
            return False
        parts = PurePosixPath(file.path).parts
        try:
            self.folder.make()
            if file.kind == "directory":
                with self.folder.inside(parts):
                    return False
            with self.folder.inside(parts[:-1]) as directory:
                if file.kind == "link":
                    self._make_link(file, parts[-1], directory)
                return file.kind == "file" and self._lacks(file, parts[-1], directory)
        except OSError as error:
            self.result.failed[file.path] = error.strerror or str(error)
            return False

    def _make_link(self, file: OutputFile, name: str, directory: int) -> None:
        try:
            os.symlink(file.target, name, dir_fd=directory)
            self.result.files.append(file.path)
        except FileExistsError:
            is_link = stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode)
            if not (is_link and os.readlink(name, dir_fd=directory) == file.target):
                raise another() from None
            self.result.kept += 1

    def _lacks(self, file: OutputFile, name: str, directory: int) -> bool:
        try:
            status = os.lstat(name, dir_fd=directory)
        except FileNotFoundError:
            return True
        same = status.st_size == file.size and status.st_mtime_ns == file.changed
        if same and (self.since is None or status.st_ctime < self.since[0]):
            self.result.kept += 1
            self.progress(file.size)
            return False
        if status.st_size != file.size and not self._may_replace(status, file):
            raise another()
        return True

    def _may_replace(self, before: os.stat_result, file: OutputFile) -> bool:
        came_before, changed_since = self.since or (0.0, 0.0)
        is_new = before.st_ctime < came_before and file.changed / 1e9 > changed_since
        return self.replace(file.path) or is_new

    def _receive(self, wanted: Sequence[OutputFile]) -> None:
        """Fetch the files piece by piece; give each its name when it is complete."""
        questions = [
            [
                ReadFile(place=file.place or self.place, path=file.path, offset=at,
                         size=min(PIECE_BYTES, file.size - at), changed=file.changed)
                for at in range(0, max(file.size, 1), PIECE_BYTES)
            ]
            for file in wanted
        ]  # fmt: skip
        all_answers = answers(self.channel, itertools.chain.from_iterable(questions))
        for file, its_questions in zip(wanted, questions, strict=True):
            parts = PurePosixPath(file.path).parts
            its_answers = itertools.islice(all_answers, len(its_questions))
            try:
                with contextlib.closing(PartialFile(self.folder, parts, self.label)) as part:
                    for request, answer in its_answers:
                        self._take(part, request, answer)
                    self._publish(part, file)
            except OSError as error:
                self.result.failed[file.path] = error.strerror or str(error)
                # The remaining answers for this file are discarded.
                deque(its_answers, maxlen=0)

    def _take(self, part: PartialFile, request: ReadFile, answer: FilePiece | Declined) -> None:
        if isinstance(answer, Declined):
            raise OSError(0, answer.what)
        if len(answer.data) != request.size:
            raise OSError(0, CHANGED)
        part.put(answer.data)
        self.progress(request.size)
        self.result.size += request.size

    def _publish(self, part: PartialFile, file: OutputFile) -> None:
        """Publish a complete file under its name, unless the same contents are already here."""
        with PUBLISHING:
            before = part.here()
            if before is None or self._may_replace(before, file):
                part.publish(self.folder.mode(file.mode), file.changed)
                self.result.files.append(file.path)
                return
            with files.open_plain(part.name, part.directory) as known:
                same = files.digest(known.fileno()) == files.digest(part.file.fileno())
            if not same:
                raise another()
            self.result.kept += 1


def answers(
    channel: NodeChannel, questions: Iterable[ReadFile]
) -> Iterator[tuple[ReadFile, FilePiece | Declined]]:
    """Yield each request with its answer, in order; keep several requests pending."""
    waiting: deque[tuple[int, ReadFile]] = deque()
    for question in itertools.chain(questions, [None] * AHEAD):
        if question is not None:
            waiting.append((channel.post(question), question))
        if waiting and (question is None or len(waiting) == AHEAD):
            number, oldest = waiting.popleft()
            try:
                yield oldest, channel.wait_for(number, oldest, FILE_ANSWER_SECONDS)
            except Declined as error:
                yield oldest, error


def another() -> OSError:
    return FileExistsError(errno.EEXIST, ANOTHER)
