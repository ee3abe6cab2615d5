"""Fetch files from a node into a local directory, each completely or not at all.

A path from a node never leads out of the directory. The node declines to send a file that changes
during the transfer.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from orchestrator.common import files
from orchestrator.common.folder import Folder
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.transfer.tree import KINDS, Moved, entry_of
from orchestrator.node.transfer.receive import Arriving, TargetDirectory
from orchestrator.protocol.manifest import (
    DIRECTORY,
    LINK,
    ManifestEntry,
    is_inside,
    link_is_inside,
)
from orchestrator.protocol.requests.transfer import (
    PIECE_BYTES,
    FilePart,
    FilePiece,
    OutputFile,
    ReadFile,
)
from orchestrator.protocol.timing import FILE_ANSWER_SECONDS

# The number of pending requests, so that latency does not limit the speed of a distant node.
AHEAD = 8
ANOTHER = "another file has this name here"
CHANGED = "it changed while it was read: fetch it again"
# Several nodes may have files of the same name.
PUBLISHING = threading.Lock()


def is_plain_path(path: str) -> bool:
    """Return True if a path from a node stays below its directory."""
    try:
        return is_inside(os.fsencode(path)) and "\0" not in path
    except UnicodeEncodeError:
        # The path contains a lone surrogate.
        return False


def stays_inside(file: OutputFile) -> bool:
    """Return True unless a path or link leads out of its directory; our node program sends none."""
    inside = file.kind != "link" or link_is_inside(file.path, file.target)
    return file.kind in KINDS and is_plain_path(file.path) and inside


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
        inside = [file for file in listed if stays_inside(file)]
        self.result.left_out += [
            f"{file.path} (a link that leads out, to {file.target})"
            for file in listed
            if file.kind == "link" and is_plain_path(file.path) and not stays_inside(file)
        ]
        if inside:
            self._receive(inside)
        failed = self.result.failed
        if aside := [file for file in inside if file.place and failed.get(file.path) == ANOTHER]:
            for file in aside:
                del failed[file.path]
            self.folder = Folder(self.folder.root / self.label, private=self.folder.private)
            self.replace = lambda _: True
            self.go(aside)
        return self.result

    def _receive(self, listed: Sequence[OutputFile]) -> None:
        """Fetch the files piece by piece."""
        here = FromNode(self, [entry_of(file) for file in listed])
        try:
            self.folder.make()
        except OSError as error:
            reason = error.strerror or str(error)
            self.result.failed |= dict.fromkeys((file.path for file in listed), reason)
            return
        wanted = [(number, listed[number]) for number in here.compare().numbers]
        self.progress(sum(file.size for file in listed) - sum(file.size for _, file in wanted))
        parts = [
            FilePart(number, at, min(PIECE_BYTES, file.size - at))
            for number, file in wanted
            for at in range(0, max(file.size, 1), PIECE_BYTES)
        ]
        questions = (
            ReadFile(
                place=listed[part.number].place or self.place,
                path=listed[part.number].path,
                offset=part.offset,
                size=part.size,
                changed=listed[part.number].changed,
            )
            for part in parts
        )
        try:
            for part, answer in zip(parts, ordered_answers(self.channel, questions), strict=True):
                if part.number in here.failed:
                    continue
                if isinstance(answer, Declined) or len(answer.data) != part.size:
                    what = answer.what if isinstance(answer, Declined) else CHANGED
                    here.fail(part.number, OSError(0, what))
                else:
                    self.progress(part.size)
                    self.result.size += part.size
                    here.put(part, memoryview(answer.data))
        finally:
            here.abandon()
        self.result.files += here.made
        self.result.failed |= {listed[number].path: why for number, why in here.failed.items()}
        contents = sum(file.kind != "directory" for file in listed)
        self.result.kept += contents - len(here.made) - len(here.failed)


class FromNode(TargetDirectory):
    """The files of one fetch; those of another node, or of the user, are not replaced."""

    def __init__(self, fetch: Fetch, entries: Sequence[ManifestEntry]) -> None:
        super().__init__(fetch.folder, entries, fetch.label)
        self.fetch = fetch
        # The files and links that did not exist here.
        self.made: list[str] = []

    def is_there(self, entry: ManifestEntry) -> bool:
        same, path, since = super().is_there(entry), self.path_of(entry), self.fetch.since
        if entry.kind == DIRECTORY or not os.path.lexists(path):
            return same
        status = os.lstat(path)
        if same and (entry.kind == LINK or since is None or status.st_ctime < since[0]):
            return True
        if entry.kind == LINK or (
            status.st_size != entry.size and not self.may_replace(status, entry)
        ):
            raise FileExistsError(errno.EEXIST, ANOTHER)
        return False

    def may_replace(self, before: os.stat_result, entry: ManifestEntry) -> bool:
        came_before, changed_since = self.fetch.since or (0.0, 0.0)
        is_new = before.st_ctime < came_before and entry.time / 1e9 > changed_since
        return self.fetch.replace(os.fsdecode(entry.path)) or is_new

    def make(self, entry: ManifestEntry) -> bool:
        is_made = super().make(entry)
        if is_made and entry.kind == LINK:
            self.made.append(os.fsdecode(entry.path))
        return is_made

    def publish(self, arriving: Arriving) -> None:
        """Publish a complete file under its name, unless the same contents are already here."""
        part = arriving.part
        with PUBLISHING:
            before = part.here()
            if before is None or self.may_replace(before, arriving.entry):
                arriving.finish()
                self.made.append(os.fsdecode(arriving.entry.path))
                return
            with files.open_plain(part.name, part.directory) as known:
                same = files.file_digest(known.fileno()) == files.file_digest(part.file.fileno())
        arriving.abandon()
        if not same:
            raise FileExistsError(errno.EEXIST, ANOTHER)


def ordered_answers(
    channel: NodeChannel, questions: Iterable[ReadFile]
) -> Iterator[FilePiece | Declined]:
    """Yield the answers in the order of the requests; keep several requests pending."""
    waiting: deque[tuple[int, ReadFile]] = deque()
    for question in itertools.chain(questions, [None] * AHEAD):
        if question is not None:
            waiting.append((channel.post(question), question))
        if waiting and (question is None or len(waiting) == AHEAD):
            try:
                yield channel.wait_for(*waiting.popleft(), FILE_ANSWER_SECONDS)
            except Declined as error:
                yield error
