"""Lists the files in which a program has saved something on this node since its job began."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from orchestrator.common import files
from orchestrator.node.job import resume_dir
from orchestrator.node.job.resume_dir import attempts_of
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.saved.places import OUTPUTS, began, experiment, one_disk, roots
from orchestrator.node.transfer.copies import Copies, Copy, look_of
from orchestrator.protocol.manifest import is_inside
from orchestrator.protocol.requests.saved import Saved, SavedFile
from orchestrator.protocol.saved_names import is_saved

# Neither what others write beside it, nor what a killed process had not given its name yet.
NOT_SAVED = re.compile(
    r"\.(?!metadata$).*|__pycache__|wandb|mlruns|te?mp([-_.].*)?|core\.[0-9]+|.*~"
    r"|.*\.(log|out|err|te?mp|part|incomplete|lock|py|pyc|pyi|so|o)"
    r"|events\.out\.tfevents\..*|.*\.trace\.json(\.gz)?|nccl_trace.*",
    re.DOTALL,
)
OURS = re.compile(r"checkpoints/\.?step_[0-9]{8,}.*", re.DOTALL)  # a start brings them itself
POINTER = 1 << 16  # bytes at most: a file that says which of the checkpoints is the last
MOST_LOOKED_AT, DEEPEST, MOST_NAMED = 100_000, 8, 20_000
LOOKING = 1.0  # seconds: the next attempt waits for it


def saved(run: RunDir, given: Iterable[str] = ()) -> Saved:
    """List them where the program runs, in its outputs, and in directories that it was given."""
    spec = run.read_spec()
    since, places = began(run, spec), roots(run, spec, given)
    apart = os.path.realpath(os.path.dirname(experiment(run, spec)))  # all that heads keep
    until = time.monotonic() + LOOKING
    starts = sorted(starts_of(run))
    found: list[SavedFile] = []
    whole = True
    for place, root in places.items():
        looking, copies = Looking(root, place, apart, until), Copies(root)
        of_job = OfJob(root, copies, since, run.job, starts)
        new = [file for path in looking.paths() for file in of_job.described(path)]
        own = list(chosen(new))
        found += [each.replace(place=place) for each in (*own, *directories(root, own))]
        whole = whole and looking.whole
    return Saved(
        files=tuple(found[:MOST_NAMED]),
        roots=places,
        whole=whole and len(found) <= MOST_NAMED,
        shared=one_disk(run, spec),
        kept=resume_dir.last_kept(run) > 0,
    )


class Looking:
    """A walk below a directory, the upper ones first, with an end."""

    def __init__(self, root: str, place: str, apart: str, until: float) -> None:
        self.root, self.apart, self.until = root, apart, until
        self.ours = OURS if place == OUTPUTS else None
        self.whole = True

    def paths(self) -> Iterator[str]:
        """Yield the files and links, by their paths below it; not those in hidden directories."""
        waiting, seen = deque([("", 0)]), 0
        while waiting:
            directory, depth = waiting.popleft()
            for entry in entries(os.path.join(self.root, directory)):
                seen += 1
                if seen > MOST_LOOKED_AT or time.monotonic() > self.until:
                    self.whole = False
                    return
                path = os.path.join(directory, entry.name)
                if NOT_SAVED.fullmatch(entry.name) or is_foreign(path):
                    continue
                if self.ours is not None and self.ours.fullmatch(path):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    yield path
                elif depth == DEEPEST:
                    self.whole = False
                elif os.path.realpath(entry.path) != self.apart:
                    waiting.append((path, depth + 1))


def entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError:
        return []


def is_foreign(path: str) -> bool:
    """Tell whether a name is none that a message can have."""
    try:
        return not is_inside(path.encode("utf-8"))
    except UnicodeEncodeError:
        return True


class OfJob:
    """Describes what was written in a directory since a job began, or brought there for it."""

    def __init__(
        self,
        root: str,
        copies: Copies,
        since: float,
        job: str,
        starts: Sequence[tuple[float, int]],  # of its attempts, with their numbers
    ) -> None:
        self.root, self.copies, self.since, self.job = root, copies, since, job
        self.starts = starts

    def described(self, path: str) -> Iterator[SavedFile]:
        """Yield what a file or link is; nothing for what is neither, old, or leads elsewhere."""
        where = os.path.join(self.root, path)
        try:
            status = os.lstat(where)
            if stat.S_ISLNK(status.st_mode):
                target = inner_target(self.root, path)
                copy = self.copies.of(path, look_of(status, target))
                if target and self.is_new(status, copy):
                    by = copy.by if copy else ""
                    number = self.attempt(status)
                    yield SavedFile(path=path, kind="link", target=target, by=by, attempt=number)
            elif stat.S_ISREG(status.st_mode):
                copy = self.copies.of(path, look_of(status))
                if self.is_new(status, copy):
                    yield SavedFile(
                        path=path,
                        size=status.st_size,
                        changed=max(0, copy.changed if copy else status.st_mtime_ns),
                        mode=stat.S_IMODE(status.st_mode),
                        by=copy.by if copy else "",
                        sound=copy is not None or is_sound(where, status.st_size),
                        attempt=self.attempt(status),
                    )
        except OSError:  # it was removed meanwhile
            return

    def is_new(self, status: os.stat_result, copy: Copy | None) -> bool:
        return copy.job == self.job if copy else status.st_mtime >= self.since

    def attempt(self, status: os.stat_result) -> int:
        """Return in which attempt it was written; the first, before any."""
        return max((number for at, number in self.starts if at <= status.st_mtime), default=1)


def inner_target(root: str, path: str) -> str:
    """Return where a link leads, from its own directory; nothing where that is outside."""
    target = os.readlink(os.path.join(root, path))
    above = os.path.dirname(path)
    ways = [target]
    if os.path.isabs(target):  # it may name the place by a link that leads there
        directory, name = os.path.split(target)
        real = os.path.join(os.path.realpath(directory), name)
        here = os.path.join(root, above)
        ways = [os.path.relpath(target, here), os.path.relpath(real, os.path.realpath(here))]
    for way in map(os.path.normpath, ways):
        inside = os.path.normpath(os.path.join(above, way))
        if inside != "." and not is_foreign(inside):
            return way
    return ""


def starts_of(run: RunDir) -> Iterator[tuple[float, int]]:
    """Yield when each attempt of a job began here, by this node's clock, and its number."""
    for each in attempts_of(run.job):
        number = each.job[len(run.job) + 1 :] or "1"
        with contextlib.suppress(OSError):
            yield os.stat(each.spec).st_mtime, int(number)


