"""Names what a head asks about a machine: facts, an examination, ports and links, the hook."""

from __future__ import annotations

from typing import Optional

from orchestrator.protocol.facts import (
    Address,
    Card,
    Checkup,
    Disk,
    Interface,
    Leftover,
    Limits,
    RdmaPort,
    Software,
)
from orchestrator.protocol.message import Count, Few, Message, Moment, NoAddress, Port
from orchestrator.protocol.requests.request import Request


class ProbeTarget(Message):
    """A program; the answer's kind is "missing", "unreadable" and so on where it cannot run."""

    kind: str
    name: str


class PortWish(Message):
    """A port that the server shall hold for the job's ranks to meet at."""

    wanted: int
    exact: bool  # or any free one from there on
    peers: bool = False  # listen for the other nodes' supervisors, too


class Probed(Message):
    """One machine, as far as the kernel and the file system tell."""

    hostname: str
    boot: str  # equal on two names of one machine
    network: int  # its network namespace
    user: str
    python: str
    python_version: str
    torch: str
    software: Software
    cpus: Count
    gpus: Few  # each may become a rank
    addresses: tuple[Address, ...]
    routes: dict[str, tuple[str, NoAddress]]  # peer -> (interface, own address) towards it
    workdir: str
    workdir_exists: bool
    target: ProbeTarget
    limits: Limits
    kernel: str
    memory_kb: Count
    memory_available_kb: Count
    omp_num_threads: Optional[str]
    environment: dict[str, str]  # NCCL_* and the like, as they are
    problems: dict[str, str]  # part -> why it is not known
    disk: Optional[Disk]  # of the workdir; None where it does not answer
    shm: Optional[Disk]
    leftovers: tuple[Leftover, ...]
    cards: tuple[Card, ...]
    interfaces: tuple[Interface, ...]
    rdma: tuple[RdmaPort, ...]
    time: Moment
    library: str = ""  # where our program is on the node
    home: Optional[Disk] = None  # of what we keep there: code, logs, checkpoints of nodes
    accelerate: str = ""  # its version, where it was asked for and is there
    port: Optional[Port] = None  # the master's: reserved for this job, 0 if none was free
    peers_port: Optional[Port] = None  # the master's: where the other supervisors will call
    marker_seen: bool = False  # the head's directory is on a disk that both share
    torch_elsewhere: tuple[str, ...] = ()  # Pythons that have torch, where this one has none
    runs: str = ""  # names the directory for jobs: of this user, on this machine


class Probe(Request[Probed], do="probe"):
    """Say what this machine is. Quick: every launch asks."""

    cwd: str
    workdir: Optional[str]
    peers: tuple[str, ...]  # addresses: by which interface does it reach them?
    target: ProbeTarget
    accelerate: bool = False
    port: Optional[PortWish] = None
    marker: str = ""  # a file that the head has just written: is its directory here, too?


class CheckedUp(Message):
    """The results of an Examine."""

    checkup: Checkup
    time: Moment


class Examine(Request[CheckedUp], do="examine"):
    """Look closer, with commands, for the doctor: it takes seconds."""

    workdir: str
    script: str = ""
    # gpus, xids, code, torch, names: all of these where none is named; and load
    parts: tuple[str, ...] = ()


class Listening(Message):
    """The ports that are open now; 0 for one that is taken."""

    ports: tuple[int, ...]


class Listen(Request[Listening], do="listen"):
    """Answer every caller at these ports with a word."""

    ports: tuple[int, ...]  # 0: any
    word: str
    seconds: Optional[float] = None  # or as long as the program lives


LARGE_LOST = "small packets arrive, large ones do not"  # why a Dial fails where it is the MTU


class Dialed(Message):
    """For each address why it could not be reached, or nothing."""

    answers: tuple[str, ...]


class Dial(Request[Dialed], do="dial"):
    """Call other nodes: does each answer with its own word?"""

    places: tuple[tuple[str, int, str], ...]  # address, port, word
    seconds: float
