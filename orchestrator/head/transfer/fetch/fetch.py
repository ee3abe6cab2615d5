"""Fetches files from a node into a directory here, whole or not at all.

The directory takes them as one of a node does, by the policy of this command: see `Home`. A name
from a node never leads out of it.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from orchestrator.common import files
from orchestrator.common.folder import Folder, Partial
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.transfer.peer import Moved
from orchestrator.node.transfer.directory import Arriving, FoundFile, TargetDirectory, here
from orchestrator.node.transfer.receive import IncomingFiles, OtherContent
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, Entry, link_is_inside
from orchestrator.protocol.requests.transfer import (
    PIECE_BYTES,
    FilePart,
    FilePiece,
    OutputFile,
    ReadFile,
)
from orchestrator.protocol.timing import FILE_ANSWER_SECONDS

DISK_BYTES_PER_SECOND = 20e6  # of a slow disk whose files get their checksums
AHEAD = 8  # requests that are on their way, so that a far node is no slower than its line
MOST_READ_BYTES = 64 << 20  # of one file, into memory
ANOTHER = "another file has this name here"
CHANGED = "it changed while it was read: fetch it again"
KINDS = {"file": FILE, "directory": DIRECTORY, "link": LINK}
PUBLISHING = threading.Lock()  # several nodes may have files of one name

Replaces = Callable[[str], bool]  # whether a file takes the place of another with its path
Question = tuple[int, ReadFile]  # about a file, by its number


def plain(path: str) -> bool:
    """Return True if a path from a node stays below the directory it is for."""
    parts = PurePosixPath(path).parts
    try:
        named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a character
        return False
    return named and bool(parts) and not path.startswith("/") and not {"..", "."} & set(parts)


def read_bytes(channel: NodeChannel, place: str, path: str, size: int, *, begin: int = 0) -> bytes:
    """Read so many bytes of a listed file, as far as they are there, up to MOST_READ_BYTES."""
    data = bytearray()
    while len(data) < min(size, MOST_READ_BYTES):
        request = ReadFile(place=place, path=path, offset=begin + len(data))
        piece = channel.ask(request, FILE_ANSWER_SECONDS).data
        if not piece:
            break
        data += piece
    return bytes(data)


class Home(TargetDirectory):
    """A directory here that takes a node's files. What has such a name may have to stay.

    A shorter file is the beginning of the one there, if the contents say so: it has grown.
    """

    def __init__(
        self, folder: Folder, entries: Sequence[Entry], label: str, replace: Replaces
    ) -> None:
        super().__init__(folder.root, entries, folder.umask, private=folder.private)
        self.label, self.replace = label, replace
        self.before: dict[bytes, os.stat_result] = {}  # what has the name of a file that differs
        self.made: set[bytes] = set()  # links
        # Files that another node has brought in the same pull.
        self.equal: set[bytes] = set()

    def _make(self) -> None:
        self.folder.make()

    def _differs(self, number: int, entry: Entry, part: Partial, status: os.stat_result) -> bool:
        # Ranks of two nodes write files of one size within a tick of the clock, after a barrier:
        # time tells only where the file here came from this node.
        if self.replace(os.fsdecode(entry.path)) and status.st_mtime_ns == entry.time:
            return False
        self.before[entry.path] = status
        with files.open_plain(part.name, part.directory) as file:
            self.begun[number] = here(file, entry.size, os.fstat(file.fileno()))
        return True

    def _find_begun(
        self, number: int, entry: Entry, part: Partial, status: os.stat_result | None
    ) -> None:
        super()._find_begun(number, entry, part, status)
        if status is None:
            return
        self.before[entry.path] = status
        if number not in self.begun and status.st_size < entry.size:
            with files.open_plain(part.name, part.directory) as file:
                begin = here(file, status.st_size, None)
            self.begun[number] = begin._replace(grown=True)

    def _lacks_link(self, entry: Entry, parts: list[str], *, dry_run: bool) -> bool:
        last = os.fsencode(parts[-1])
        with self.folder.inside(parts[:-1]) as directory:
            try:
                os.symlink(entry.value, last, dir_fd=directory)
                self.made.add(entry.path)
            except FileExistsError:
                status = os.lstat(last, dir_fd=directory)
                link = stat.S_ISLNK(status.st_mode)
                if not (link and os.readlink(last, dir_fd=directory) == entry.value):
                    raise another() from None
        return False

    def arriving(self, entry: Entry, known: FoundFile | None) -> Arriving:
        return Coming(self, entry, known)


class Coming(Arriving):
    """A file that comes; one that another node has brought before stays."""

    def __init__(self, place: Home, entry: Entry, known: FoundFile | None) -> None:
        super().__init__(place, entry, known)
        self.home = place
        replaces = place.replace(os.fsdecode(entry.path))
        self.is_first = not replaces and entry.path not in place.before

    def finish(self, total: str) -> None:
        with PUBLISHING:
            if not self.is_first or self.part.here() is None:
                super().finish(total)
                return
            try:
                with files.open_plain(self.part.name, self.part.directory) as file:
                    same = files.digest(file.fileno()) == total
                self.part.discard()
                if not same:
                    raise another()
                self.home.equal.add(self.entry.path)
            finally:
                self.part.close()


class Fetch:
    """Fetches listed files of one place on a node."""

    def __init__(
        self,
        channel: NodeChannel,
        place: str,
        folder: Folder,
        *,
        label: str,
        replace: Replaces,
        since: tuple[float, float] = (0.0, 0.0),
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.channel, self.place, self.folder = channel, place, folder
        self.label, self.replace, self.progress = label, replace, progress
        # What came before a time of this machine is replaced by what changed there since another.
        self.came_before, self.changed_since = since
        self.result = Moved()

    def go(self, listed: Sequence[OutputFile]) -> Moved:
        """Fetch what is missing here or differs, and go on after files that cannot be.

        Programs that know nothing of other nodes give their files the same names on each: those
        of a node that comes later go into a directory of its own.
        """
        self._fetch([file for file in listed if self._is_sound(file)], self.folder)
        failed = self.result.failed
        aside = [file for file in listed if file.place and failed.get(file.path) == ANOTHER]
        if aside:
            for file in aside:
                del failed[file.path]
            own = Folder(self.folder.root / self.label, private=self.folder.private)
            self._fetch(aside, own)
        return self.result

    def _is_sound(self, file: OutputFile) -> bool:
        if not plain(file.path) or file.kind not in KINDS:
            return False  # no node of ours would name such a thing
        if file.kind == "link" and not link_is_inside(file.path, file.target):
            self.result.left_out.append(f"{file.path} (a link that leads out, to {file.target})")
            return False
        return True

    def _fetch(self, listed: Sequence[OutputFile], folder: Folder) -> None:
        self.listed = listed
        self.home = Home(folder, list(map(entry_of, listed)), self.label, self.replace)
        self.incoming = IncomingFiles(self.home)
        self.incoming.compare()
        lacking = set(self.incoming.missing)
        self.progress(sum(f.size for number, f in enumerate(listed) if number not in lacking))
        try:
            self._receive(self._starts())
        finally:
            self.incoming.close()
        self._count(lacking)

    def _starts(self) -> dict[int, int]:
        """Return from which byte on each file has to come; some have only another time here."""
        begun = {half.number: half for half in self.incoming.lacking.begun}
        sums = (self._sum(number, half.have) for number, half in begun.items())
        known = {number: answer.sum for number, answer in self._answers(sums)}
        starts = {}
        for number in sorted(self.incoming.missing):
            path = self.home.entries[number].path
            half, before = begun.get(number), self.home.before.get(path)
            have = half.have if half is not None and known.get(number) == half.sum else 0
            if (
                before is not None
                and have < before.st_size
                and not self._may_replace(before, number)
            ):
                self.incoming.fail(number, ANOTHER)
                continue
            self.progress(have)
            if half is not None and half.whole and have == self.listed[number].size:
                self.incoming.put(FilePart(number, have, 0, half.sum), memoryview(b""))
                self.home.equal.add(path)
            else:
                starts[number] = have
        return starts

    def _may_replace(self, before: os.stat_result, number: int) -> bool:
        file = self.listed[number]
        is_new = before.st_ctime < self.came_before and file.changed / 1e9 > self.changed_since
        return self.replace(file.path) or is_new

    def _receive(self, starts: Mapping[int, int]) -> None:
        """Ask for all that is missing; the checksum of a file comes with its last piece."""
        at = dict(starts)
        for number, answer in self._answers(self._questions(starts)):
            if number in self.incoming.failed:
                continue
            count = len(answer.data)
            left = self.listed[number].size - at[number]
            if count != min(PIECE_BYTES, left) or bool(answer.sum) != (count == left):
                self.incoming.fail(number, CHANGED)
                continue
            part = FilePart(number, at[number], count, answer.sum)
            self.incoming.put(part, memoryview(answer.data))
            at[number] += count
            self.result.size += count
            self.progress(count)

    def _questions(self, starts: Mapping[int, int]) -> Iterator[Question]:
        for number, start in starts.items():
            file = self.listed[number]
            for offset in range(start, max(file.size, start + 1), PIECE_BYTES):
                size = min(PIECE_BYTES, file.size - offset)
                yield (
                    number,
                    ReadFile(
                        place=file.place or self.place,
                        path=file.path,
                        offset=offset,
                        size=size,
                        with_sum=offset + size == file.size,
                    ),
                )

    def _sum(self, number: int, size: int) -> Question:
        file = self.listed[number]
        place = file.place or self.place
        return number, ReadFile(place=place, path=file.path, offset=size, size=0, with_sum=True)

    def _answers(self, questions: Iterable[Question]) -> Iterator[tuple[int, FilePiece]]:
        """Yield the answers in their order, with some questions on their way."""
        waiting: deque[tuple[Question, int]] = deque()

        def next_answer() -> Iterator[tuple[int, FilePiece]]:
            (number, request), asked = waiting.popleft()
            seconds = FILE_ANSWER_SECONDS + self.listed[number].size / DISK_BYTES_PER_SECOND
            try:
                yield number, self.channel.wait_for(asked, request, seconds)
            except Declined as error:
                self.incoming.fail(number, error.what)

        for question in questions:
            waiting.append((question, self.channel.post(question[1])))
            if len(waiting) == AHEAD:
                yield from next_answer()
        while waiting:
            yield from next_answer()

    def _count(self, lacking: set[int]) -> None:
        """Note what has become of each file."""
        for number, entry in enumerate(self.home.entries):
            path = self.listed[number].path
            if number in self.incoming.failed:
                reason = self.incoming.failed[number]
                changed = reason == str(OtherContent(entry.path))
                self.result.failed[path] = CHANGED if changed else reason
            elif entry.path in self.home.made or (
                number in lacking and entry.path not in self.home.equal
            ):
                self.result.files.append(path)
            elif entry.kind != DIRECTORY:
                self.result.kept += 1


def entry_of(file: OutputFile) -> Entry:
    path, target = os.fsencode(file.path), os.fsencode(file.target)
    return Entry(path, KINDS[file.kind], file.mode & 0o777, file.size, target, file.changed)


def another() -> OSError:
    return FileExistsError(errno.EEXIST, ANOTHER)
