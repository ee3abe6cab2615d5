"""The requests that move files: from the head to a node, and home.

The sender describes its files in a manifest (protocol/manifest.py); the receiver answers which of
them it lacks. From then on a file is its number in that manifest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, Optional

from orchestrator.protocol.facts import Disk
from orchestrator.protocol.message import Count, Few, Message, Nonsense
from orchestrator.protocol.requests.machine import ProbeTarget
from orchestrator.protocol.requests.request import Request

LARGEST_BATCH_BYTES = 1 << 24  # of contents in one request, unpacked
PIECE_BYTES = 1 << 19  # of a file in one answer

# -- where ------------------------------------------------------------------------------------

STORE = "store"  # contents by their digest: a snapshot is made of them (CheckOut)
DIRECTORY = "directory"  # the user's own: what differs is overwritten
HANDED = "handed"  # what the ranks of a job are handed when it starts: private, gone with the job
OF_JOB = "of_job"  # a directory of a job, which gets what the job's master wrote there


class RemoteDir(Message):
    """A place for files on a node; its kind says by which policy they come to be there."""

    kind: str = DIRECTORY
    directory: str = ""  # absolute, or below ~; or the name that a directory of the job has
    job: str = ""
    node: Count = 0
    outputs: tuple[str, ...] = ()  # sync.outputs
    shared: bool = False  # the master's directory lies on the disk of the head's experiment


# -- from the head to a node ------------------------------------------------------------------


LATE = "a disk that it shares does not show it yet"  # of a file in Lacking


class Lacking(Message):
    """The files of a manifest that are not here as they were described."""

    ranges: tuple[tuple[Count, Count], ...]  # first and last number
    failed: dict[int, str]  # number -> why it cannot be here


class Offer(Request[Lacking], do="offer"):
    """Compare what is here with the manifest, packed in the pieces before, and say what is lacking.

    Directories and links are made at once.
    """

    into: RemoteDir
    dry_run: bool = False  # make nothing


class FailedWrites(Message):
    """The files of an offer that could not be written so far."""

    failed: dict[int, str]  # number -> why


class Contents(Request[FailedWrites], do="contents"):
    """Write parts of the files that were offered last, packed in the pieces before."""

    size: Count  # unpacked
    last: bool = False  # answer when all of it is on the disk


PART = struct.Struct(">IQI")


class FilePart(NamedTuple):
    """The head of some bytes of one file, which follow it in `Contents`."""

    number: int
    offset: int
    size: int

    def packed(self) -> bytes:
        return PART.pack(*self)


def parts_of(data: bytes) -> Iterator[tuple[FilePart, memoryview]]:
    """Yield the parts of one request."""
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
    """A snapshot that is ready."""

    workdir: str
    own: tuple[str, ...]  # the node's own names that are linked into the snapshot
    target: ProbeTarget
    installed: tuple[str, ...] = ()  # directories that its Python has installed from its own copy
    strange: tuple[str, ...] = ()  # installs from there that the snapshot cannot answer for
    disk: Optional[Disk] = None


class CheckOut(Request[CheckedOut], do="check_out"):
    """Make a snapshot of a tree of which all contents are here, for a job."""

    tree: str  # its digest
    snapshot: str  # its name, new on this machine; a number comes behind it
    title: str  # the last parts of the directory's path: see tree_title
    beside: str  # the head's directory, where the node may have files of its own
    target: ProbeTarget
    outputs: tuple[str, ...] = ()  # directories there that the program writes: made and linked
    inputs: tuple[str, ...] = ()  # names there that are linked, if they are there


# -- files ------------------------------------------------------------------------------------


class OutputFile(Message):
    """A file, a directory or a link on a node."""

    path: str  # below the place that was listed
    size: Count = 0
    kind: str = "file"  # or "directory", "link"
    mode: Few = 0o600
    changed: Count = 0  # nanoseconds
    target: str = ""  # of a link
    place: str = ""  # where that is not the one that was listed


class OutputFiles(Message):
    """The files of a node that may be fetched."""

    files: tuple[OutputFile, ...]
    place: str
    checkpoints: bool = False  # there are some; they stay unless they are asked for
    workdir: str = ""  # of the program, where files are listed that lie in its snapshot
    left_out: tuple[str, ...] = ()  # what is neither of these, or cannot be read
    own_disk: bool = False  # the job's outputs here are this node's own


class Outputs(Request[OutputFiles], do="outputs"):
    """List what the ranks wrote, where the node does not share the head's disk."""

    job: str
    node: int
    checkpoints: bool = False
    # Look so many seconds for what they wrote beside the code that was sent.
    beside: float = 0.0


class ListPath(Request[OutputFiles], do="files"):
    """List any file or directory of the node."""

    path: str  # absolute, below ~, or below the directory
    directory: str  # or the home directory, where it is not there


class FilePiece(Message):
    """Bytes of a file; none at its end."""

    data: bytes


class ReadFile(Request[FilePiece], do="read_file"):
    """Send a piece of one of the listed files, unless it has changed since it was listed."""

    place: str
    path: str
    offset: Count
    size: Count = PIECE_BYTES
    changed: Count = 0  # nanoseconds; 0: it may have changed


# -- what the master of a job wrote ---------------------------------------------------------------


class JobFiles(Message):
    """The files that ranks wrote on this node below their job's directories since it began."""

    files: tuple[OutputFile, ...]  # by the names of their directories; see node/transfer/job_files
    roots: dict[str, str]  # name -> the directory that it is here, as files are listed
    shared: tuple[str, ...] = ()  # names of those on the disk of the head's experiment
    whole: bool = True  # these are all


class AskJobFiles(Request[JobFiles], do="job_files"):
    """List what ranks wrote here, for the next attempt; refused as NO_PART where it is lost."""

    job: str
    node: int
    outputs: tuple[str, ...] = ()  # sync.outputs
