"""Lists what ranks wrote in the directories of their job on this node, and what it lacks of others.

Before each attempt a node gets what it lacks of what the job's master wrote: see
docs/guide/shared_files.md. What comes so is noted: it is no result of this node.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.common import files
from orchestrator.node.job import resume_dir
from orchestrator.node.job.run_directory import RunDir, home
from orchestrator.node.transfer import snapshot
from orchestrator.node.transfer.receive import IncomingFiles, TargetDirectory
from orchestrator.node.transfer.store import Store
from orchestrator.protocol.manifest import DIRECTORY, LINK, ManifestEntry, is_inside, numbers_in
from orchestrator.protocol.requests.transfer import (
    LATE,
    AskJobFiles,
    JobFiles,
    Lacking,
    OutputFile,
    RemoteDir,
)
from orchestrator.protocol.spec import Spec

# The directories of a job; GIVEN ones are the node's own, named by sync.outputs.
WORK, ABOVE, OUTPUTS, RESUME, GIVEN = "work", "above", "outputs", "resume", "given/"
# What Python, the kernel and we ourselves leave beside a program's files.
NOT_SAVED = re.compile(r"__pycache__|core(\.[0-9]+)?|\.orchestrator-.*", re.DOTALL)
# What our own Trainer and sampler write, by its path: they bring it themselves.
OURS = {
    OUTPUTS: re.compile(
        r"checkpoints/\.?step_[0-9]{8,}.*|(rank_[0-9]+|node_[0-9]+)_[^/]*|time_spent\.jsonl"
        r"|profile|results|verify\.json",
        re.DOTALL,
    ),
    RESUME: re.compile(r"(trainer[0-9]+|script)\..*", re.DOTALL),
}
MOST_FILES = 20_000
SEARCH_SECONDS = 5.0  # the next attempt waits for it
CLOCK_SECONDS = 2.0  # that a file system's clock may be behind this machine's

Looks = tuple[int, int, str]  # size, microseconds of the last change, target of a link


class Root(NamedTuple):
    """A directory of a job on this node."""

    path: str
    shared: bool  # it lies on the disk of the head's experiment


def written(run: RunDir, request: AskJobFiles) -> JobFiles:
    """List what was written in the job's directories since the job began."""
    spec = run.read_spec()
    roots, since = roots_of(run, spec, request.outputs), began(run, spec)
    inner = home(), os.path.dirname(experiment(run, spec)), spec.workdir
    apart = set(map(os.path.realpath, inner))
    until, found, whole = time.monotonic() + SEARCH_SECONDS, list[OutputFile](), True
    for name, root in roots.items():
        after = max(since, whole_at(roots)) if name in (WORK, ABOVE) else since
        try:
            for path in walk(name, os.path.realpath(root.path), apart, until):
                with contextlib.suppress(OSError):  # it was removed while we looked
                    found += described(name, root.path, path, after)
        except TimeoutError:
            whole = False
    return JobFiles(
        files=(*found[:MOST_FILES], *directories(roots, found)),
        roots={name: os.path.realpath(root.path) for name, root in roots.items()},
        shared=tuple(name for name, root in roots.items() if root.shared),
        whole=whole and len(found) <= MOST_FILES,
    )


def target(
    run: RunDir, place: RemoteDir, entries: Sequence[ManifestEntry], umask: int
) -> IncomingFiles:
    """Return the directory of a job as a place for what the job's master wrote in its own."""
    root = roots_of(run, run.read_spec(), place.outputs).get(place.directory)
    if root is None:  # this node does not have it
        return IncomingFiles(())
    if root.shared and place.shared:
        return SharedDirectory(root.path, entries)
    return FromMaster(run, place.directory, Path(os.path.realpath(root.path)), entries, umask)


class SharedDirectory(IncomingFiles):
    """A directory on a disk that the master shares: its files appear there by themselves."""

    def __init__(self, root: str, entries: Sequence[ManifestEntry]) -> None:
        super().__init__(entries)
        self.root = os.fsencode(root)

    def look(self, *, dry_run: bool) -> Lacking:
        paths = [os.path.join(self.root, entry.path) for entry in self.entries]
        unseen = {number: LATE for number, path in enumerate(paths) if not os.path.lexists(path)}
        return Lacking(ranges=(), failed=unseen)


