"""Makes a directory for each launch from the contents that are kept, and tells what is in it.

A job that runs keeps its snapshot, whatever is edited or sent meanwhile. It goes with the job's
run directory; one whose job never started goes when its head leaves, or at a later launch.
The tree lies some directories deep in it, in snapshots/NAME/TITLE, so that what a program writes
to `../outputs` has a place of its own there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from orchestrator.common import files
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.transfer.code.store import (
    READ_BYTES,
    Checked,
    Incomplete,
    Store,
    hash_of,
    is_as_kept,
    key_of,
    moment,
)
from orchestrator.protocol import manifest as tree
from orchestrator.protocol.events import Ended
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, Entry, is_inside

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
OWNER = b".run"  # in snapshots/NAME: whose it is,
TREE = b".tree"  # and the digest of what was sent
FIRST = b".first"  # and what its ranks search first: see installs.py
KEPT = 8  # of the newest
FICLONE = 0x40049409
COPIED_BYTES = 16 << 20  # a tree up to here is copied, so that a job may even write into its files
Put = Callable[[bytes, bytes, Entry], None]
NO_LINK = (errno.EMLINK, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP)
# What is not worth naming in a node's own directory: code, and what is made of code.
CODE = re.compile(rb".*\.(py|pyc|pyi|so|pth|egg-info)|__pycache__|experiments")


class Made(NamedTuple):
    """A snapshot, and what was then read in it."""

    path: bytes
    root: bytes  # of its tree
    digest: str
    differ: list[str]  # paths that are not as the tree has them


def make(store: Store, name: str, title: str, entries: Iterable[Entry]) -> Made:
    """Make a snapshot; Incomplete where a content that is kept is not what it was."""
    if not NAME.fullmatch(name) or not is_inside(os.fsencode(title)):
        raise ValueError(f"not the name of a snapshot: {name!r}, {title!r}")
    place = new_directory(os.path.join(store.snapshots, name.encode()))
    root = os.path.join(place, os.fsencode(title))
    entries = list(entries)
    known = {place}
    try:
        make_directories(root, known)
        put = way_to_put(store, place, entries)
        contents = {key_of(entry): entry for entry in entries if entry.kind == FILE}.values()
        if put is not copy:  # which reads every byte itself
            for entry in contents:
                store.check(entry)
        for entry in entries:
            path = root + b"/" + entry.path
            make_directories(path if entry.kind == DIRECTORY else path.rpartition(b"/")[0], known)
            if entry.kind == FILE:
                put(store.path_of(entry), path, entry)
            elif entry.kind == LINK:
                os.symlink(entry.value, path)
        digest, differ = compare(root, entries, store.checked if put is link else None)
        if differ:
            discard(store, entries, differ)
        store.checked.save()
    except FileNotFoundError as error:
        remove(place)
        raise Incomplete(name) from error
    except BaseException:
        remove(place)
        raise
    return Made(place, root, digest, differ)


def new_directory(name: bytes) -> bytes:
    """Make NAME-0: so all nodes have one path, but for those that share a disk with another."""
    for number in itertools.count():
        candidate = b"%b-%d" % (name, number)
        with contextlib.suppress(FileExistsError):
            os.mkdir(candidate, 0o700)
            return candidate
    raise AssertionError


def discard(store: Store, entries: Iterable[Entry], differ: Iterable[str]) -> None:
    """Throw contents away that somebody changed where they are kept; they have to come again."""
    changed = set(map(os.fsencode, differ))
    wrong = [entry for entry in entries if entry.kind == FILE and entry.path in changed]
    for entry in wrong:
        store.discard(entry)
    if wrong:
        raise Incomplete(os.fsdecode(wrong[0].path))


def make_directories(path: bytes, known: set[bytes]) -> None:
    if path not in known:
        make_directories(os.path.dirname(path), known)
        os.mkdir(path, 0o700)
        known.add(path)


def copy(kept: bytes, path: bytes, entry: Entry) -> None:
    """Copy a content, and look at every byte of it on the way."""
    digest = hashlib.sha256()
    with files.open_plain(os.fsdecode(kept)) as source:
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(new, "wb") as target:
            while data := source.read(READ_BYTES):
                digest.update(data)
                target.write(data)
            target.flush()
            settle(target.fileno(), entry)
    if digest.hexdigest().encode() != entry.value:
        os.unlink(kept)
        raise Incomplete(os.fsdecode(entry.path))


def settle(descriptor: int, entry: Entry) -> None:
    os.fchmod(descriptor, entry.mode)
    os.utime(descriptor, (moment(entry.value), moment(entry.value)))


def link(kept: bytes, path: bytes, entry: Entry) -> None:
    """Link a content, unseen: `compare` reads what it is."""
    try:
        os.link(kept, path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        copy(kept, path, entry)


def clone(kept: bytes, path: bytes, entry: Entry) -> None:
    """Share the blocks of a content that is as it was kept."""
    with files.open_plain(os.fsdecode(kept)) as source:
        if not is_as_kept(os.fstat(source.fileno()), entry):
            os.unlink(kept)
            raise Incomplete(os.fsdecode(entry.path))
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.ioctl(new, FICLONE, source.fileno())
            settle(new, entry)
        finally:
            os.close(new)


def way_to_put(store: Store, path: bytes, entries: Sequence[Entry]) -> Put:
    """Copy what is small, else clone where the file system can, else link."""
    if sum(entry.size for entry in entries) <= COPIED_BYTES:
        return copy
    first = next(entry for entry in entries if entry.kind == FILE)
    trial = os.path.join(path, b".trial")
    try:
        clone(store.path_of(first), trial, first)
    except FileNotFoundError:
        raise
    except OSError:
        return link
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(trial)
    return clone


# -- what is there ----------------------------------------------------------------------------


def compare(
    root: bytes, entries: Iterable[Entry], checked: Checked | None
) -> tuple[str, list[str]]:
    """Return the digest of what a directory holds, and the paths that are not as in the list.

    `checked` hears what contents are like now that they have another name here.
    """
    expected = {entry.path: entry for entry in entries}
    seen = dict(walk(root, expected, checked))
    differ = [path for path in expected if seen.get(path) != expected[path]]
    differ += [path for path in seen if path not in expected]
    return tree.digest_of(tree.packed(seen.values())), sorted(map(os.fsdecode, differ))


def walk(
    root: bytes, expected: dict[bytes, Entry], checked: Checked | None
) -> Iterable[tuple[bytes, Entry]]:
    """Yield what is there. The digest of a file that is as the store wrote it is known."""
    for directory, names, others in os.walk(root):
        for name in (*names, *others):
            where = directory + b"/" + name
            path = where[len(root) + 1 :]
            status = os.lstat(where)
            mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISLNK(status.st_mode):
                yield path, Entry(path, LINK, 0, 0, os.readlink(where))
            elif stat.S_ISREG(status.st_mode):
                entry = expected.get(path)
                known = entry is not None and is_as_kept(status, entry)
                value = entry.value if known and entry else hash_of(where)
                if known and entry and checked is not None:
                    checked.linked(key_of(entry), status)
                yield path, Entry(path, FILE, mode, status.st_size, value)
            elif path in expected:  # an empty directory has an entry, others have none
                yield path, Entry(path, DIRECTORY, expected[path].mode, 0, b"")


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


def left_alone(root: bytes, directory: str) -> list[str]:
    """Name what else the node has in its own directory, and neither the tree has nor is code."""
    source = os.fsencode(os.path.expanduser(directory))
    names = os.listdir(source) if os.path.isdir(source) else []
    return [
        os.fsdecode(name)
        for name in sorted(names)
        if not (name.startswith(b".") or CODE.fullmatch(name))
        and not os.path.exists(os.path.join(source, name, b"__init__.py"))
        and not os.path.lexists(os.path.join(root, name))
    ]


def link_outputs(made: Made, directory: str, outputs: Iterable[str]) -> None:
    """Make the directories that the program writes, by the node's own directory; link them."""
    path, root = made.path, made.root
    for name in map(os.fsencode, outputs):
        link = os.path.normpath(os.path.join(root, name))
        if not link.startswith(path + b"/") or (root + b"/").startswith(link + b"/"):
            raise ValueError(f"a path that leads out of the snapshot: {name[:60]!r}")
        own = os.path.normpath(os.path.join(os.fsencode(os.path.expanduser(directory)), name))
        os.makedirs(own, exist_ok=True)
        os.makedirs(os.path.dirname(link), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # linked with the rest of the directory
            os.symlink(own, link)


# -- whose it is, and its end -----------------------------------------------------------------


def keep(store: Store, directory: str, run: RunDir, digest: str) -> None:
    """Note which job runs in a snapshot; nothing where the directory is none."""
    path = snapshot_of(store, directory)
    if path:
        files.replace(os.fsdecode(os.path.join(path, TREE)), digest)
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
    directory, name = os.path.split(path)
    hidden = os.path.join(directory, os.fsencode(files.hidden_name(os.fsdecode(name))))
    freed: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        if files.mounts_below(os.fsdecode(path)):
            raise OSError(f"something is mounted in {os.fsdecode(path)}")
        os.rename(path, hidden)
        files.delete(os.fsdecode(hidden), freed.append)
    return sum(freed)


UNUSED_SECONDS = 3600.0  # after which a snapshot without a job is nobody's


def remove_unused(store: Store, now: float) -> None:
    """Remove the snapshots of jobs that never started or that are gone."""
    for entry in list(os.scandir(store.snapshots)):
        name = os.fsdecode(entry.name)
        with contextlib.suppress(OSError, ValueError):
            if name.startswith(".") and files.GONE in name:
                files.delete(os.fsdecode(entry.path))
            elif NAME.fullmatch(name):
                age = now - entry.stat(follow_symlinks=False).st_mtime
                if age > UNUSED_SECONDS and not has_job(entry.path):
                    remove(entry.path)


def has_job(path: bytes) -> bool:
    run = owner(path)
    return run is not None and os.path.isdir(run.path)


def owner(path: bytes) -> RunDir | None:
    """Return the job that was started in a snapshot."""
    try:
        with files.open_plain(os.fsdecode(os.path.join(path, OWNER))) as file:
            job, node = file.read(1000).decode().split()
    except FileNotFoundError:
        return None
    return RunDir(job, int(node))


def remove_old(store: Store) -> None:
    """Remove snapshots of jobs that are over, but for the newest, and those with files in them.

    What a program left beside its sources goes with its job only.
    """
    times = {entry.path: entry.stat().st_mtime for entry in os.scandir(store.snapshots)}
    for path in sorted(times, key=times.__getitem__)[:-KEPT]:
        with contextlib.suppress(OSError, ValueError, Incomplete):
            run = owner(path)
            if run is None or run.last(Ended) is None or of_run(store, run) != path:
                continue
            if next(written(store, os.fsencode(run.read_spec().workdir)), None) is None:
                with store.unlinking(sent(store, path)):
                    remove(path)


def sent(store: Store, path: bytes) -> tuple[Entry, ...]:
    """Return the list of what was sent for a snapshot."""
    with files.open_plain(os.fsdecode(os.path.join(path, TREE))) as file:
        return store.tree(file.read(64).decode())


def written(store: Store, root: bytes, until: float = math.inf) -> Iterator[bytes]:
    """Yield what is in a snapshot besides what was sent, links, and Python's bytecode.

    These are paths below its tree; those above it begin with `..`. A TimeoutError ends a look that
    takes longer.
    """
    whole = snapshot_of(store, os.fsdecode(root))
    expected = {entry.path: entry for entry in sent(store, whole)}
    for directory, names, others in os.walk(whole):
        names[:] = sorted(name for name in names if name != b"__pycache__")
        if time.monotonic() > until:
            raise TimeoutError
        for name in sorted(others):
            path = os.path.relpath(os.path.join(directory, name), root)
            status = os.lstat(os.path.join(directory, name))
            known = path in expected and is_as_kept(status, expected[path])
            own = directory == whole and name in (OWNER, TREE, FIRST)
            if not known and not own and not stat.S_ISLNK(status.st_mode):
                yield path
