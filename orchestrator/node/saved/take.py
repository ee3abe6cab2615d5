"""Takes what another node's ranks saved: all of it or nothing, and over nothing that is our own.

What comes waits in a hidden directory until all of it is whole, equal to what the other has. Then
it gets its names, and copies whose origins are no more go. No link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.common import files
from orchestrator.common.folder import Folder
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.saved.places import began, roots
from orchestrator.node.transfer.copies import Copies, Copy, Look, look_of
from orchestrator.node.transfer.files import LABEL, Arriving, is_here
from orchestrator.node.transfer.take import Taking
from orchestrator.protocol.manifest import is_inside
from orchestrator.protocol.requests.saved import TakeSaved
from orchestrator.protocol.requests.transfer import NamedFile

WAITING = ".orchestrator-arriving"
KEPT = ".{name}.{number}.before"  # what made room for a newer one
MARGIN = 1 << 20  # bytes that a disk needs besides, for directories and our list


def take(request: TakeSaved, umask: int) -> Taking:
    """Begin to take it."""
    paths = [named.path for named in request.files]
    paths += [*request.links, *request.directories, *request.gone]
    ends = [os.path.normpath(os.path.join(os.path.dirname(path), target))
            for path, target in request.links.items()]  # fmt: skip
    if any(os.path.isabs(target) for target in request.links.values()) or not all(
        is_inside(os.fsencode(path)) for path in (*paths, *ends)
    ):
        raise ValueError("a path that leads out of the directory")
    run = RunDir(request.job, request.node)
    spec = run.read_spec()
    root = roots(run, spec, request.given).get(request.place)
    if root is None:
        raise ValueError(f"there is no directory for {request.place!r} here")
    return Taking(Work(request, root, began(run, spec), umask).do)


class Found(NamedTuple):
    """Something that has a name here: a copy, a file that may make room, or one of our own."""

    kind: str  # copy, old, own
    status: os.stat_result
    copy: Copy | None


class Work:
    """One such request."""

    def __init__(self, request: TakeSaved, root: str, since: float, umask: int) -> None:
        self.request, self.root, self.since, self.umask = request, root, since, umask
        self.folder = Folder(Path(root), private=False)
        self.waiting = Folder(Path(root, WAITING), private=False)
        self.folder.mask = self.waiting.mask = umask

    def do(self, taking: Taking) -> None:
        request = self.request
        self.folder.make()
        self.copies = Copies(self.root)
        for path in (*(named.path for named in request.files), *request.links):
            self.refuse_if_own(path)
        lacking = [named for named in request.files if not self.is_here(named)]
        taking.files = len(lacking)
        self.tidy()
        try:
            if lacking:
                self.make_room(sum(named.size for named in lacking))
                self.fetch(taking, lacking)
            self.publish(lacking)
        finally:
            self.tidy()
        for path in request.gone:
            self.drop(path)
        self.copies.write()
        self.set_times()

    def tidy(self) -> None:
        if os.path.lexists(self.waiting.root):
            files.delete(self.waiting.root)

    # -- what is here ------------------------------------------------------------------------

    def state(self, path: str) -> Found | None:
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
        copy = self.copies.of(path, look_of(status, target))
        old = status.st_mtime < self.since or path in self.request.older
        return Found("copy" if copy else "old" if old else "own", status, copy)

    def is_here(self, named: NamedFile) -> bool:
        """Tell whether a file has come before, or is the same without that."""
        found = self.state(named.path)
        if found is not None and found.copy is not None:
            return (found.copy.changed, found.status.st_size) == (named.changed, named.size)
        return found is not None and is_here(self.folder, named)

    def refuse_if_own(self, path: str) -> None:
        try:
            found = self.state(path)
        except OSError as error:  # a directory there is a link, or a file
            raise ValueError(f"{path}: {(error.strerror or str(error)).lower()}") from None
        if found is None or found.kind == "copy":
            return
        status = found.status
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise ValueError(f"{path} is there, and is neither a file nor a link")
        wanted = next((each for each in self.request.files if each.path == path), None)
        if found.kind == "own" and not (wanted is not None and is_here(self.folder, wanted)):
            raise ValueError(f"{path} is there, written by this node's own ranks")

    def make_room(self, count: int) -> None:
        """See that the disk has room, without older copies if need be."""
        if self.free() >= count + MARGIN:
            return
        for path in (*(named.path for named in self.request.files), *self.request.gone):
            self.drop(path)
        self.copies.write()
        if (free := self.free()) < count + MARGIN:
            raise ValueError(
                f"{self.root} has {free / 1e6:.1f} MB free, and {count / 1e6:.1f} MB would come"
            )

    def free(self) -> int:
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    # -- what comes --------------------------------------------------------------------------

    def fetch(self, taking: Taking, lacking: list[NamedFile]) -> None:
        """Have all of it in the hidden directory."""
        request = self.request
        if request.giver is None:
            raise ValueError("nobody gives it")
        os.mkdir(self.waiting.root, 0o700)
        caller = taking.call(request.giver, request.seconds)
        wanted = [(named.path, named.size) for named in lacking]
        taking.receive(caller, wanted, Arriving(self.waiting, lacking, LABEL))

    def publish(self, lacking: list[NamedFile]) -> None:
        """Give all of it its names. What we note before lets a later look know what is ours."""
        request = self.request
        for named in lacking:
            look = Look(named.size, named.changed or 0)
            self.copies.expect(named.path, look, request.by, request.job)
        for path, target in request.links.items():
            look = Look(0, 0, os.path.normpath(target))
            self.copies.expect(path, look, request.by, request.job)
        if not (lacking or request.links):
            return
        self.copies.write()
        for named in lacking:
            *above, last = named.path.split("/")
            with self.to(named.path) as there, self.waiting.inside(above, make=False) as here:
                os.rename(last, last, src_dir_fd=here, dst_dir_fd=there)
                self.copies.came(named.path, look_of(os.lstat(last, dir_fd=there)))
        for path, target in request.links.items():
            with self.to(path) as there:
                last = path.rpartition("/")[2]
                fresh = f".{last}.{os.urandom(4).hex()}.new"
                os.symlink(target, fresh, dir_fd=there)
                os.rename(fresh, last, src_dir_fd=there, dst_dir_fd=there)
                self.copies.came(path, Look(0, 0, os.path.normpath(target)))
        for directory in sorted({os.path.dirname(named.path) for named in lacking}):
            files.sync_directory(os.path.join(self.root, directory))

    @contextlib.contextmanager
    def to(self, path: str) -> Iterator[int]:
        """Open the directory of a file that gets its name, after what had it has made room."""
        *above, last = path.split("/")
        before = self.state(path)
        with self.folder.inside(above) as directory:
            if before is not None and before.kind == "old":
                self.keep(last, directory)
            yield directory

    def keep(self, name: str, directory: int) -> None:
        """Give a file that makes room a hidden name that nothing else has."""
        for number in range(1, 10_000):
            hidden = KEPT.format(name=name, number=number)
            with contextlib.suppress(FileExistsError):
                os.link(name, hidden, src_dir_fd=directory, dst_dir_fd=directory,
                        follow_symlinks=False)  # fmt: skip
                return
        raise OSError(errno.EEXIST, f"too many older ones of {name} are kept")

    # -- what goes ---------------------------------------------------------------------------

    def drop(self, path: str) -> None:
        """Remove a copy that is as it came, and the directories that are empty without it."""
        found = None
        with contextlib.suppress(OSError):
            found = self.state(path)
        if found is None or found.kind != "copy":
            return
        *above, last = path.split("/")
        with self.folder.inside(above, make=False) as directory:
            os.unlink(last, dir_fd=directory)
        self.copies.forget(path)
        while above:
            try:
                with self.folder.inside(above[:-1], make=False) as directory:
                    os.rmdir(above.pop(), dir_fd=directory)
            except OSError:
                return

    def set_times(self) -> None:
        """Let directories be as old as those that they are copies of; inner ones first."""
        for path, changed in sorted(self.request.directories.items(), reverse=True):
            with contextlib.suppress(OSError), self.folder.inside(path.split("/"), make=False) as d:
                os.utime(d, ns=(changed, changed))