def chosen(found: list[SavedFile]) -> Iterator[SavedFile]:
    """Yield what has been saved, and what belongs to it: in one directory with it, or above it."""
    tops = {parent(file.path) for file in found if is_saved(file.path.rpartition("/")[2])}
    above = {directory for top in tops for directory in (top, *parents(top))}
    inner = tops - {""}
    for file in found:
        directory = parent(file.path)
        if (
            is_saved(file.path.rpartition("/")[2])
            or not inner.isdisjoint((directory, *parents(directory)))
            or (directory in above and file.size <= POINTER)
        ):
            yield file


def directories(root: str, found: list[SavedFile]) -> Iterator[SavedFile]:
    """Describe the directories that these files are in: programs look for the newest one."""
    for path in sorted({each for file in found for each in parents(file.path)} - {""}):
        with contextlib.suppress(OSError):
            status = os.lstat(os.path.join(root, path))
            changed = max(0, status.st_mtime_ns)
            yield SavedFile(path=path, kind="directory", changed=changed)


def parent(path: str) -> str:
    return path.rpartition("/")[0]


def parents(path: str) -> Iterator[str]:
    """Yield the directories that a path is in; the last one is the place itself."""
    while path:
        path = parent(path)
        yield path


# -- whether it was written to its end ----------------------------------------------------------

ZIP, ZIP_END, ZIP_TAIL = b"PK\x03\x04", b"PK\x05\x06", 1 << 16
NEVER_EMPTY = ("pt", "pth", "tar", "ckpt", "npz", "pkl", "h5")


def is_sound(path: str, size: int) -> bool:
    """Tell whether a file has its end, as far as its format says so; most have one."""
    ending = path.rpartition(".")[2].lower()
    if not is_saved(os.path.basename(path)) or ending == "metadata":
        return True
    with files.open_plain(path) as file:
        start = file.read(8)
        if start.startswith(ZIP):  # torch.save, and numpy's
            file.seek(max(0, size - ZIP_TAIL))
            tail = file.read()
            at = tail.rfind(ZIP_END)
            rest = tail[at + 20 : at + 22]  # the length of a comment, which ends it
            return at >= 0 and at + 22 + int.from_bytes(rest, "little") == len(tail)
        if ending == "safetensors":
            length = int.from_bytes(start, "little")
            return length < size and is_whole_safetensors(size, file.read(length))
    return size > 0 or ending not in NEVER_EMPTY


def is_whole_safetensors(size: int, text: bytes) -> bool:
    import json  # for these alone

    try:
        header = json.loads(text)
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return False
    return bool(size == 8 + len(text) + max(ends, default=0))
