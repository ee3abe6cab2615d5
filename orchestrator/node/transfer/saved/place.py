"""Where a program saves, as a place for copies of what another node's ranks saved.

All of it comes or nothing, and over nothing that is our own. It waits in a hidden directory until
all of it is whole; then it gets its names. No link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from orchestrator.common import files
from orchestrator.common.text import size
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.transfer.directory import Arriving, Directory
from orchestrator.node.transfer.receive import Target
from orchestrator.node.transfer.saved.copies import Copies, Copy, Stamp, stamp_of
from orchestrator.node.transfer.saved.listing import began, roots
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, Entry, is_inside, ranges
from orchestrator.protocol.requests.transfer import Lacking, Place, SavedPlace

WAITING = ".orchestrator-arriving"
KEPT = ".{name}.{number}.before"  # what made room for a newer one
MARGIN_BYTES = 1 << 20  # that a disk needs besides, for directories and our list,
FEW_NAMES = 8  # and of names


class State(NamedTuple):
    """Something that has a name here: a copy, a file that may make room, or one of our own."""

    kind: str  # copy, old, own
    status: os.stat_result
    copy: Copy | None


class CopiesTarget(Target):
    """One directory that the program of a job writes."""

    goes_on = False

    def __init__(self, place: Place, entries: Sequence[Entry], umask: int) -> None:
        super().__init__(entries)
        self.saved, self.job = place.saved or SavedPlace(root=""), place.job
        run = RunDir(place.job, place.node)
        spec = run.read_spec()
        root = roots(run, spec, self.saved.outputs).get(self.saved.root)
        if root is None:
            raise ValueError(f"there is no directory for {self.saved.root!r} here")
        if not all(map(leads_inside, entries)):
            raise ValueError("a path that leads out of the directory")
        self.root, self.since = root, began(run, spec)
        self.here = Directory(Path(root), entries, umask)
        self.arriving = Directory(Path(root, WAITING), entries, umask, of_job=True)
        self.folder = self.here.folder
        self.lacking: list[Entry] = []

    def compare(self, *, dry_run: bool) -> Lacking:
        """Refuse what is our own, and make room for what is lacking."""
        self.folder.make()
        self.copies = Copies(self.root)
        for entry in self.entries:
            if entry.kind != DIRECTORY:
                self.refuse_if_local(entry)
        numbers = [n for n, entry in enumerate(self.entries) if self.is_lacking(entry)]
        self.lacking = [self.entries[number] for number in numbers]
        self.abandon()
        if self.lacking:
            self.make_room(sum(entry.size for entry in self.lacking))
            os.mkdir(self.arriving.folder.root, 0o700)
        return Lacking(ranges=ranges(numbers), failed={})

    def begin(self, number: int, offset: int) -> Arriving:
        return Arriving(self.arriving, self.entries[number], None)

    def open(self, number: int) -> BinaryIO | None:
        return self.here.open(number)

    def finish(self) -> None:
        self.publish()
        self.note_equal()
        self.copies.write()
        self.set_times()

    def abandon(self) -> None:
        if os.path.lexists(self.arriving.folder.root):
            files.delete(self.arriving.folder.root)

    # -- what is here ------------------------------------------------------------------------

    def state(self, path: str) -> State | None:
        """Return what has this name; None where nothing has."""
        *above, last = path.split("/")
        try:
            with self.folder.inside(above, make=False) as directory:
                status = os.lstat(last, dir_fd=directory)
                target = ""
                if stat.S_ISLNK(status.st_mode):
                    target = os.path.normpath(os.readlink(last, dir_fd=directory))
        except FileNotFoundError:
            return None
        copy = self.copies.of(path, stamp_of(status, target))
        old = status.st_mtime < self.since or path in self.saved.older
        return State("copy" if copy else "old" if old else "own", status, copy)

    def is_lacking(self, entry: Entry) -> bool:
        """Tell whether a file has not come before, and is not the same without that."""
        if entry.kind != FILE:
            return False
        state = self.state(os.fsdecode(entry.path))
        if state is not None and state.copy is not None:
            return (state.copy.changed, state.status.st_size) != (entry.time, entry.size)
        return state is None or not self.is_equal(entry)

    def is_equal(self, entry: Entry) -> bool:
        *above, last = os.fsdecode(entry.path).split("/")
        with (
            contextlib.suppress(OSError),
            self.folder.inside(above, make=False) as directory,
            files.open_plain(last, dir_fd=directory) as file,
        ):
            same = os.fstat(file.fileno()).st_size == entry.size
            return same and files.digest(file.fileno()) == entry.value.decode()
        return False

    def refuse_if_local(self, entry: Entry) -> None:
        path = os.fsdecode(entry.path)
        try:
            state = self.state(path)
        except OSError as error:  # a directory there is a link, or a file
            raise ValueError(f"{path}: {(error.strerror or str(error)).lower()}") from None
        if state is None or state.kind == "copy":
            return
        if not (stat.S_ISREG(state.status.st_mode) or stat.S_ISLNK(state.status.st_mode)):
            raise ValueError(f"{path} is there, and is neither a file nor a link")
        if state.kind == "own" and not (entry.kind == FILE and self.is_equal(entry)):
            raise ValueError(f"{path} is there, written by this node's own ranks")

    def make_room(self, count: int) -> None:
        """See that the disk has room, without older copies if need be."""
        if self.shortage(count):
            self.drop(os.fsdecode(entry.path) for entry in self.lacking)
        if shortage := self.shortage(count):
            raise ValueError(f"{self.root}: {os.strerror(errno.ENOSPC)}: {shortage}")

    def shortage(self, count: int) -> str:
        """Say what the disk lacks for so many bytes of these files; nothing if it has that."""
        status = self.disk()
        free = status.f_bavail * status.f_frsize
        if free < count + MARGIN_BYTES:
            return (
                f"{size(free)} free, for {size(count)} and a list of {size(MARGIN_BYTES)} at most"
            )
        names = len(self.entries) + FEW_NAMES
        if status.f_files and status.f_favail < names:  # else it has no fixed number of them
            return f"{status.f_favail} inodes free, for {names} names"
        return ""

    def disk(self) -> os.statvfs_result:
        return os.statvfs(self.root)

    # -- what has come -----------------------------------------------------------------------

    def publish(self) -> None:
        """Give all of it its names. What we note before lets a later look know what is ours."""
        links = [entry for entry in self.entries if entry.kind == LINK]
        for entry in (*self.lacking, *links):
            self.copies.expect(
                os.fsdecode(entry.path), stamp_of_entry(entry), self.saved.by, self.job
            )
        if not (self.lacking or links):
            return
        self.copies.write()
        for entry in self.lacking:
            *above, last = os.fsdecode(entry.path).split("/")
            with (
                self.room_for(os.fsdecode(entry.path)) as there,
                self.arriving.folder.inside(above, make=False) as here,
            ):
                os.rename(last, last, src_dir_fd=here, dst_dir_fd=there)
                stamp = stamp_of(os.lstat(last, dir_fd=there))
            self.copies.came(os.fsdecode(entry.path), stamp)
        for entry in links:
            path = os.fsdecode(entry.path)
            with self.room_for(path) as there:
                last = path.rpartition("/")[2]
                fresh = f".{last}.{os.urandom(4).hex()}.new"
                os.symlink(entry.value, fresh, dir_fd=there)
                os.rename(fresh, last, src_dir_fd=there, dst_dir_fd=there)
            self.copies.came(path, stamp_of_entry(entry))
        self.abandon()
        for directory in sorted({os.path.dirname(entry.path) for entry in self.lacking}):
            files.sync_directory(os.path.join(self.root, os.fsdecode(directory)))

    def note_equal(self) -> None:
        """Note as a copy what would have made room, but is the same already: two attempts that do
        the same steps on other nodes write it alike."""
        for entry in self.entries:
            path = os.fsdecode(entry.path)
            state = self.state(path) if path in self.saved.older else None
            if state is not None and state.copy is None and entry.kind == FILE:
                self.copies.note(path, stamp_of(state.status), self.saved.by, entry.time, self.job)

    @contextlib.contextmanager
    def room_for(self, path: str) -> Iterator[int]:
        """Open the directory of a file that gets its name, after what had it has made room."""
        *above, last = path.split("/")
        before = self.state(path)
        with self.folder.inside(above) as directory:
            if before is not None and before.kind == "old":
                keep(last, directory)
            yield directory

    def set_times(self) -> None:
        """Let directories be as old as those that they are copies of; inner ones first."""
        for entry in sorted(self.entries, reverse=True):
            if entry.kind == DIRECTORY and entry.time:
                parts = os.fsdecode(entry.path).split("/")
                with contextlib.suppress(OSError), self.folder.inside(parts, make=False) as inner:
                    os.utime(inner, ns=(entry.time, entry.time))

    # -- what goes ---------------------------------------------------------------------------

    def drop(self, paths: Iterable[str]) -> None:
        """Remove copies that are as they came, and the directories that are empty without them."""
        self.copies = Copies(self.root)
        for path in paths:
            state = None
            with contextlib.suppress(OSError):
                state = self.state(path)
            if state is not None and state.kind == "copy":
                self._drop(path)
        self.copies.write()

    def _drop(self, path: str) -> None:
        *above, last = path.split("/")
        with self.folder.inside(above, make=False) as directory:
            os.unlink(last, dir_fd=directory)
        self.copies.forget(path)
        with contextlib.suppress(OSError):
            while above:
                with self.folder.inside(above[:-1], make=False) as directory:
                    os.rmdir(above.pop(), dir_fd=directory)


def leads_inside(entry: Entry) -> bool:
    """Tell whether a link stays in the directory, as far as its names say."""
    end = os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.value))
    return entry.kind != LINK or (not entry.value.startswith(b"/") and is_inside(end))


def stamp_of_entry(entry: Entry) -> Stamp:
    if entry.kind == LINK:
        return Stamp(0, 0, os.path.normpath(os.fsdecode(entry.value)))
    return Stamp(entry.size, entry.time)


def keep(name: str, directory: int) -> None:
    """Give a file that makes room a hidden name that nothing else has."""
    for number in range(1, 10_000):
        hidden = KEPT.format(name=name, number=number)
        with contextlib.suppress(FileExistsError):
            os.link(name, hidden, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            return
    raise OSError(errno.EEXIST, f"too many older ones of {name} are kept")
