"""One machine, part by part, as its node reports it. Equal machines give equal values."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Optional, Union

from orchestrator.protocol.message import Count, IpAddress, Message, NodeTime

if TYPE_CHECKING:
    # A node does not need this import.
    import ipaddress

    AnyAddress = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
    IpNetwork = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]


class Address(Message, kw_only=False):
    """One address of one of the node's interfaces."""

    interface: str
    address: IpAddress
    prefix: Count

    @property
    def ip(self) -> AnyAddress:
        import ipaddress

        return ipaddress.ip_address(self.address)

    @property
    def network(self) -> IpNetwork:
        return network_of(self.address, self.prefix)


@functools.cache
def network_of(address: str, prefix: int) -> IpNetwork:
    """Return the network of an address; cached, as a plan asks for those of all nodes often."""
    import ipaddress

    longest = ipaddress.ip_address(address).max_prefixlen
    return ipaddress.ip_network(f"{address}/{min(prefix, longest)}", strict=False)


class Interface(Message, kw_only=False):
    """One network interface."""

    name: str
    # One of ethernet, infiniband, loopback, bridge, bond, vlan, wireless, virtual.
    kind: str
    # One of up, down, lowerlayerdown, dormant and so on.
    state: str
    # In Mb/s, if it is known.
    speed: Optional[int] = None
    mtu: int = 1500
    # The interfaces that it consists of.
    members: tuple[str, ...] = ()
    # The vendor of its PCI card, such as 0x15b3.
    vendor: str = ""


class Gid(Message, kw_only=False):
    """One address of an RDMA port."""

    index: int
    gid: str
    # Either IB/RoCE v1 or RoCE v2.
    type: str
    netdev: str = ""

    @property
    def ip(self) -> Optional[AnyAddress]:
        """Return the IP address of a RoCE GID, or None."""
        import ipaddress

        try:
            address = ipaddress.IPv6Address(self.gid)
        except ValueError:
            return None
        return address.ipv4_mapped or address

    @property
    def is_routable_v2(self) -> bool:
        """Return True for a GID that RoCE v2 can use: an address configured on the interface."""
        ip = self.ip
        return self.type == "RoCE v2" and ip is not None and not ip.is_link_local


class RdmaPort(Message, kw_only=False):
    """One port of an InfiniBand or RoCE card."""

    device: str
    port: int
    # InfiniBand, Ethernet, or another that NCCL does not know.
    link_layer: str
    # One of ACTIVE, DOWN, INIT, ARMED.
    state: str
    rate: float = 0.0  # Gb/s
    netdev: str = ""
    gids: tuple[Gid, ...] = ()
    # RNIC means iWARP.
    node_type: str = "CA"
    # True for a software driver without a card.
    software: bool = False

    @property
    def name(self) -> str:
        """Return the name in the form of NCCL_IB_HCA."""
        return f"{self.device}:{self.port}"

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


class Card(Message, kw_only=False):
    """One GPU, as described by the files of its driver; sizes in bytes."""

    # nvidia or amd.
    vendor: str
    model: str
    uuid: str = ""
    pci: str = ""
    memory: Optional[int] = None
    used: Optional[int] = None


class Software(Message, kw_only=False):
    """The versions of the drivers and of torch's libraries; empty if there is none."""

    cuda: str = ""
    hip: str = ""
    # The version of NCCL, or of RCCL.
    nccl: str = ""
    nvidia_driver: str = ""
    amd_driver: str = ""


class Disk(Message, kw_only=False):
    """The file system that holds a path; sizes in bytes."""

    path: str
    total: int
    free: int
    inodes: int
    inodes_free: int
    mounted: str
    writable: bool


class Limits(Message, kw_only=False):
    """The (soft, hard) limits of a login; -1 is unlimited."""

    nofile: tuple[int, int]
    memlock: tuple[int, int]


class Leftover(Message, kw_only=False):
    """A job of this user that has not ended on the machine."""

    job: str
    # True if its supervisor answers.
    alive: bool


# -- a closer look, with commands -------------------------------------------------------------

NO_PROBLEMS: dict[str, str] = {}


