"""Makes a directory for each launch from the contents that are kept, and lists what is new in it.

A job that runs keeps its snapshot, whatever is edited or sent later. It goes with the job's run
directory; one whose job never started goes when its head leaves, or at a later launch.
The tree lies some directories deep in it, in snapshots/NAME/TITLE, so that what a program writes
to `../outputs` has a place of its own there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from orchestrator.common import files
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.transfer.store import Store, is_kept, settle
from orchestrator.protocol.events import Ended
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, ManifestEntry, is_inside

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
# Notes in snapshots/NAME: whose it is, when it was whole, what its ranks search first.
OWNER, WHOLE, FIRST = b".run", b".whole", b".first"
KEPT = 8  # of the newest
COPIED_BYTES = 16 << 20  # a tree up to here is copied, so that a job may even write into its files
UNUSED_SECONDS = 3600.0  # after which a snapshot without a job is taken for one that has none


class Made(NamedTuple):
    """A snapshot, and the directory of its tree."""

    path: bytes
    root: bytes


def make(store: Store, name: str, title: str, entries: Iterable[ManifestEntry]) -> Made:
    """Make a snapshot of contents that are kept."""
    if not NAME.fullmatch(name) or not is_inside(os.fsencode(title)):
        raise ValueError(f"not the name of a snapshot: {name!r}, {title!r}")
    place = new_directory(os.path.join(store.snapshots, name.encode()))
    root = os.path.join(place, os.fsencode(title))
    entries, known = list(entries), {place}
    put = copy if sum(entry.size for entry in entries) <= COPIED_BYTES else link
    try:
        make_directories(root, known)
        for entry in entries:
            path = root + b"/" + entry.path
            make_directories(path if entry.kind == DIRECTORY else os.path.dirname(path), known)
            if entry.kind == FILE:
                put(store.path_of(entry), path, entry)
            elif entry.kind == LINK:
                os.symlink(entry.value, path)
        files.replace(os.fsdecode(os.path.join(place, WHOLE)), "")
    except BaseException:
        remove(place)
        raise
    return Made(place, root)


def new_directory(name: bytes) -> bytes:
    """Make NAME-0: so all nodes have one path, but for those that share a disk with another."""
    for number in itertools.count():
        candidate = b"%b-%d" % (name, number)
        with contextlib.suppress(FileExistsError):
            os.mkdir(candidate, 0o700)
            return candidate
    raise AssertionError


def make_directories(path: bytes, known: set[bytes]) -> None:
    if path not in known:
        make_directories(os.path.dirname(path), known)
        os.mkdir(path, 0o700)
        known.add(path)


def link(kept: bytes, path: bytes, entry: ManifestEntry) -> None:
    """Link a content, or copy it where the file system has no room for a link."""
    refuse_changed(kept, entry)
    try:
        os.link(kept, path)
    except OSError:
        copy(kept, path, entry)


def copy(kept: bytes, path: bytes, entry: ManifestEntry) -> None:
    refuse_changed(kept, entry)
    shutil.copyfile(kept, path)
    with open(path, "rb+") as file:
        settle(file.fileno(), entry)


def refuse_changed(kept: bytes, entry: ManifestEntry) -> None:
    """Refuse a content that is not here, or was changed where it is kept; note its use."""
    if not is_kept(kept, entry):
        raise ValueError(f"{os.fsdecode(entry.path)} has to come again: type the command again")
    times = os.stat(kept)
    os.utime(kept, ns=(times.st_atime_ns, times.st_mtime_ns))  # this sets its ctime


# -- what the node has beside it ------------------------------------------------------------------


def link_inputs(root: bytes, directory: str, names: Iterable[str]) -> list[str]:
    """Link what the node has in its own directory by these names, and the tree has not."""
    source, linked = os.fsencode(os.path.expanduser(directory)), []
    for name in dict.fromkeys(names):
        if not is_inside(os.fsencode(name)):
            raise ValueError(f"a path that leads out of the snapshot: {name[:60]!r}")
        own, here = os.path.join(source, os.fsencode(name)), os.path.join(root, os.fsencode(name))
        if os.path.exists(own) and not os.path.lexists(here):
            os.makedirs(os.path.dirname(here), mode=0o700, exist_ok=True)
            os.symlink(own, here)
            linked.append(name)
    return linked


def link_outputs(made: Made, directory: str, outputs: Iterable[str]) -> None:
    """Make the directories that the program writes, by the node's own directory; link them."""
    path, root = made
    for name in map(os.fsencode, outputs):
        link = os.path.normpath(os.path.join(root, name))
        if not link.startswith(path + b"/") or (root + b"/").startswith(link + b"/"):
            raise ValueError(f"a path that leads out of the snapshot: {name[:60]!r}")
        own = os.path.normpath(os.path.join(os.fsencode(os.path.expanduser(directory)), name))
        os.makedirs(own, exist_ok=True)
        os.makedirs(os.path.dirname(link), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # linked with the rest of the directory
            os.symlink(own, link)


# -- whose it is, and its end ---------------------------------------------------------------------


def keep(path: bytes, run: RunDir) -> None:
    """Note which job runs in a snapshot."""
    files.replace(os.fsdecode(os.path.join(path, OWNER)), f"{run.job}\n{run.node}\n")


def snapshot_of(store: Store, directory: str) -> bytes:
    """Return the snapshot that a job's working directory is, or nothing."""
    name, _, title = os.fsencode(directory).removeprefix(store.snapshots + b"/").partition(b"/")
    path = os.path.join(store.snapshots, name)
    ours = os.fsencode(directory) == os.path.join(path, title) and is_inside(title)
    known = ours and NAME.fullmatch(os.fsdecode(name)) and os.path.isdir(path)
    return path if known and not os.path.islink(path) else b""


def of_run(store: Store, run: RunDir) -> bytes:
    """Return the snapshot of a job that was started here, or nothing."""
    try:
        return snapshot_of(store, run.read_spec().workdir)
    except (OSError, ValueError):
        return b""


def remove(path: bytes) -> int:
    """Remove a snapshot, whole or gone; return how many bytes that freed."""
    freed: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        if files.mounts_below(os.fsdecode(path)):
            raise OSError(f"something is mounted in {os.fsdecode(path)}")
        files.delete(os.fsdecode(path), freed.append)
    return sum(freed)


def tidy(store: Store, now: float) -> None:
    """Remove snapshots whose jobs never started or are gone, and old ones with nothing new."""
    times = {entry.path: entry.stat().st_mtime for entry in os.scandir(store.snapshots)}
    newest = sorted(times, key=times.__getitem__)[-KEPT:]
    for path, changed in times.items():
        with contextlib.suppress(OSError, ValueError):  # another head may do the same
            run = owner(path)
            if run is None or not os.path.isdir(run.path):
                is_over = now - changed > UNUSED_SECONDS
            else:
                ended = run.last(Ended) is not None and of_run(store, run) == path
                is_over = ended and path not in newest and next(written(path), None) is None
            if is_over:
                remove(path)


def owner(path: bytes) -> RunDir | None:
    """Return the job that was started in a snapshot."""
    try:
        with files.open_plain(os.fsdecode(os.path.join(path, OWNER))) as file:
            job, node = file.read(1000).decode().split()
    except FileNotFoundError:
        return None
    return RunDir(job, int(node))


def written(path: bytes, until: float = math.inf) -> Iterator[bytes]:
    """Yield the files below a snapshot that changed since it was whole, but Python's bytecode.

    A TimeoutError ends a look that takes longer. Files that were sent have times of the past.
    """
    whole = os.stat(os.path.join(path, WHOLE)).st_mtime_ns
    for directory, names, others in os.walk(path):
        names[:] = sorted(name for name in names if name != b"__pycache__")
        if time.monotonic() > until:
            raise TimeoutError
        for name in sorted(others):
            status = os.lstat(os.path.join(directory, name))
            own = directory == path and name in (OWNER, WHOLE, FIRST)
            if not own and not stat.S_ISLNK(status.st_mode) and is_since(status, whole):
                yield os.path.join(directory, name)


def is_since(status: os.stat_result, nanoseconds: int) -> bool:
    """Return True if a file was written, moved or changed since then.

    A file with several names is a content of the store: each launch that links it changes it.
    """
    moved = status.st_ctime_ns > nanoseconds and status.st_nlink == 1
    return moved or status.st_mtime_ns >= nanoseconds
