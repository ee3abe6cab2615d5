"""A head's requests about a machine: facts, an examination, ports and connections."""

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
from orchestrator.protocol.message import Count, Few, Message, NoAddress, Port
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.spec import Target


class PortRequest(Message):
    """A port that the server shall reserve for the rendezvous of the job's ranks."""

    wanted: int
    # False accepts any free port from `wanted` on.
    exact: bool
    # True if a port for the other nodes' supervisors is needed as well.
    peers: bool = False


class Probed(Message):
    """The facts of one machine from the kernel and the file system."""

    hostname: str
    # The boot id, which is equal for two names of one machine.
    boot: str
    # The inode of its network namespace.
    network: int
    user: str
    python: str
    python_version: str
    torch: str
    software: Software
    cpus: Count
    # The number of GPUs, each of which may become a rank.
    gpus: Few
    addresses: tuple[Address, ...]
    # The interface and the own address towards the first peer, and empty ones for each peer that no
    # route leads to: with all of them, 64 nodes would send 4,096.
    routes: dict[str, tuple[str, NoAddress]]
    workdir: str
    workdir_exists: bool
    target: Target
    limits: Limits
    kernel: str
    memory_kb: Count
    memory_available_kb: Count
    omp_num_threads: Optional[str]
    # Variables such as NCCL_* that are set on the machine.
    environment: dict[str, str]
    # The reason why a part is unknown, by part.
    problems: dict[str, str]
    # The disk of the workdir; None if it does not answer.
    disk: Optional[Disk]
    shm: Optional[Disk]
    leftovers: tuple[Leftover, ...]
    cards: tuple[Card, ...]
    interfaces: tuple[Interface, ...]
    rdma: tuple[RdmaPort, ...]
    # The directory of this program on the node.
    library: str = ""
    # The disk of this program's home: code, logs, checkpoints of nodes.
    home: Optional[Disk] = None
    # The version of accelerate, if requested and installed.
    accelerate: str = ""
    # The port reserved on the master for this job, 0 if none was free.
    port: Optional[Port] = None
    # The port on the master to which the other supervisors connect.
    peers_port: Optional[Port] = None
    # True if it sees the directory of the launch, which may differ from that of experiments: see
    # StartedHere.shared.
    sees_directory: bool = False
    # Other Pythons with torch, if this one has none.
    torch_elsewhere: tuple[str, ...] = ()
    # The identifier of this user's directory for jobs on this machine.
    runs: str = ""


class Probe(Request[Probed], do="probe"):
    """Return the facts of this machine. Quick, as every launch sends it."""

    cwd: str
    workdir: Optional[str]
    # Addresses for which a route is looked up, the master's first.
    peers: tuple[str, ...]
    target: Target
    accelerate: bool = False
    port: Optional[PortRequest] = None
    # A new file of the head, which the node sees if they share its disk.
    marker: str = ""


class Examine(Request[Checkup], do="examine"):
    """Examine the machine with commands, for the doctor. Takes seconds."""

    workdir: str
    script: str = ""
    # Of gpus, xids, code, torch, names: all of these if empty. `load` must be named.
    parts: tuple[str, ...] = ()


class Listening(Message):
    """The ports that are open now; 0 for a port in use."""

    ports: tuple[int, ...]


class Listen(Request[Listening], do="listen"):
    """Listen on these ports and send every caller a word."""

    # The value 0 selects any free port.
    ports: tuple[int, ...]
    word: str
    # The duration; None listens until the server exits.
    seconds: Optional[float] = None


# The error of a Dial if the MTU is the cause.
LARGE_LOST = "small packets arrive, large ones do not"


class Dialed(Message):
    """The reason why each address could not be reached, empty for a success."""

    answers: tuple[str, ...]


class Dial(Request[Dialed], do="dial"):
    """Connect to other nodes, and check that each sends its own word."""

    # The address, the port and the expected word.
    places: tuple[tuple[str, int, str], ...]
    seconds: float
