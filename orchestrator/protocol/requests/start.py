"""Names what a head asks to start a node's part of a job, the first time and again."""

from __future__ import annotations

from typing import Optional

from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.claims import NO_ENTRIES, ClaimEntry, Taken, Wish
from orchestrator.protocol.requests.machine import PortWish
from orchestrator.protocol.requests.request import Nothing, Request
from orchestrator.protocol.spec import Placement, Spec


class Hooked(Message):
    """The changes that the hook made to the environment."""

    env: dict[str, str]
    unset: tuple[str, ...]


class Hook(Request[Hooked], do="hook"):
    """Run the user's shell file for this node."""

    text: str
    env: dict[str, str]
    workdir: str


class WarmStart(Message):
    """Tell whether a start took a warm process, or why not where one was expected."""

    warm: bool
    why: str = ""


class StartedHere(Message):
    """The supervisor runs."""

    supervisor: int  # its PID
    shared: bool  # the experiment's directory is the head's own
    run: str  # the run directory
    warm: WarmStart = WarmStart(warm=False)


class Start(Request[StartedHere], do="start"):
    """Start this node's part of an attempt, or with `later` only keep it, as a spare does.

    Without `spec` the node takes what it has of the attempt that it began with (`place.attempt`
    says which); it declines (NO_PART) where that is gone, and has to be sent all again.
    """

    spec: Optional[Spec] = None
    place: Optional[Placement] = None  # in this attempt, where that of the spec is another
    later: bool = False


class TakenPorts(Message):
    """The port where the ranks will meet, 0 if none is free, and that of the supervisors."""

    port: int
    peers_port: int


class TakePorts(Request[TakenPorts], do="take_ports"):
    """Take the ports of a job's next attempt, on its first node."""

    port: PortWish


class Release(Request[Nothing], do="release"):
    """Remove what the attempts of a job share on this node: it is not started again."""

    job: str  # of any of its attempts
    node: int


# -- claims ---------------------------------------------------------------------------------------


class Claimed(Message):
    """The GPUs or slots that are held for a launch, or by whom those it lacks are taken."""

    held: bool = False  # all of it
    words: str = ""  # what is held, for people: GPU 0, 1, 2, 3 of 8
    taken: tuple[Taken, ...] = ()  # where too few are free
    lacking: str = ""  # why the wish can never be met here
    unsure: str = ""  # why it is not known who else computes on the GPUs
    machine: str = ""  # the machine's place in an order that is the same for all heads


class Claim(Request[Claimed], do="claim"):
    """Hold what a launch wishes, all of it or nothing, until its job ends or this visit does."""

    wish: Optional[Wish] = None
    part: Optional[tuple[str, int]] = None  # of a job that is started again: it has its wish here
    patience: float = 0.0  # seconds to wait for those who are about to start, or to give up


class Unclaim(Request[Nothing], do="unclaim"):
    """Let go of what is held for a launch that is not yet a job."""


class Wait(Request[Nothing], do="wait"):
    """Stand in the queue here, from now on until the job starts or this visit ends."""

    entry: ClaimEntry


class Page(Message):
    """All that is claimed on a machine, and who waits there, by its book."""

    entries: tuple[ClaimEntry, ...]
    free: int = 0  # of the GPUs or slots that the wish is for,
    total: int = 0  # of so many,
    wants: int = 0  # of which it wants these


class ReadBook(Request[Page], do="read_book"):
    """Read who holds what and who waits; with `before` only once it is another than that."""

    wish: Wish = Wish()
    before: tuple[ClaimEntry, ...] = NO_ENTRIES
    seconds: float = 0.0  # to wait for a change, at most
    programs: bool = False  # a GPU on which a program computes that is no job's is not free
