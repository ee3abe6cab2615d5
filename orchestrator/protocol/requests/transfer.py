"""The requests that move files from the head to a node, and back.

The sender describes its files in a manifest (protocol/manifest.py); the receiver returns those
that it lacks. From then on a file is identified by its number in that manifest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, Optional

from orchestrator.protocol.facts import Disk
from orchestrator.protocol.message import Count, Few, Message, Nonsense
from orchestrator.protocol.requests.request import PartRequest, Request
from orchestrator.protocol.spec import Target

# The limit of unpacked contents in one request.
LARGEST_BATCH_BYTES = 1 << 24
# The limit of a file's bytes in one answer.
PIECE_BYTES = 1 << 19

# -- where ------------------------------------------------------------------------------------

# Contents by their digest, from which snapshots are made (CheckOut).
STORE = "store"
# A directory of the user, where different files are overwritten.
DIRECTORY = "directory"
# Private files for the ranks of a job, removed with the job.
HANDED = "handed"
# A directory of a job, which receives the files that the job's master wrote there.
OF_JOB = "of_job"


class RemoteDir(Message):
    """A receiver for files on a node; its kind decides how they are written."""

    kind: str = DIRECTORY
    # A path, absolute or below ~; or the name of a directory of the job.
    directory: str = ""
    job: str = ""
    part: Count = 0
    # The config's sync.outputs.
    outputs: tuple[str, ...] = ()


# -- from the head to a node ------------------------------------------------------------------


class Lacking(Message):
    """The files of a manifest that are missing or different on the node."""

    # The reason of each failure, by number.
    failed: dict[int, str]
    # The number of each in the manifest, ascending.
    numbers: tuple[Count, ...] = ()


class Offer(Request[Lacking], do="offer"):
    """Compare the node's files with the manifest in the payload, and return those lacking.

    Directories and links are created at once.
    """

    into: RemoteDir
    # True creates nothing.
    dry_run: bool = False


class Contents(Request[Lacking], do="contents"):
    """Write parts of the files that were offered last, packed in the payload.

    The answer has those that could not be written so far.
    """

    # Bytes of the unpacked data.
    size: Count


PART = struct.Struct(">IQI")


class FilePart(NamedTuple):
    """The header of some bytes of one file, which follow it in `Contents`."""

    number: int
    offset: int
    size: int

    def packed(self) -> bytes:
        return PART.pack(*self)


def parts_of_request(data: bytes) -> Iterator[tuple[FilePart, memoryview]]:
    """Yield the parts of one request; raise Nonsense if one is incomplete."""
    view, at = memoryview(data), 0
    while at < len(view):
        if len(view) - at < PART.size:
            raise Nonsense("half of a part")
        part = FilePart(*PART.unpack_from(view, at))
        at += PART.size
        if len(view) - at < part.size:
            raise Nonsense(f"a part of {part.size} bytes that is cut off")
        yield part, view[at : at + part.size]
        at += part.size


# -- code -------------------------------------------------------------------------------------


class CheckedOut(Message):
    """A snapshot that is complete."""

    workdir: str
    # The node's own names that are linked into the snapshot, with a remark.
    own: tuple[str, ...]
    target: Target
    # Directories from which the node's Python imports installed packages of the copy.
    installed: tuple[str, ...] = ()
    # Packages installed from the copy that the snapshot cannot provide.
    strange: tuple[str, ...] = ()
    disk: Optional[Disk] = None


class CheckOut(Request[CheckedOut], do="check_out"):
    """Create a snapshot for a job from a tree whose contents are all in the store."""

    # The digest of the tree.
    tree: str
    # A name that is new on this machine; a number is appended.
    snapshot: str
    # The last parts of the directory's path: see tree_title.
    title: str
    # The head's directory, where the node may have files of its own.
    beside: str
    target: Target
    # Directories there that the program writes, which are created and linked.
    outputs: tuple[str, ...] = ()
    # Names there that are linked if they exist.
    inputs: tuple[str, ...] = ()


# -- files ------------------------------------------------------------------------------------


class OutputFile(Message):
    """A file, a directory or a link on a node."""

    # The path below the listed directory.
    path: str
    size: Count = 0
    # One of file, directory, link.
    kind: str = "file"
    mode: Few = 0o600
    changed: Count = 0  # nanoseconds
    # The target of a link; of a file, the node's own file to which it was a link.
    target: str = ""
    # The directory, if it is not the listed one.
    place: str = ""


class OutputFiles(Message):
    """The files of a node that may be fetched."""

    files: tuple[OutputFile, ...]
    place: str
    # True if there are checkpoints, which stay unless requested.
    checkpoints: bool = False
    # The program's workdir, if files in its snapshot are listed.
    workdir: str = ""
    # Special files, and those that cannot be read.
    left_out: tuple[str, ...] = ()


class Outputs(PartRequest[OutputFiles], do="outputs"):
    """List the files of the ranks, if the node does not share the head's disk."""

    # True for what this node's ranks wrote alone, without files from the master.
    own: bool = False
    checkpoints: bool = False
    # The longest search for files beside the code that was sent, in seconds.
    beside: float = 0.0


class ListPath(Request[OutputFiles], do="files"):
    """List any file or directory of the node."""

    # The path, absolute, below ~, or below the directory.
    path: str
    # The base directory; the home if it does not exist.
    directory: str


class FilePiece(Message):
    """Bytes of a file; empty at its end."""

    data: bytes


class ReadFile(Request[FilePiece], do="read_file"):
    """Send a part of one of the listed files, unless it has changed since then."""

    place: str
    path: str
    offset: Count
    size: Count = PIECE_BYTES
    # The expected time in nanoseconds; 0 for any.
    changed: Count = 0


# -- what the master of a job wrote ---------------------------------------------------------------


class JobFiles(Message):
    """The files that ranks wrote in their job's directories on this node since it began."""

    # Each with the name of its directory; see node/transfer/job_files.
    files: tuple[OutputFile, ...]
    # The path of each directory here, by name.
    roots: dict[str, str]
    # False if the list is incomplete.
    whole: bool = True


class AskJobFiles(PartRequest[JobFiles], do="job_files"):
    """List the ranks' files for the next attempt; refused with NO_PART if the part is lost."""

    # The config's sync.outputs.
    outputs: tuple[str, ...] = ()