class Gpu(Card):
    """One GPU, as its own tool reports it. None if the value is not available."""

    index: Optional[int]
    busy: Optional[int] = None  # percent
    temperature: Optional[int] = None
    driver: str = ""
    # Uncorrected errors since the driver started.
    ecc_errors: Optional[int] = None
    # True if memory is retired at the next reset.
    pages_pending: Optional[bool] = None
    rows_pending: Optional[bool] = None
    # True if memory could not be replaced, so the card must be.
    rows_failed: Optional[bool] = None
    pcie_width: Optional[int] = None
    pcie_width_most: Optional[int] = None
    # The error of a faulty GPU.
    problem: str = ""


class Holder(Message, kw_only=False):
    """A process that computes on a GPU."""

    pid: int
    # The uuid of the GPU, or empty if the tool does not report it.
    gpu: str
    name: str
    used: Optional[int] = None
    user: str = ""
    # The job of this program that it belongs to, or empty.
    job: str = ""
    since: Optional[NodeTime] = None  # Unix time


class User(Message, kw_only=False):
    """The present use of a machine by one user, or by one job."""

    user: str
    # The job of this program, or empty.
    job: str
    cores: float
    memory: int  # bytes
    processes: int
    # The name of the busiest process.
    name: str
    pid: int
    # The Unix time at which this process, or the first of the job, began.
    since: NodeTime


class Load(Message, kw_only=False):
    """The users of a machine's processors; users with almost no load are left out."""

    # The cores in use.
    cores: float
    # The users, the busiest first.
    users: tuple[User, ...]
    # The number of processors that this login may use.
    cpus: int = 0
    memory: int = 0  # bytes
    available: int = 0
    swapped: int = 0
    # The bytes so far, over all networks except loopback.
    received: int = 0
    sent: int = 0
    # The time of these counts; only differences are meaningful.
    at: float = 0.0
    # The cores used by processes that this login cannot see.
    unseen: float = 0.0
    # The size of the file system of the jobs' directories.
    disk: int = 0
    disk_free: int = 0


# The kernel's log line of a driver's message: where, which, and text. Matched only at the start of
# a message, after the prefix of /dev/kmsg, dmesg or the journal: any user can put such text into a
# later part of a line, as in `segfault in PROGRAM`.
XID = re.compile(
    r"(?:\d+,\d+,\d+,[^;\n]*;|(?:\[[^]\n]*\] ?){1,2}|\S+ +\d+ [\d:]+ \S+ kernel: )?"
    r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)(?:, *)?(.*)"
)
# Fatal: memory, NVLink, lost from the bus, GSP. The others only concern the machine's owner.
FATAL_XIDS = {48, 74, 79, 94, 95, 119, 120}
WORN_XIDS = {63, 64, 92}


class Xid(Message, kw_only=False):
    """An error that NVIDIA's driver reported since the machine was started."""

    pci: str
    xid: int
    words: str
    count: int

    @property
    def fatal(self) -> bool:
        """Return True if it ends programs that use the GPU, and the GPU is the cause."""
        return self.xid in FATAL_XIDS

    @property
    def sick(self) -> bool:
        return self.fatal or self.xid in WORN_XIDS

    def __str__(self) -> str:
        words = re.sub(r"^(pid=[^,]*, )?(name=[^,]*, )?", "", self.words).rstrip(" .")
        return f"Xid {self.xid} at {self.pci}: {words}"


class Torch(Message, kw_only=False):
    """The outcome of importing torch on a node."""

    python: str
    cuda: str = ""
    hip: str = ""
    nccl: str = ""
    # What torch.cuda.is_available() returns.
    available: bool = False
    error: str = ""


class Checkup(Message, kw_only=False):
    """The results of an Examine. Parts not requested are None, failed ones are in `problems`."""

    gpus: Optional[tuple[Gpu, ...]] = None
    holders: Optional[tuple[Holder, ...]] = None
    xids: Optional[tuple[Xid, ...]] = None
    # The SHA-256 of the program.
    script: Optional[str] = None
    torch: Optional[Torch] = None
    # The addresses that its own name resolves to there.
    names: Optional[tuple[IpAddress, ...]] = None
    load: Optional[Load] = None
    # The reason why a part is unknown, by part.
    problems: dict[str, str] = NO_PROBLEMS
