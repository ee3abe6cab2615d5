"""One machine, part by part, as its node reports it. Equal machines give equal values."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Optional, Union

from orchestrator.protocol.message import Count, IpAddress, Message

if TYPE_CHECKING:
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
        import ipaddress  # not needed on the node

        return ipaddress.ip_address(self.address)

    @property
    def network(self) -> IpNetwork:
        return network_of(self.address, self.prefix)


@functools.cache
def network_of(address: str, prefix: int) -> IpNetwork:
    """Return the network of an address; a plan asks for those of all nodes again and again."""
    import ipaddress

    longest = ipaddress.ip_address(address).max_prefixlen
    return ipaddress.ip_network(f"{address}/{min(prefix, longest)}", strict=False)


class Interface(Message, kw_only=False):
    """One network interface."""

    name: str
    kind: str  # ethernet, infiniband, loopback, bridge, bond, vlan, wireless, virtual
    state: str  # up, down, lowerlayerdown, dormant, ...
    speed: Optional[int] = None  # Mb/s, where it is known
    mtu: int = 1500
    master: str = ""  # the bond or bridge that it is part of
    members: tuple[str, ...] = ()  # what it is made of
    driver: str = ""
    vendor: str = ""  # of its PCI card, 0x15b3
    pci: str = ""


class Gid(Message, kw_only=False):
    """One address of an RDMA port."""

    index: int
    gid: str
    type: str  # IB/RoCE v1 or RoCE v2
    netdev: str = ""

    @property
    def ip(self) -> Optional[AnyAddress]:
        """The IP address that a RoCE GID stands for."""
        import ipaddress

        try:
            address = ipaddress.IPv6Address(self.gid)
        except ValueError:
            return None
        return address.ipv4_mapped or address

    @property
    def is_routable_v2(self) -> bool:
        """The GIDs that RoCE v2 can use: addresses that somebody gave to the interface."""
        ip = self.ip
        return self.type == "RoCE v2" and ip is not None and not ip.is_link_local


class RdmaPort(Message, kw_only=False):
    """One port of an InfiniBand or RoCE card."""

    device: str
    port: int
    link_layer: str  # InfiniBand, Ethernet; or another that NCCL does not know
    state: str  # ACTIVE, DOWN, INIT, ARMED
    rate: float = 0.0  # Gb/s
    netdev: str = ""
    gids: tuple[Gid, ...] = ()
    node_type: str = "CA"  # RNIC: iWARP
    software: bool = False  # without a card
    pci: str = ""

    @property
    def name(self) -> str:
        """As NCCL_IB_HCA wants it."""
        return f"{self.device}:{self.port}"

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


class Card(Message, kw_only=False):
    """One GPU, as far as the files of its driver tell; bytes."""

    vendor: str  # nvidia, amd
    model: str
    uuid: str = ""
    pci: str = ""
    memory: Optional[int] = None
    used: Optional[int] = None


class Software(Message, kw_only=False):
    """The versions that torch was built with, and of the drivers; empty where there is none."""

    cuda: str = ""
    hip: str = ""
    nccl: str = ""  # or RCCL's
    nvidia_driver: str = ""
    amd_driver: str = ""


class Disk(Message, kw_only=False):
    """The file system that holds a path; bytes."""

    path: str
    total: int
    free: int
    inodes: int
    inodes_free: int
    mounted: str
    writable: bool


class Limits(Message, kw_only=False):
    """(soft, hard) of each; -1 is unlimited."""

    nofile: tuple[int, int]
    memlock: tuple[int, int]
    nproc: tuple[int, int]
    core: tuple[int, int]


class Leftover(Message, kw_only=False):
    """A job of ours that has not ended there."""

    job: str
    node: int
    alive: bool  # its supervisor answers


# -- a closer look, with commands -------------------------------------------------------------

NO_PROBLEMS: dict[str, str] = {}


class Gpu(Message, kw_only=False):
    """One GPU, as its own tool tells; bytes. None: this model or driver does not say."""

    vendor: str  # nvidia, amd
    index: Optional[int]
    model: str
    uuid: str = ""
    pci: str = ""
    memory: Optional[int] = None
    used: Optional[int] = None
    busy: Optional[int] = None  # percent
    temperature: Optional[int] = None
    driver: str = ""
    ecc_errors: Optional[int] = None  # uncorrected, since the driver started
    pages_pending: Optional[bool] = None  # memory that is retired at the next reset
    rows_pending: Optional[bool] = None
    rows_failed: Optional[bool] = None  # memory that could not be replaced: change the card
    pcie_width: Optional[int] = None
    pcie_width_most: Optional[int] = None
    problem: str = ""  # of a GPU that is sick


class Holder(Message, kw_only=False):
    """A process that computes on a GPU."""

    pid: int
    gpu: str  # its uuid, "" where the tool does not say
    name: str
    used: Optional[int] = None
    user: str = ""
    job: str = ""  # of ours
    since: Optional[float] = None  # Unix time


class User(Message, kw_only=False):
    """The use that one user, or one job of ours, makes of a machine now."""

    user: str
    job: str  # of ours
    cores: float
    memory: int  # bytes
    processes: int
    name: str  # of the busiest of them
    pid: int
    since: float  # when that began, or the first of the job; Unix time


class Load(Message, kw_only=False):
    """Who uses the processors of a machine; who uses next to nothing is not named."""

    cores: float  # in use
    users: tuple[User, ...]  # the busiest first
    cpus: int = 0  # that this login may use
    memory: int = 0  # bytes
    available: int = 0
    swapped: int = 0
    received: int = 0  # bytes so far, over all networks but loopback
    sent: int = 0
    at: float = 0.0  # when that was counted; only differences mean something
    unseen: float = 0.0  # of the cores in use: by processes that this login cannot see
    disk: int = 0  # of the file system where jobs have their directories
    disk_free: int = 0


# How the kernel logs what the driver reports: where, which, and words. Only at the beginning of a
# message, behind what /dev/kmsg, dmesg or the journal puts before it: with `segfault in PROGRAM`
# any user has the kernel log such words.
XID = re.compile(
    r"(?:\d+,\d+,\d+,[^;\n]*;|(?:\[[^]\n]*\] ?){1,2}|\S+ +\d+ [\d:]+ \S+ kernel: )?"
    r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)(?:, *)?(.*)"
)
# Memory, NVLink, lost from the bus, GSP; those of the second kind are for its owner to know.
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
        """Tell whether it ends programs that use the GPU, and the GPU is to blame."""
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
    torch: str = ""
    cuda: str = ""
    hip: str = ""
    nccl: str = ""
    available: bool = False  # torch.cuda.is_available()
    gpus: int = 0
    error: str = ""


class Checkup(Message, kw_only=False):
    """The results of an Examine: parts not asked for are None, failed ones are in `problems`."""

    gpus: Optional[tuple[Gpu, ...]] = None
    holders: Optional[tuple[Holder, ...]] = None
    xids: Optional[tuple[Xid, ...]] = None
    script: Optional[str] = None  # sha256
    torch: Optional[Torch] = None
    names: Optional[tuple[IpAddress, ...]] = None  # what its own name resolves to there
    load: Optional[Load] = None
    problems: dict[str, str] = NO_PROBLEMS  # part -> why it is not known
