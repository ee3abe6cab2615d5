"""A head's requests to start a node's part of a job, the first time and again."""

from __future__ import annotations

from typing import Optional

from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.claims import ClaimEntry, DeviceRequest, Taken
from orchestrator.protocol.requests.machine import PortRequest
from orchestrator.protocol.requests.request import Nothing, Part, PartRequest, Request
from orchestrator.protocol.spec import Placement, Spec


class Hooked(Message):
    """The hook's changes of the environment."""

    env: dict[str, str]
    unset: tuple[str, ...]


class Hook(Request[Hooked], do="hook"):
    """Run the user's shell file for this node."""

    text: str
    env: dict[str, str]
    workdir: str


class StartedHere(Message):
    """The answer once the supervisor has started torchrun."""

    supervisor: int  # its PID
    # True if the experiment's directory is the head's own, on a disk that both share.
    shared: bool
    # True for a start from a standby; else the reason why none was used, if it was asked for.
    warm: bool = False
    why_cold: str = ""


class Start(Request[StartedHere], do="start"):
    """Start this node's part of an attempt, or with `later` only store it, as for a spare.

    The first has a `spec`, which the node stores. A later one has a `place`, and the node uses
    what it has stored; if that is lost, it refuses (NO_PART).
    """

    spec: Optional[Spec] = None
    place: Optional[Placement] = None
    later: bool = False


class TakenPorts(Message):
    """The port of the ranks' rendezvous, 0 if none is free, and the port of the supervisors."""

    port: int
    peers_port: int


class TakePorts(Request[TakenPorts], do="take_ports"):
    """Reserve the ports of a job's next attempt, on its first node."""

    port: PortRequest


class Release(PartRequest[Nothing], do="release"):
    """Remove the files that a job's attempts share on this node, as it is not restarted."""


# -- claims ---------------------------------------------------------------------------------------


class Claimed(Message):
    """The GPUs or slots reserved for a launch, or the holders of those that it lacks."""

    # True if everything requested is reserved.
    held: bool = False
    # The reserved devices for people, such as GPU 0, 1, 2, 3 of 8.
    words: str = ""
    # The holders of devices, if too few are free.
    taken: tuple[Taken, ...] = ()
    # The reason why the request can never be met here.
    lacking: str = ""
    # The reason why other programs on the GPUs are unknown.
    unsure: str = ""
    # A name of the machine, by which all heads order machines alike.
    machine: str = ""


class Claim(Request[Claimed], do="claim"):
    """Reserve the requested devices, all or none, until the job or this session ends."""

    devices: Optional[DeviceRequest] = None
    # The part of a job that is restarted, whose stored spec has the request.
    part: Optional[Part] = None
    # Seconds to wait for launches that are about to start, or to give up.
    patience: float = 0.0


class Unclaim(Request[Nothing], do="unclaim"):
    """Release the devices of a launch that is not yet a job."""


class Wait(Request[Nothing], do="wait"):
    """Enter the queue, until the job starts or this session ends."""

    entry: ClaimEntry


class LockTableState(Message):
    """All entries of a machine's lock table, held and waiting."""

    entries: tuple[ClaimEntry, ...]
    # The number of free GPUs or slots that fit the request.
    free: int = 0
    # The number of all that fit the request.
    total: int = 0
    # The number that the request wants.
    wants: int = 0


class ReadLockTable(Request[LockTableState], do="read_lock_table"):
    """Read the lock table."""

    devices: DeviceRequest = DeviceRequest()