class FromMaster(TargetDirectory):
    """A directory of a job that gets what the master wrote, and notes what came so.

    In the directory that outlives attempts a file that this node's ranks wrote stays.
    """

    def __init__(
        self, run: RunDir, name: str, root: Path, entries: Sequence[ManifestEntry], umask: int
    ) -> None:
        super().__init__(root, entries, umask)
        self.run, self.name, self.known = run, name, brought(run)

    def look(self, *, dry_run: bool) -> Lacking:
        found = super().look(dry_run=dry_run)
        coming = [self.entries[at] for at in numbers_in(found.ranges, len(self.entries))]
        if coming:
            self.known |= {self.path_of(entry): looks_of(entry) for entry in coming}
            files.replace(note_of(self.run), json.dumps(self.known))
        return found

    def lacks(self, entry: ManifestEntry, *, dry_run: bool) -> bool:
        path = self.path_of(entry)
        here = looks_at(path)
        own = self.name == RESUME and here is not None and here != self.known.get(path)
        if own and entry.kind != DIRECTORY:
            return False
        if entry.kind == LINK and here != looks_of(entry):
            self.known[path] = looks_of(entry)
        return super().lacks(entry, dry_run=dry_run)

    def finish(self) -> None:
        """Give directories the times of the master's, inner ones first: some ask for the newest."""
        for entry in sorted(self.entries, reverse=True):
            if entry.kind == DIRECTORY:
                with contextlib.suppress(OSError):
                    times = (entry.time, entry.time)
                    os.utime(self.path_of(entry), ns=times, follow_symlinks=False)

    def path_of(self, entry: ManifestEntry) -> str:
        return os.path.join(self.folder.root, os.fsdecode(entry.path))


# -- where a job writes --------------------------------------------------------------------------


def roots_of(run: RunDir, spec: Spec, outputs: Iterable[str]) -> dict[str, Root]:
    """Return the directories of a job, by the names that they have on all nodes."""
    work, outside = spec.workdir, experiment(run, spec)
    shared = outside != own_experiment(run)
    found = {
        WORK: Root(work, shared and is_on_one_disk(outside, work)),
        OUTPUTS: Root(os.path.join(outside, "outputs"), shared),
        RESUME: Root(resume_dir.make(resume_dir.first_of(run) or run), shared=False),
    }
    if whole := snapshot.snapshot_of(Store(), work):
        found[ABOVE] = Root(os.fsdecode(whole), shared=False)
    for name in outputs:
        path = os.path.normpath(os.path.join(work, name))
        if os.path.islink(path) and os.path.isdir(path):
            found[GIVEN + name] = Root(os.path.realpath(path), shared=False)
    return found


def own_experiment(run: RunDir) -> str:
    return os.path.join(run.path, "experiment")


def experiment(run: RunDir, spec: Spec) -> str:
    """Return the experiment's directory: the head's, if this node sees it, or the node's own."""
    named = spec.env.get("ORCHESTRATOR_EXPERIMENT", "")
    return named if named and os.path.isdir(named) else own_experiment(run)


def is_on_one_disk(experiment: str, workdir: str) -> bool:
    """Return True if the experiment is below the directory that its program runs in."""
    inside = os.path.realpath(experiment).startswith(os.path.join(os.path.realpath(workdir), ""))
    return inside and os.stat(experiment).st_dev == os.stat(workdir).st_dev


def began(run: RunDir, spec: Spec) -> float:
    """Return when the job began, by the clock of the disk that it writes to."""
    noted = os.path.join(experiment(run, spec), "config.yaml")  # the head's, on a shared disk
    return os.stat(noted if os.path.exists(noted) else run.spec).st_mtime - CLOCK_SECONDS


def whole_at(roots: Mapping[str, Root]) -> float:
    """Return when the job's snapshot was whole; 0 where it runs in another directory."""
    if ABOVE not in roots:
        return 0.0
    return os.stat(os.path.join(roots[ABOVE].path, os.fsdecode(snapshot.WHOLE))).st_mtime


# -- what is in it -------------------------------------------------------------------------------


