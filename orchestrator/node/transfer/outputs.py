"""Lists and reads files for the head: those that a job's ranks wrote here, or any directory."""

from __future__ import annotations

import os
import re
import stat
import time

from orchestrator.common import files
from orchestrator.node.job.run_directory import PartDir
from orchestrator.node.transfer.listing import Listing
from orchestrator.protocol.requests.transfer import (
    PIECE_BYTES,
    FilePiece,
    OutputFiles,
    Outputs,
    ReadFile,
)

# Hidden files below it are results, such as torch's .metadata.
PUBLISHED = "checkpoints/step_"
# Hidden names that are no results: those of caches, environments, tools, and this program.
STAY_HIDDEN = re.compile(
    r"\.(cache|git|hg|svn|venv|env|tox|nox|\w+_cache|ipynb_checkpoints|locks?|triton|nv|config|local"
    r"|DS_Store|nfs\w+|.*\.(swp|tmp|lock|part|partial|before)|step_.*|orchestrator.*)",
    re.DOTALL,
)


def outputs_of_job(part: PartDir, request: Outputs) -> OutputFiles:
    """Return the files that the ranks wrote; checkpoints stay on the node unless requested.

    A job on a shared disk has none here (see node/start).
    """
    root = os.path.join(part.experiment, "outputs")
    listing = Listing(
        root,
        lambda path, entry: (
            (path == "checkpoints" and not request.checkpoints)
            or bool(STAY_HIDDEN.fullmatch(entry.name) and not path.startswith(PUBLISHED))
        ),
    )
    listing.walk()
    if request.beside:
        add_outputs_beside_code(listing, part, time.monotonic() + request.beside)
    if request.own:
        # Only the end of a job needs this import.
        from orchestrator.node.transfer import job_files

        listing.files = job_files.own_results(part, listing.files, root)
    kept = os.path.join(root, "checkpoints")
    return listing.answer(checkpoints=os.path.isdir(kept) and bool(os.listdir(kept)))


def add_outputs_beside_code(whole: Listing, part: PartDir, until: float) -> None:
    """Add files that the ranks wrote into their snapshot, if they ran in one.

    A file above the snapshot's tree has a path below the snapshot, which no file of the tree has.
    """
    from orchestrator.node.transfer import snapshot
    from orchestrator.node.transfer.store import Store

    try:
        whole.workdir = part.read_spec().workdir
        above = snapshot.snapshot_of(Store(), whole.workdir)
        found = snapshot.written_since_start(above, until, inputs=True) if above else []
    except TimeoutError:
        whole.left_out.append(f"{whole.workdir} (it takes too long to look through)")
        return
    # The run or the snapshot was pruned.
    except (OSError, ValueError):
        return
    for file in found:
        path = os.path.join(os.fsdecode(above), file.path)
        place = whole.workdir if path.startswith(f"{whole.workdir}/") else os.fsdecode(above)
        name = os.path.relpath(path, place)
        if not any(map(STAY_HIDDEN.fullmatch, name.split("/"))):
            whole.files.append(file.replace(path=name, place=place))


def files_of_path(path: str, base: str) -> OutputFiles:
    """Return a file, or a directory and everything in it, by names that begin with its own.

    A named link is followed.
    """
    base, home, path = map(os.path.expanduser, (base, "~", path))
    whole = os.path.join(base if os.path.isdir(base) else home, path)
    root, name = os.path.split(os.path.normpath(whole))
    listing = Listing(root)
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


def read_piece(request: ReadFile) -> FilePiece:
    """Return a piece of a file; the caller must have checked that it was listed."""
    # A listed file may be a link to one of the node's own.
    with files.open_plain(os.path.realpath(os.path.join(request.place, request.path))) as file:
        if request.changed not in (0, os.fstat(file.fileno()).st_mtime_ns):
            raise ValueError("it changed while it was read: fetch it again")
        data = os.pread(file.fileno(), min(request.size, PIECE_BYTES), request.offset)
    return FilePiece(data=data)
