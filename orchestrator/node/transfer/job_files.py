"""Lists files that ranks wrote in their job's directories here, and receives the master's files.

Before each attempt a node gets the files of the job's master that it lacks: see
docs/guide/shared_files.md. Received files are recorded, as they are not results of this node.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath

from orchestrator.common import files
from orchestrator.common.folder import Folder
from orchestrator.node.job import resume_dir
from orchestrator.node.job.run_directory import PartDir
from orchestrator.node.server.session import stored_spec
from orchestrator.node.transfer import snapshot
from orchestrator.node.transfer.listing import Listing
from orchestrator.node.transfer.receive import (
    Looks,
    TargetDirectory,
    empty_target,
    looks_of_entry,
    looks_of_path,
)
from orchestrator.node.transfer.store import Store
from orchestrator.protocol.manifest import DIRECTORY, LINK, ManifestEntry, link_is_inside
from orchestrator.protocol.requests.transfer import (
    AskJobFiles,
    JobFiles,
    Lacking,
    OutputFile,
    RemoteDir,
)
from orchestrator.protocol.spec import Spec

# The directories of a job; GIVEN ones are the node's own, named by sync.outputs.
WORK, ABOVE, OUTPUTS, RESUME, GIVEN = "work", "above", "outputs", "resume", "given/"
# Files that Python, the kernel and this program leave beside a program's files.
NOT_SAVED = re.compile(r"__pycache__|core(\.[0-9]+)?|\.orchestrator-.*", re.DOTALL)
# Files of this program's Trainer and sampler, by path: they are transferred separately.
OURS = {
    OUTPUTS: re.compile(
        r"checkpoints/\.?step_[0-9]{8,}.*|(rank_[0-9]+|node_[0-9]+)_[^/]*|time_spent\.jsonl"
        r"|profile|results|verify\.json",
        re.DOTALL,
    ),
    RESUME: re.compile(r"(trainer[0-9]+|script)\..*", re.DOTALL),
}
MOST_FILES = 20_000
# The next attempt waits for the search.
SEARCH_SECONDS = 5.0
# A file system's clock may be this far behind the machine's.
CLOCK_SECONDS = 2.0


def written_files(part: PartDir, request: AskJobFiles) -> JobFiles:
    """Return the files written in the job's directories since the job began."""
    spec = stored_spec(part)
    roots, since = roots_of(part, spec, request.outputs), began(part, spec)
    experiments = os.path.dirname(spec.env["ORCHESTRATOR_EXPERIMENT"])
    apart = set(map(os.path.realpath, (files.our_directory(), experiments, spec.workdir)))
    until, found, whole = time.monotonic() + SEARCH_SECONDS, list[OutputFile](), True
    parents = list[OutputFile]()
    for name, root in roots.items():
        after = max(since, whole_at(roots)) if name in (WORK, ABOVE) else since
        skip = partial(is_left, name, apart)
        listing = Listing(
            root,
            skip,
            since=int(after * 1e9),
            until=until,
            inputs=name == WORK and ABOVE in roots,
        )
        try:
            listing.walk()
        except TimeoutError:
            whole = False
        saved = [file for each in listing.files for file in saved_as(name, root, each)]
        found += saved
        above = {str(path) for file in saved for path in PurePath(file.path).parents}
        # Programs look for the newest directory by its time.
        directories = (file for file in listing.files if file.kind == "directory")
        parents += [file.replace(place=name) for file in directories if file.path in above]
    return JobFiles(
        files=(*found[:MOST_FILES], *parents),
        roots=roots,
        whole=whole and len(found) <= MOST_FILES,
    )


def target_directory(
    part: PartDir, place: RemoteDir, entries: Sequence[ManifestEntry], umask: int
) -> TargetDirectory:
    """Return the receiver for files that the job's master wrote in the same directory."""
    root = roots_of(part, part.read_spec(), place.outputs).get(place.directory)
    if root is None:
        return empty_target()
    return FromMaster(part, place.directory, Path(root), entries, umask)


