"""Makes a directory for each launch from stored contents, and lists files that are new in it.

A running job keeps its snapshot, even if files are edited or sent later. It is removed with the run
directory. Without a job it is removed when its head disconnects, or at a later launch.
The tree is some levels below it, in snapshots/NAME/TITLE, so that files that a program writes
to `../outputs` has a place of its own there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator

from orchestrator.common import files
from orchestrator.node.job.run_directory import PartDir
from orchestrator.node.transfer.listing import Listing
from orchestrator.node.transfer.store import OLD_SECONDS, Store, is_kept, settle_content
from orchestrator.protocol.events import Ended
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, ManifestEntry, is_inside
from orchestrator.protocol.requests.transfer import OutputFile

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
# Files in snapshots/NAME: its job; its completion, with the directories that ranks search first.
OWNER, WHOLE = b".run", b".whole"
# A tree up to this size is copied. Contents of a larger one are linked, each into one snapshot: a
# job may write into its files, and the store sees by their times which it has to get again.
COPIED_BYTES = 16 << 20
# An input with more files and directories is one link.
MOST_LINKS = 2000
# After this time, a snapshot without a job counts as unused.
UNUSED_SECONDS = 3600.0


def make_snapshot(
    store: Store,
    name: str,
    title: str,
    entries: Iterable[ManifestEntry],
    first: Iterable[str] = (),
) -> tuple[bytes, bytes]:
    """Create a snapshot of stored contents; return its directory, and that of its tree.

    No other snapshot has its files. Its ranks search the `first` directories below the tree first.
    """
    if not NAME.fullmatch(name) or not is_inside(os.fsencode(title)):
        raise ValueError(f"not the name of a snapshot: {name!r}, {title!r}")
    place = new_directory(os.path.join(store.snapshots, name.encode()))
    root = os.path.join(place, os.fsencode(title))
    entries, known = list(entries), {place}
    link = sum(entry.size for entry in entries) > COPIED_BYTES
    try:
        make_directories(root, known)
        for entry in entries:
            path = root + b"/" + entry.path
            make_directories(path if entry.kind == DIRECTORY else os.path.dirname(path), known)
            if entry.kind == FILE:
                put(store.path_of(entry), path, entry, link=link)
            elif entry.kind == LINK:
                os.symlink(entry.value, path)
        files.replace_file(os.fsdecode(os.path.join(place, WHOLE)), "\n".join(first))
    except BaseException:
        remove_snapshot(place)
        raise
    return place, root


def new_directory(name: bytes) -> bytes:
    """Return NAME-0, or the next number if nodes that share a disk have taken it."""
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


def put(kept: bytes, path: bytes, entry: ManifestEntry, *, link: bool) -> None:
    """Link a content, or copy it if another snapshot has it; record its use."""
    refuse_changed(kept, entry)
    if link:
        # The file system may refuse links.
        with contextlib.suppress(OSError):
            os.link(kept, path)
            if os.stat(kept).st_nlink == 2:
                return
            os.unlink(path)
    with open(kept, "rb") as source, open(path, "xb") as target:
        # Blocks are shared, where the system and the file system can.
        with contextlib.suppress(AttributeError, OSError):
            while os.copy_file_range(source.fileno(), target.fileno(), entry.size):
                pass
        shutil.copyfileobj(source, target)
        target.flush()
        settle_content(target.fileno(), entry)
    # This call updates the ctime.
    os.chmod(kept, entry.mode)
    # The job to which it is linked may write into it at this moment.
    refuse_changed(kept, entry)


def refuse_changed(kept: bytes, entry: ManifestEntry) -> None:
    """Raise ValueError for a content that is missing or was changed in the store."""
    if not is_kept(kept, entry):
        raise ValueError(f"{os.fsdecode(entry.path)} has to come again: type the command again")


# -- what the node has beside it ------------------------------------------------------------------


def link_own(
    path: bytes, root: bytes, directory: str, outputs: Iterable[str], inputs: Iterable[str]
) -> list[str]:
    """Link what a node has in its own directory; return its inputs that the tree lacks, in words.

    An output is a link to a directory, which is created if it is missing. An input is a directory
    with links to files, so that new files stay in the snapshot.
    """

    def places_of(name: str) -> tuple[bytes, bytes]:
        own, here = (os.path.normpath(os.path.join(each, os.fsencode(name))) for each in sides)
        if not here.startswith(path + b"/") or (root + b"/").startswith(here + b"/"):
            raise ValueError(f"a path that leads out of the snapshot: {name[:60]!r}")
        return own, here

    sides = (os.fsencode(os.path.expanduser(directory)), root)
    written, found = dict(map(places_of, outputs)), list[str]()
    for own in written:
        os.makedirs(own, exist_ok=True)
    read = {places_of(name): name for name in inputs}
    for own, here in [*(each for each in read if each[0] not in written), *written.items()]:
        # Its whole directory may be there.
        if os.path.exists(own) and not os.path.lexists(here):
            os.makedirs(os.path.dirname(here), mode=0o700, exist_ok=True)
            remark = link_files(own, here, written)
            found += [] if own in written else [read[own, here] + remark]
    return found


def link_files(own: bytes, here: bytes, outputs: Collection[bytes]) -> str:
    """Create an input as a directory; return a remark on one with too many files for that.

    Such an input is one link, as are outputs, files and environments.
    """
    one = own in outputs or not os.path.isdir(own) or os.path.lexists(own + b"/bin/python")
    inside = [] if one else list(itertools.islice(paths_in(own, outputs), MOST_LINKS + 1))
    if one or len(inside) > MOST_LINKS:
        os.symlink(own, here)
        return "" if one else f" (over {MOST_LINKS:,} files: what is written there stays there)"
    os.mkdir(here, 0o700)
    for path, is_directory in inside:
        if is_directory:
            os.mkdir(here + path[len(own) :], 0o700)
        else:
            os.symlink(path, here + path[len(own) :])
    return ""


def paths_in(directory: bytes, left: Collection[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield the paths below a directory, parents first, with True for readable directories."""
    for entry in os.scandir(directory):
        if entry.path not in left:
            inner = entry.is_dir(follow_symlinks=False) and os.access(entry.path, os.R_OK | os.X_OK)
            yield entry.path, inner
            if inner:
                yield from paths_in(entry.path, left)


