"""Lists what a program wrote on this node since its job began, and which of it are copies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from orchestrator.common import files
from orchestrator.node.job import resume_dir
from orchestrator.node.job.resume_dir import attempts_of
from orchestrator.node.job.run_directory import RunDir, home
from orchestrator.node.transfer.code import snapshot
from orchestrator.node.transfer.code.store import Store
from orchestrator.node.transfer.saved.copies import Copies, stamp_of
from orchestrator.protocol.manifest import is_inside
from orchestrator.protocol.requests.transfer import Overwritten, Saved, SavedFile
from orchestrator.protocol.spec import Spec

# Where a program saves: where it runs, above that, in its outputs, in memory, and where it was told
# to.
WORK, OUTPUTS, MEMORY, GIVEN = "work", "outputs", "memory", "given/"
ABOVE = "above/"  # and so often `..`, inside the snapshot that it runs in
# What Python and the kernel leave beside a program, and what we write into a program's directory.
NOT_WRITTEN = re.compile(
    r"__pycache__|core(\.[0-9]+)?|\.orchestrator-.*|\..*\.[0-9]+\.before", re.S
)
OURS = {  # what our own engine and sampler write there, which is brought otherwise
    OUTPUTS: re.compile(
        r"checkpoints/\.?step_[0-9]{8,}.*|(rank_[0-9]+|node_[0-9]+)_[^/]*|time_spent\.jsonl"
        r"|profile|results|verify\.json",
        re.DOTALL,
    ),
    MEMORY: re.compile(r"(trainer[0-9]+|script)\..*", re.DOTALL),
}
MOST_SEEN, DEEPEST, MOST_NAMED = 100_000, 8, 20_000
SEARCH_SECONDS = 1.0  # the next attempt waits for it
ENDS_BYTES = 1 << 16  # of each file's begin, middle and end


def saved(run: RunDir, outputs: Iterable[str] = ()) -> Saved:
    """List all that was written in the job's directories."""
    spec = run.read_spec()
    shared, starts = one_disk(run, spec), sorted(starts_of(run))
    since, places = began(run, spec), roots(run, spec, outputs)
    if starts and not shared:  # a clock that was set back makes later attempts begin earlier
        since = min(since, starts[0][0])
    ours = home(), os.path.dirname(experiment(run, spec))  # all that nodes and heads keep
    inner = (root for place, root in places.items() if place == WORK or place.startswith(ABOVE))
    apart = frozenset(map(os.path.realpath, (*ours, *inner)))
    until = time.monotonic() + SEARCH_SECONDS
    listed: list[SavedFile] = []
    whole = True
    for place, root in places.items():
        walk, written = Walk(root, place, apart, until), Written(root, since, run.job, starts)
        new = [file for path in walk.paths() for file in written.described(path)]
        new += [*written.removed(), *directories(root, new)]
        listed += [file.replace(place=place) for file in new]
        whole = whole and walk.whole
    return Saved(
        files=tuple(listed[:MOST_NAMED]),
        roots=places,
        whole=whole and len(listed) <= MOST_NAMED,
        shared=shared,
        kept=resume_dir.last_kept(run) > 0,
    )


class Walk:
    """A walk below a directory, the upper ones first, with an end."""

    def __init__(self, root: str, place: str, apart: frozenset[str], until: float) -> None:
        self.root, self.place, self.apart, self.until = root, place, apart, until
        self.ours = OURS.get(place)
        self.whole = True

    def paths(self) -> Iterator[str]:
        """Yield the files and links, by their paths below it; not those in hidden directories."""
        waiting, seen = deque([("", 0)]), 0
        while waiting:
            directory, depth = waiting.popleft()
            for entry in entries(os.path.join(self.root, directory)):
                seen += 1
                if seen > MOST_SEEN or time.monotonic() > self.until:
                    self.whole = False
                    return
                path = os.path.join(directory, entry.name)
                if self.is_left_out(entry, path):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    yield path
                elif depth == DEEPEST:
                    self.whole = False
                elif os.path.realpath(entry.path) not in self.apart:
                    waiting.append((path, depth + 1))

    def is_left_out(self, entry: os.DirEntry[str], path: str) -> bool:
        """Tell whether it is none of the program's: it may run in somebody's home directory."""
        at_home = self.place.startswith((WORK, ABOVE)) and path == entry.name
        if entry.name.startswith(".") and (at_home or entry.is_dir(follow_symlinks=False)):
            return True
        ours = self.ours is not None and self.ours.fullmatch(path) is not None
        return ours or NOT_WRITTEN.fullmatch(entry.name) is not None or is_foreign(path)


def entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as known:
            return sorted(known, key=lambda entry: entry.name)
    except OSError:
        return []


def is_foreign(path: str) -> bool:
    """Tell whether a name is none that a message can have."""
    try:
        return not is_inside(path.encode("utf-8"))
    except UnicodeEncodeError:
        return True


class Written:
    """Describes what was written in a directory since a job began, or brought there for it."""

    def __init__(
        self,
        root: str,
        since: float,
        job: str,
        starts: Sequence[tuple[float, int]],  # of its attempts, with their numbers
    ) -> None:
        self.root, self.since, self.job, self.starts = root, since, job, starts
        self.copies = Copies(root)

    def described(self, path: str) -> Iterator[SavedFile]:
        """Yield what a file or link is; nothing for what is neither, old, or leads elsewhere."""
        where = os.path.join(self.root, path)
        with contextlib.suppress(OSError):  # it was removed meanwhile
            status = os.lstat(where)
            target = inner_target(self.root, path) if stat.S_ISLNK(status.st_mode) else ""
            copy = self.copies.of(path, stamp_of(status, target))
            is_new = copy.job == self.job if copy else status.st_mtime >= self.since
            by, attempt = copy.by if copy else "", self.attempt(status)
            over = None if copy else self.overwritten(path)
            if target and is_new:
                yield SavedFile(
                    path=path, kind="link", target=target, by=by, attempt=attempt, over=over
                )
            elif stat.S_ISREG(status.st_mode) and is_new:
                ends = ends_of(where, status.st_size)
                yield SavedFile(
                    path=path,
                    size=status.st_size,
                    changed=max(0, copy.changed if copy else status.st_mtime_ns),
                    mode=stat.S_IMODE(status.st_mode),
                    by=by,
                    sound=ends.is_sound(status.st_size),
                    sum=hashlib.sha256(b"".join(ends)).hexdigest()[:16],
                    attempt=attempt,
                    over=over,
                )

    def overwritten(self, path: str) -> Overwritten | None:
        before = self.copies.before(path, self.job)
        if before is None:
            return None
        return Overwritten(
            by=before.by, changed=max(0, before.changed), target=before.looks[0].target
        )

    def attempt(self, status: os.stat_result) -> int:
        """Return in which attempt it was written; the first, before any."""
        return max((number for at, number in self.starts if at <= status.st_mtime), default=1)

    def removed(self) -> Iterator[SavedFile]:
        """Yield copies that were brought here for this job, and that somebody has removed."""
        for path, copy in self.copies.known.items():
            if copy.job == self.job and not os.path.lexists(os.path.join(self.root, path)):
                yield SavedFile(path=path, kind="removed", by=copy.by)


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
    for attempt in attempts_of(run.job):
        number = attempt.job[len(run.job) + 1 :] or "1"
        with contextlib.suppress(OSError):
            yield os.stat(attempt.spec).st_mtime, int(number)


def directories(root: str, listed: Sequence[SavedFile]) -> Iterator[SavedFile]:
    """Describe the directories that files are in: programs look for the newest one."""
    above = {above for file in listed for above in parents(file.path)} - {""}
    for path in sorted(above):
        with contextlib.suppress(OSError):
            changed = max(0, os.lstat(os.path.join(root, path)).st_mtime_ns)
            yield SavedFile(path=path, kind="directory", changed=changed)


def parents(path: str) -> Iterator[str]:
    """Yield the directories that a path is in; the last one is the place itself."""
    while path:
        path = path.rpartition("/")[0]
        yield path