class FromMaster(TargetDirectory):
    """A receiver for a job's directory that records the files it gets from the master.

    In the resume directory, a file that this node's ranks wrote is not overwritten.
    """

    def __init__(
        self, part: PartDir, name: str, root: Path, entries: Sequence[ManifestEntry], umask: int
    ) -> None:
        super().__init__(Folder(root, private=False, umask=umask), entries)
        self.part, self.name, self.known = part, name, brought(part)

    def compare(self, *, dry_run: bool = False) -> Lacking:
        found = super().compare(dry_run=dry_run)
        coming = [self.entries[number] for number in self.missing]
        # The master's file replaces a link, such as one to an input of this node.
        for path in filter(os.path.islink, map(self.path_of, coming)):
            os.unlink(path)
        if coming:
            self.known |= {self.path_of(entry): looks_of_entry(entry) for entry in coming}
            files.replace_file(note_of(self.part), json.dumps(self.known))
        return found

    def is_there(self, entry: ManifestEntry) -> bool:
        path = self.path_of(entry)
        here = looks_of_path(path)
        own = self.name == RESUME and here is not None and here != self.known.get(path)
        if own and entry.kind != DIRECTORY:
            return True
        if entry.kind == LINK and here != looks_of_entry(entry):
            self.known[path] = looks_of_entry(entry)
        return super().is_there(entry)

    def finish(self) -> None:
        """Set directories to the master's times, inner ones first: programs may compare them."""
        for entry in sorted(self.entries, reverse=True):
            if entry.kind == DIRECTORY:
                with contextlib.suppress(OSError):
                    times = (entry.time, entry.time)
                    os.utime(self.path_of(entry), ns=times, follow_symlinks=False)


# -- where a job writes --------------------------------------------------------------------------


def roots_of(part: PartDir, spec: Spec, outputs: Iterable[str]) -> dict[str, str]:
    """Return the directories of a job by the names that are the same on all nodes."""
    # The search may end within the working directory, which has the most files.
    found = {
        RESUME: resume_dir.make_resume_dir(part),
        OUTPUTS: os.path.join(spec.env["ORCHESTRATOR_EXPERIMENT"], "outputs"),
        WORK: spec.workdir,
    }
    if whole := snapshot.snapshot_of(Store(), spec.workdir):
        found[ABOVE] = os.fsdecode(whole)
    for name in outputs:
        path = os.path.normpath(os.path.join(spec.workdir, name))
        if os.path.islink(path) and os.path.isdir(path):
            found[GIVEN + name] = path
    return {name: os.path.realpath(path) for name, path in found.items()}


def began(part: PartDir, spec: Spec) -> float:
    """Return the start of the job, by the clock of the disk that it writes to."""
    # This file is the head's, on a shared disk.
    noted = os.path.join(spec.env["ORCHESTRATOR_EXPERIMENT"], "config.yaml")
    return os.stat(noted if os.path.exists(noted) else part.spec).st_mtime - CLOCK_SECONDS


def whole_at(roots: Mapping[str, str]) -> float:
    """Return the time when the snapshot was complete; 0 if the job runs elsewhere."""
    if ABOVE not in roots:
        return 0.0
    return os.stat(os.path.join(roots[ABOVE], os.fsdecode(snapshot.WHOLE))).st_mtime


# -- what is in it -------------------------------------------------------------------------------


def is_left(name: str, apart: Collection[str], path: str, entry: os.DirEntry[str]) -> bool:
    """Return True for hidden directories, hidden files beside the program, and files not saved."""
    is_directory, ours = entry.is_dir(follow_symlinks=False), OURS.get(name)
    top = name in (WORK, ABOVE) and entry.name == path
    if entry.name.startswith(".") and (is_directory or top):
        return True
    known = NOT_SAVED.fullmatch(entry.name) or (ours and ours.fullmatch(path))
    is_text = path.encode("utf-8", "replace") == os.fsencode(path)
    return bool(known) or not is_text or (is_directory and entry.path in apart)


def saved_as(name: str, root: str, file: OutputFile) -> Iterator[OutputFile]:
    """Yield a listed file or link with the name of its directory; skip links that lead outside."""
    target = file.target if file.kind == "link" else ""
    if os.path.isabs(target):
        target = os.path.relpath(target, os.path.join(root, os.path.dirname(file.path)))
    if file.kind == "file" or link_is_inside(file.path, target):
        yield file.replace(place=name, target=target)


# -- what has come from the master ---------------------------------------------------------------


def note_of(part: PartDir) -> str:
    return os.path.join(part.home, "from_master.json")


def brought(part: PartDir) -> dict[str, Looks]:
    """Return the state of each file received from the job's master, by path."""
    try:
        with open(note_of(part), encoding="utf-8") as file:
            return {path: tuple(looks) for path, looks in json.load(file).items()}
    except (OSError, ValueError):
        return {}


def own_results(part: PartDir, listed: Sequence[OutputFile], place: str) -> list[OutputFile]:
    """Return a node's results without files received from the master and unchanged since."""
    known = brought(part)
    paths = (os.path.join(os.path.realpath(file.place or place), file.path) for file in listed)
    pairs = zip(listed, paths)
    return [file for file, path in pairs if path not in known or looks_of_path(path) != known[path]]