# -- whose it is, and its end ---------------------------------------------------------------------


def snapshot_of(store: Store, directory: str) -> bytes:
    """Return the snapshot that contains a job's workdir, or empty bytes."""
    name, _, title = os.fsencode(directory).removeprefix(store.snapshots + b"/").partition(b"/")
    path = os.path.join(store.snapshots, name)
    ours = os.fsencode(directory) == os.path.join(path, title) and is_inside(title)
    known = ours and NAME.fullmatch(os.fsdecode(name)) and os.path.isdir(path)
    return path if known and not os.path.islink(path) else b""


def remove_snapshot(path: bytes) -> int:
    """Remove a snapshot; return the number of bytes freed."""
    freed: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        if files.mounts_below(os.fsdecode(path)):
            raise OSError(f"something is mounted in {os.fsdecode(path)}")
        files.delete_directory(os.fsdecode(path), freed.append)
    return sum(freed)


def tidy_snapshots(store: Store, now: float) -> int:
    """Remove snapshots whose jobs never started or are gone, and old ones without new files.

    Returns the number of bytes freed.
    """
    freed = 0
    for entry in os.scandir(store.snapshots):
        # Another head may remove the same snapshots.
        with contextlib.suppress(OSError, ValueError):
            part, age = owner(entry.path), now - entry.stat().st_mtime
            if part is None:
                is_over = age > UNUSED_SECONDS
            else:
                ended = age > OLD_SECONDS and all(run.last(Ended) for run in part.attempts())
                is_over = not os.path.isdir(part.home) or (
                    ended and not written_since_start(entry.path)
                )
            if is_over:
                freed += remove_snapshot(entry.path)
    return freed


def owner(path: bytes) -> PartDir | None:
    """Return the job that was started in a snapshot."""
    try:
        with files.open_plain(os.fsdecode(os.path.join(path, OWNER))) as file:
            job, part = file.read(1000).decode().split()
    except FileNotFoundError:
        return None
    return PartDir(job, int(part))


def written_since_start(
    path: bytes, until: float = math.inf, *, inputs: bool = False
) -> list[OutputFile]:
    """Return the files changed since a snapshot was complete, except Python's bytecode.

    Raises TimeoutError after `until`. Files that were sent have times of the past.
    """
    whole = os.stat(os.path.join(path, WHOLE)).st_mtime_ns
    listing = Listing(
        os.fsdecode(path),
        lambda path, entry: os.fsencode(path) in (OWNER, WHOLE) or entry.name == "__pycache__",
        since=whole,
        until=until,
        inputs=inputs,
    )
    listing.walk()
    return [file for file in listing.files if file.kind == "file"]