def walk(name: str, root: str, apart: Collection[str], until: float) -> Iterator[str]:
    """Yield the files and links below a directory; TimeoutError says that it takes too long.

    Left out are hidden directories, hidden files beside the program, and what is not saved.
    """
    ours, beside = OURS.get(name), name in (WORK, ABOVE)
    for directory, names, others in os.walk(root):
        if time.monotonic() > until:
            raise TimeoutError
        links = [each for each in names if os.path.islink(os.path.join(directory, each))]
        below = os.path.relpath(directory, root) if directory != root else ""
        names[:] = [
            each
            for each in sorted({*names} - {*links})
            if not each.startswith(".")
            and os.path.join(directory, each) not in apart
            and is_saved(ours, os.path.join(below, each))
        ]
        for each in sorted([*others, *links]):
            hidden = beside and not below and each.startswith(".")
            if not hidden and is_saved(ours, os.path.join(below, each)):
                yield os.path.join(below, each)


def is_saved(ours: re.Pattern[str] | None, path: str) -> bool:
    known = NOT_SAVED.fullmatch(os.path.basename(path)) or (ours and ours.fullmatch(path))
    return not known and path.encode("utf-8", "replace") == os.fsencode(path)


def described(name: str, root: str, path: str, since: float) -> Iterator[OutputFile]:
    """Yield what a file or a link is that was written since then; not one that leads elsewhere."""
    status = os.lstat(os.path.join(root, path))
    if not snapshot.is_since(status, int(since * 1e9)):
        return
    if stat.S_ISLNK(status.st_mode):
        target = inner_target(root, path)
        if target:
            yield OutputFile(path=path, kind="link", target=target, place=name)
    elif stat.S_ISREG(status.st_mode):
        mode, changed = stat.S_IMODE(status.st_mode), max(0, status.st_mtime_ns)
        yield OutputFile(path=path, size=status.st_size, mode=mode, changed=changed, place=name)


def inner_target(root: str, path: str) -> str:
    """Return where a link leads, from its own directory; nothing where that is outside."""
    above = os.path.join(root, os.path.dirname(path))
    target = os.readlink(os.path.join(root, path))
    if os.path.isabs(target):
        target = os.path.relpath(target, above)
    inside = os.path.relpath(os.path.normpath(os.path.join(above, target)), root)
    return target if is_inside(os.fsencode(inside)) else ""


def directories(roots: Mapping[str, Root], found: Sequence[OutputFile]) -> Iterator[OutputFile]:
    """Yield the directories that files are in, with their times: programs look for the newest."""
    seen = set[tuple[str, str]]()
    for file in found:
        path = os.path.dirname(file.path)
        while path and (file.place, path) not in seen:
            seen.add((file.place, path))
            changed = max(0, os.lstat(os.path.join(roots[file.place].path, path)).st_mtime_ns)
            yield OutputFile(path=path, kind="directory", changed=changed, place=file.place)
            path = os.path.dirname(path)


# -- what has come from the master ---------------------------------------------------------------


def looks_of(entry: ManifestEntry) -> Looks:
    if entry.kind == LINK:
        return 0, 0, os.fsdecode(entry.value)
    return entry.size, entry.time // 1000, ""


def looks_at(path: str) -> Looks | None:
    """Return the looks of what has this name; None if nothing has."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return 0, 0, os.readlink(path)
    except OSError:
        return None
    return status.st_size, max(0, status.st_mtime_ns) // 1000, ""


def note_of(run: RunDir) -> str:
    return os.path.join((resume_dir.first_of(run) or run).path, "from_master.json")


def brought(run: RunDir) -> dict[str, Looks]:
    """Return the files that came from the job's master, by their paths, as they looked then."""
    try:
        with open(note_of(run), encoding="utf-8") as file:
            return {path: tuple(looks) for path, looks in json.load(file).items()}
    except (OSError, ValueError):
        return {}


def without_brought(run: RunDir, listed: Sequence[OutputFile], place: str) -> list[OutputFile]:
    """Leave out of the results of a node what came to it from the master, and is as it came."""
    known = brought(run)
    paths = (os.path.join(os.path.realpath(file.place or place), file.path) for file in listed)
    pairs = zip(listed, paths)  # noqa: B905  3.9
    return [file for file, path in pairs if path not in known or looks_at(path) != known[path]]
