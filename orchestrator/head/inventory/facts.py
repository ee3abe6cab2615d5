"""The facts that a node's probe reports: one frozen dataclass per thing.

Equal machines give equal values, so two nodes compare with ==, part by part.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from dataclasses import dataclass, field
from typing import Any

from orchestrator.protocol.message import decode, encode
from orchestrator.protocol.messages import Probed

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class Address:
    """One address of one of the node's interfaces."""

    interface: str
    address: str
    prefix: int

    @property
    def ip(self) -> IpAddress:
        return ipaddress.ip_address(self.address)

    @property
    def network(self) -> IpNetwork:
        return ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False)


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    kind: str  # ethernet, infiniband, loopback, bridge, bond, vlan, wireless, virtual
    state: str  # up, down, lowerlayerdown, dormant, ...
    speed: int | None = None  # Mb/s, where it is known
    mtu: int = 1500
    mac: str = ""
    master: str = ""  # the bond or bridge that it is part of
    members: tuple[str, ...] = ()  # what it is made of
    driver: str = ""
    vendor: str = ""  # of its PCI card, 0x15b3
    pci: str = ""
    numa: int | None = None


@dataclass(frozen=True)
class Gid:
    """One address of an RDMA port."""

    index: int
    gid: str
    type: str  # IB/RoCE v1 or RoCE v2
    netdev: str = ""

    @property
    def ip(self) -> IpAddress | None:
        """The IP address that a RoCE GID stands for."""
        try:
            found = ipaddress.IPv6Address(self.gid)
        except ValueError:
            return None
        return found.ipv4_mapped or found

    @property
    def is_routable_v2(self) -> bool:
        """The GIDs that RoCE v2 can use: addresses that somebody gave to the interface."""
        ip = self.ip
        return self.type == "RoCE v2" and ip is not None and not ip.is_link_local


@dataclass(frozen=True)
class RdmaPort:
    """One port of an InfiniBand or RoCE card."""

    device: str
    port: int
    link_layer: str  # InfiniBand, Ethernet; or another that NCCL does not know
    state: str  # ACTIVE, DOWN, INIT, ARMED
    physical: str = ""  # LinkUp, Disabled, Polling, ...
    rate: float = 0.0  # Gb/s
    netdev: str = ""
    gids: tuple[Gid, ...] = ()
    node_type: str = "CA"  # RNIC: iWARP
    software: bool = False  # without a card
    board: str = ""
    firmware: str = ""
    guid: str = ""
    pci: str = ""
    numa: int | None = None

    @property
    def name(self) -> str:
        """As NCCL_IB_HCA wants it."""
        return f"{self.device}:{self.port}"

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Card:
    """One GPU, as far as the files of its driver tell; bytes."""

    vendor: str  # nvidia, amd
    model: str
    uuid: str = ""
    pci: str = ""
    memory: int | None = None
    used: int | None = None


@dataclass(frozen=True)
class Software:
    """The versions that torch was built with, and of the drivers; empty where there is none."""

    cuda: str = ""
    hip: str = ""
    nccl: str = ""  # or RCCL's
    nccl_from: str = ""
    nvidia_driver: str = ""
    amd_driver: str = ""


@dataclass(frozen=True)
class Disk:
    """The file system that holds a path; bytes."""

    path: str
    total: int
    free: int
    inodes: int
    inodes_free: int
    mounted: str
    filesystem: str
    source: str
    writable: bool


@dataclass(frozen=True)
class Limits:
    """(soft, hard) of each; -1 is unlimited."""

    nofile: tuple[int, int]
    memlock: tuple[int, int]
    nproc: tuple[int, int]
    core: tuple[int, int]


@dataclass(frozen=True)
class Leftover:
    """A job of ours that has not ended there."""

    job: str
    node: int
    alive: bool  # its supervisor answers


@dataclass(frozen=True)
class Facts:
    """One machine."""

    hostname: str
    user: str
    python: str
    python_version: str
    torch: str
    cpus: int
    gpus: int
    addresses: tuple[Address, ...]
    routes: dict[str, tuple[str, str]]  # peer -> (interface, own address) towards it
    workdir: str
    workdir_exists: bool
    target_kind: str
    target_name: str
    kernel: str
    memory_kb: int
    library: str  # where the node's program lies there
    omp_num_threads: str | None = None
    port: int | None = None  # the master's: the port reserved for this job, 0 if none was free
    peers_port: int | None = None  # the master's: where the other supervisors will call it
    clock_offset: float = 0.0  # the node's clock minus the head's, seconds
    boot: str = ""  # equal on two names of one machine
    network: int = 0  # its network namespace
    memory_available_kb: int = 0
    software: Software = field(default_factory=Software)
    cards: tuple[Card, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    disk: Disk | None = None  # of the workdir; None where it does not answer
    shm: Disk | None = None
    limits: Limits | None = None
    environment: dict[str, str] = field(default_factory=dict)  # NCCL_* and the like, as they are
    leftovers: tuple[Leftover, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)  # part -> why it is not known
    accelerate: str = ""  # its version, where it was asked for and is there
    accelerate_keys: tuple[str, ...] = ()  # what this version knows in its files

    @staticmethod
    def of(probed: Probed, clock_offset: float) -> Facts:
        data = encode(probed)
        del data["time"], data["target"]
        names = ("interface", "address", "prefix")
        data["addresses"] = [dict(zip(names, part, strict=True)) for part in probed.addresses]
        data.update(target_kind=probed.target.kind, target_name=probed.target.name)
        return decode(Facts, {**data, "clock_offset": clock_offset})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def interface(self, name: str) -> Interface | None:
        return next((one for one in self.interfaces if one.name == name), None)

    def same_machine(self, other: Facts) -> bool:
        """One network stack, reached by two names."""
        return bool(self.boot) and (self.boot, self.network) == (other.boot, other.network)
