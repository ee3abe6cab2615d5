"""What a head asks about files that programs saved: which there are, and that others get them."""

from __future__ import annotations

from typing import Optional

from orchestrator.protocol.message import Count, Few, Message
from orchestrator.protocol.requests.request import Nothing, Request
from orchestrator.protocol.requests.transfer import GivingNode, NamedFile


class SavedFile(Message):
    """A file that a program wrote on a node, a link, a directory, or a copy that was removed."""

    path: str  # below the place
    place: str = ""  # see node/saved/places.py
    kind: str = "file"  # or "link", "directory", "removed"
    size: Count = 0
    changed: Count = 0  # nanoseconds; of a copy those of its origin
    mode: Few = 0o600
    target: str = ""  # of a link, inside the place
    by: str = ""  # the name of the node that it is a copy of, untouched since it came
    sound: bool = True  # it does not lack its end
    sum: str = ""  # of its begin, middle and end
    attempt: Few = 0  # that this node wrote it in


class Saved(Message):
    """All that a program wrote in the directories of its job."""

    files: tuple[SavedFile, ...]
    roots: dict[str, str]  # place -> the directory that it is here
    whole: bool = True  # these are all
    shared: bool = False  # it runs on the disk of the head's experiment
    kept: bool = False  # a state is in memory, or in a checkpoint of ours


class AskSaved(Request[Saved], do="saved"):
    """Ask what the program wrote on this node since its job began."""

    job: str
    node: int
    given: tuple[str, ...] = ()  # directories of the node's own that the program writes


class TakeSaved(Request[Nothing], do="take_saved"):
    """Begin to take what another node's ranks saved, and to remove older copies of such files.

    All of it comes, or nothing. What this node's ranks wrote stays as it is, unless it is older:
    then it is kept under a hidden name.
    """

    job: str
    node: int
    given: tuple[str, ...]
    place: str
    by: str  # the name of the node whose ranks wrote it
    files: tuple[NamedFile, ...]
    links: dict[str, str]  # path -> target
    directories: dict[str, Count]  # path -> its time, in nanoseconds
    gone: tuple[str, ...]  # copies whose origins are no more
    older: tuple[str, ...]  # files of an attempt before the one that wrote these
    giver: Optional[GivingNode] = None
    seconds: float