# -- what a file holds ---------------------------------------------------------------------------

ZIP, ZIP_END = b"PK\x03\x04", b"PK\x05\x06"  # torch.save writes a zip, and numpy does
HEADER, LONGEST_HEADER = b'{"', 100_000_000  # of safetensors, after its length


class Ends(NamedTuple):
    """The begin, middle and end of a file: of a zip, that holds the checksums of all of it."""

    begin: bytes
    middle: bytes
    end: bytes

    def is_sound(self, size: int) -> bool:
        """Tell whether a file has its end, as far as its own content says where that is."""
        if self.begin.startswith(ZIP):
            at = self.end.rfind(ZIP_END)
            comment = self.end[at + 20 : at + 22]  # its length; it ends the file
            return at >= 0 and at + 22 + int.from_bytes(comment, "little") == len(self.end)
        length = int.from_bytes(self.begin[:8], "little")
        if self.begin[8:10] != HEADER or length > LONGEST_HEADER:
            return True
        header = self.begin[8 : 8 + length]
        if 8 + length > size or len(header) < length:
            return 8 + length <= size
        return tensor_bytes(header) in (-1, size - 8 - length)


def ends_of(path: str, size: int) -> Ends:
    with files.open_plain(path) as file:
        ends = []
        for offset in (0, size // 2, max(0, size - ENDS_BYTES)):
            file.seek(offset)
            ends.append(file.read(ENDS_BYTES))
    return Ends(*ends)


def tensor_bytes(header: bytes) -> int:
    """Return how many bytes of tensors follow a header of safetensors; -1 where it is none."""
    try:
        tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        return max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return -1


# -- where a program saves -----------------------------------------------------------------------


def roots(run: RunDir, spec: Spec, outputs: Iterable[str]) -> dict[str, str]:
    """Return the directory that each of the places is on this node."""
    found = {WORK: spec.workdir, OUTPUTS: os.path.join(experiment(run, spec), "outputs")}
    for levels, directory in enumerate(snapshot.above(Store(), os.fsencode(spec.workdir)), 1):
        found[f"{ABOVE}{'../' * levels}"] = os.fsdecode(directory)
    if memory := spec.env.get("ORCHESTRATOR_RESUME_DIR"):
        found[MEMORY] = memory
    below = tuple(os.path.join(root, "") for place, root in found.items() if place != OUTPUTS)
    for name in outputs:
        path = os.path.normpath(os.path.join(spec.workdir, name))
        # The node's own: sync.outputs. On a disk that nodes share nothing is linked.
        if path.startswith(below) and os.path.islink(path) and os.path.isdir(path):
            found[GIVEN + name] = os.path.realpath(path)
    return found


def experiment(run: RunDir, spec: Spec) -> str:
    """Return the experiment's directory here: the head's, where both share a disk, or our own."""
    path = os.path.join(run.path, "experiment")
    named = spec.env.get("ORCHESTRATOR_EXPERIMENT", "")
    return named if named and os.path.isdir(named) else path


def one_disk(run: RunDir, spec: Spec) -> bool:
    """Tell whether the program runs on the disk of the head's experiment, which nodes share."""
    experiment = os.path.realpath(spec.env.get("ORCHESTRATOR_EXPERIMENT", ""))
    workdir = os.path.realpath(spec.workdir)
    if experiment == os.path.realpath(os.path.join(run.path, "experiment")):
        return False  # this node's own
    try:
        same = os.stat(experiment).st_dev == os.stat(workdir).st_dev
    except OSError:
        return False
    return same and experiment.startswith(os.path.join(workdir, ""))


def began(run: RunDir, spec: Spec) -> float:
    """Return since when what is written is the job's; on a shared disk by the clock of that."""
    if one_disk(run, spec):
        path = os.path.join(spec.env["ORCHESTRATOR_EXPERIMENT"], "config.yaml")
        if os.path.exists(path):
            return os.stat(path).st_mtime
    return os.stat(run.spec).st_mtime
