"""Lists and reads files for the head: those that a job's ranks wrote here, or any directory."""

from __future__ import annotations

import os
import re
import stat
import time

from orchestrator.common import files
from orchestrator.common.folder import is_half
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.requests.transfer import (
    PIECE_BYTES,
    FilePiece,
    OutputFile,
    OutputFiles,
    ReadFile,
)

# The limit of files in one listing.
MOST = 1_000_000
MOST_LEFT_OUT = 100
# Hidden files below it are results, such as torch's .metadata.
PUBLISHED = "checkpoints/step_"
# Hidden names that are no results: those of caches, environments, tools, and this program.
STAY_HIDDEN = re.compile(
    r"\.(cache|git|hg|svn|venv|env|tox|nox|\w+_cache|ipynb_checkpoints|locks?|triton|nv|config|local"
    r"|DS_Store|nfs\w+|.*\.(swp|tmp|lock|part|partial|before)|step_.*|orchestrator.*)",
    re.DOTALL,
)


def directory(run: RunDir) -> str:
    """Return the node's own outputs; a job on a shared disk has none (see node/start)."""
    return os.path.join(run.path, "experiment", "outputs")


def has_checkpoints(run: RunDir) -> bool:
    path = os.path.join(directory(run), "checkpoints")
    return os.path.isdir(path) and bool(os.listdir(path))


def of_job(run: RunDir, *, checkpoints: bool, beside: float = 0.0) -> OutputFiles:
    """Return the files that the ranks wrote; checkpoints stay on the node unless requested.

    For at most `beside` seconds, files that they wrote beside their code are looked for as well.
    """
    root = directory(run)
    listing = Listing(root, hidden=False)
    listing.walk("", () if checkpoints else ("checkpoints",))
    if beside:
        add_outputs_beside_code(listing, run, time.monotonic() + beside)
    # On node 0 all files are results, even those from the master of an earlier attempt.
    if run.node:
        # Only the end of a job needs this import.
        from orchestrator.node.transfer import job_files

        listing.files = job_files.without_brought(run, listing.files, root)
    answer = listing.answer(checkpoints=has_checkpoints(run))
    return answer.replace(own_disk=os.path.isdir(root))


def add_outputs_beside_code(whole: Listing, run: RunDir, until: float) -> None:
    """Add files that the ranks wrote into their snapshot, if they ran in one.

    A file above the snapshot's tree has a path below the snapshot, which no file of the tree has.
    """
    from orchestrator.node.transfer import snapshot
    from orchestrator.node.transfer.store import Store

    beside, above = Listing("", hidden=False), Listing("", hidden=False)
    try:
        beside.root = whole.workdir = run.read_spec().workdir
        above.root = os.fsdecode(snapshot.snapshot_of(Store(), whole.workdir))
        if above.root:
            for path in map(os.fsdecode, snapshot.written(os.fsencode(above.root), until)):
                inside = path.startswith(os.path.join(beside.root, ""))
                listing = beside if inside else above
                name = os.path.relpath(path, listing.root)
                if not any(map(STAY_HIDDEN.fullmatch, name.split("/"))):
                    listing.add(name, os.lstat(path))
    except TimeoutError:
        whole.left_out.append(f"{whole.workdir} (it takes too long to look through)")
        return
    # The run or the snapshot was pruned.
    except (OSError, ValueError):
        pass
    for listing in (beside, above):
        whole.files += [file.replace(place=listing.root) for file in listing.files]


def of_path(path: str, base: str) -> OutputFiles:
    """Return a file, or a directory and everything in it, by names that begin with its own.

    A named link is followed.
    """
    home = os.path.expanduser("~")
    base = os.path.expanduser(base)
    whole = os.path.join(base if os.path.isdir(base) else home, os.path.expanduser(path))
    root, name = os.path.split(os.path.normpath(whole))
    listing = Listing(root, hidden=True)
    try:
        status = os.stat(whole)
        if stat.S_ISDIR(status.st_mode):
            # An unreadable directory is an error, not an empty one.
            os.listdir(whole)
    except OSError as error:
        raise ValueError(f"{whole}: {(error.strerror or str(error)).lower()}") from None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ValueError(f"{whole} is neither a file nor a directory")
    listing.add(name, status)
    return listing.answer()


class Listing:
    """A list of everything below a directory; links are not followed."""

    def __init__(self, root: str, *, hidden: bool, most: int = MOST) -> None:
        self.root, self.hidden, self.most = root, hidden, most
        self.files: list[OutputFile] = []
        self.left_out: list[str] = []
        self.workdir = ""

    def answer(self, *, checkpoints: bool = False) -> OutputFiles:
        more = len(self.left_out) - MOST_LEFT_OUT
        left_out = self.left_out[:MOST_LEFT_OUT] + ([f"and {more} more"] if more > 0 else [])
        return OutputFiles(
            files=tuple(self.files),
            place=self.root,
            workdir=self.workdir,
            checkpoints=checkpoints,
            left_out=tuple(left_out),
        )

    def walk(self, below: str, without: tuple[str, ...]) -> None:
        """Add everything in a directory, in the order of names."""
        try:
            entries = sorted(os.scandir(os.path.join(self.root, below)), key=lambda e: e.name)
        except OSError as error:
            if below:
                self.left_out.append(f"{below} ({error.strerror})")
            return
        for entry in entries:
            hidden = STAY_HIDDEN.fullmatch(entry.name) and not below.startswith(PUBLISHED)
            if entry.name in without or (hidden and not self.hidden) or is_half(entry.name):
                continue
            path = os.path.join(below, entry.name)
            try:
                self.add(path, entry.stat(follow_symlinks=False))
            except OSError as error:
                self.left_out.append(f"{path} ({error.strerror})")

    def add(self, path: str, status: os.stat_result) -> None:
        mode, changed = stat.S_IMODE(status.st_mode), max(0, status.st_mtime_ns)
        if stat.S_ISREG(status.st_mode):
            file = OutputFile(path=path, size=status.st_size, mode=mode, changed=changed)
        elif stat.S_ISDIR(status.st_mode):
            file = OutputFile(path=path, kind="directory", mode=mode)
        elif stat.S_ISLNK(status.st_mode):
            target = os.readlink(os.path.join(self.root, path))
            file = OutputFile(path=path, kind="link", target=target)
        else:
            self.left_out.append(f"{path} (neither a file nor a directory)")
            return
        self.files.append(file)
        if len(self.files) > self.most:
            raise ValueError(f"{self.root} holds more than {self.most} files: name a part of it")
        if file.kind == "directory":
            self.walk(path, ())


def read(request: ReadFile) -> FilePiece:
    """Return a piece of a file; the caller must have checked that it was listed."""
    with files.open_plain(os.path.join(request.place, request.path)) as file:
        if request.changed not in (0, os.fstat(file.fileno()).st_mtime_ns):
            raise ValueError("it changed while it was read: fetch it again")
        size = min(request.size, PIECE_BYTES)
        return FilePiece(data=os.pread(file.fileno(), size, request.offset))
