"""What a head asks to move files: to a node, from it, and from node to node."""

from __future__ import annotations

from typing import Optional

from orchestrator.protocol.facts import Disk
from orchestrator.protocol.message import Count, Few, IpAddress, Message, Moment, Port
from orchestrator.protocol.requests.machine import ProbeTarget
from orchestrator.protocol.requests.request import Nothing, Request

# -- code -------------------------------------------------------------------------------------


class CheckedOut(Message):
    """A snapshot that is ready: what is there, as the node reads it."""

    workdir: str
    tree: str  # the digest of what is there
    differ: tuple[str, ...]  # paths that are not as they were sent
    own: tuple[str, ...]  # the node's own names that are linked into the snapshot
    target: ProbeTarget
    disk: Optional[Disk] = None


class CheckOut(Request[CheckedOut], do="check_out"):
    """Make a snapshot of a tree for a job; refused as LACKING where contents have to come first."""

    tree: str  # its digest
    snapshot: str  # its name, new on this machine; a number comes behind it
    title: str  # the last part of the directory's path
    beside: str  # the head's directory: what the node has there of its own is linked
    target: ProbeTarget
    outputs: tuple[str, ...] = ()  # directories there that the program writes: made and linked


class Lacking(Message):
    """The files whose contents the node does not have: first and last position in the list."""

    ranges: tuple[tuple[Count, Count], ...]


class OfferTree(Request[Lacking], do="offer_tree"):
    """Take the list of a tree, compressed in the pieces before this, and say what is lacking."""

    tree: str


class Contents(Request[Nothing], do="contents"):
    """Take contents that are lacking, one after the other, compressed in the pieces before."""

    tree: str
    size: Count  # unpacked


class Compared(Message):
    """Files that the node sees otherwise than the head: path -> SHA-256, or why there is none."""

    differ: dict[str, str]


class Compare(Request[Compared], do="compare"):
    """Look whether a shared directory is here as the head sees it: pieces hold sizes and times."""

    directory: str


# -- files ------------------------------------------------------------------------------------


class Parcel(Request[Nothing], do="parcel"):
    """Append the pieces that came before to a file for the job's ranks."""

    job: str
    node: int
    name: str


class OutputFile(Message):
    """A file, a directory or a link on a node."""

    path: str  # below the place that was listed
    size: Count = 0
    kind: str = "file"  # or "directory", "link"
    mode: Few = 0o600
    changed: Moment = 0.0
    target: str = ""  # of a link
    place: str = ""  # where that is not the one that was listed


class OutputFiles(Message):
    """The files of a node that may be fetched."""

    files: tuple[OutputFile, ...]
    place: str
    checkpoints: bool = False  # there are some; they stay unless they are asked for
    left_out: tuple[str, ...] = ()  # what is neither of these, or cannot be read


class Outputs(Request[OutputFiles], do="outputs"):
    """List what the ranks wrote, where the node does not share the head's disk."""

    job: str
    node: int
    checkpoints: bool = False
    # Look so many seconds for what they wrote beside the code that was sent.
    beside: float = 0.0


class Files(Request[OutputFiles], do="files"):
    """List any file or directory of the node."""

    path: str  # absolute, below ~, or below the directory
    directory: str  # or the home directory, where it is not there


class Checkpoints(Request[OutputFiles], do="checkpoints"):
    """List the files of checkpoints that this node has, whole ones and parts."""

    experiment: str = ""  # what its jobs left in their run directories,
    directory: str = ""  # or what is in a directory of the user's


class Room(Message):
    """A directory of the node."""

    directory: str


class MakeRoom(Request[Room], do="make_room"):
    """Name the directory for checkpoints that a job is to find as its own; it goes with the job."""

    job: str
    node: int


class OutputPiece(Message):
    """Bytes of a file; none at its end."""

    data: bytes


class Output(Request[OutputPiece], do="output"):
    """Send a piece of one of the listed files."""

    place: str
    path: str
    offset: int


class OutputSum(Message):
    """The SHA-256 of some bytes, and how many there were."""

    sum: str
    size: Count


class SumOutput(Request[OutputSum], do="sum_output"):
    """Hash a part of one of the listed files."""

    place: str
    path: str
    offset: Count
    size: Count


class WantedFile(Message):
    """A file of an offer that is not here as it was offered."""

    number: Count  # its place in the offer
    have: Count  # bytes that are here, of it or of another,
    sum: str  # and their SHA-256
    whole: bool  # under its own name: another time or content, and the same size


class WantedFiles(Message):
    """The files of an offer that are to be sent, and those that cannot be taken."""

    wanted: tuple[WantedFile, ...]
    failed: dict[int, str]  # place in the offer -> why


class OfferFiles(Request[WantedFiles], do="offer_files"):
    """Compare a directory with an offer: the piece before, five fields for each file."""

    directory: str
    dry_run: bool = False  # make nothing


class WriteFile(Request[Nothing], do="write_file"):
    """Write the piece before into a file of the offer; the last names the whole file's SHA-256."""

    number: Count
    offset: Count
    sum: str = ""
    here: bool = False  # all of it is here already, and gets its time and mode


class Giving(Message):
    """The port where other nodes may call; 0 where this node may not listen."""

    port: Port


class GiveTree(Request[Giving], do="give_tree"):
    """Give a tree to nodes that have the token: its list and contents, also those still to come."""

    tree: str  # its digest
    token: str
    seconds: float


class NamedFile(Message):
    """A file that is to be the same on another node."""

    path: str  # below the directory
    size: Count
    sum: str  # SHA-256
    mode: Count = 0o600
    changed: Optional[int] = None  # nanoseconds; without it the time is that of its coming


class GiveFiles(Request[Giving], do="give_files"):
    """Give these files of a directory to nodes that have the token."""

    directory: str
    files: tuple[str, ...]  # paths below it
    token: str
    seconds: float
    coming: tuple[NamedFile, ...] = ()  # and these, each once it is here with its size and time


class EndGiving(Request[Nothing], do="end_giving"):
    """Give nothing more to other nodes."""


class GivingNode(Message):
    """A node that gives: all of its addresses where it may answer, the likeliest first."""

    addresses: tuple[IpAddress, ...]
    port: Port
    token: str


class TakeTree(Request[Nothing], do="take_tree"):
    """Begin to take what is lacking of a tree from another node."""

    tree: str  # its digest
    size: Count  # of its list, unpacked
    giver: GivingNode
    seconds: float


class TakeFiles(Request[Nothing], do="take_files"):
    """Begin to take files into a directory from another node; those that are there stay."""

    directory: str
    files: tuple[NamedFile, ...]
    giver: GivingNode
    seconds: float
    label: str = (
        ""  # of what the head sends in the same way: the user's own files, not private ones
    )


class Taken(Message):
    """Tell how far the transfer is; a problem ends it."""

    size: Count  # bytes that have come
    over: bool
    problem: str = ""
    files: Count = 0  # that were lacking, where that is known


class AskTaken(Request[Taken], do="ask_taken"):
    """Ask how far the transfer is; the answer comes at its end, or a moment later."""


class EndTaking(Request[Nothing], do="end_taking"):
    """Give up what is being taken."""
