"""The results of a node's probe, as the plan wants them. Equal machines give equal parts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from orchestrator.protocol.facts import (
    Address,
    Card,
    Disk,
    Interface,
    Leftover,
    Limits,
    RdmaPort,
    Software,
)
from orchestrator.protocol.message import encode
from orchestrator.protocol.messages import Probed


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
    library: str  # where our program is on the node
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
        own = {field.name for field in dataclasses.fields(Facts)}
        same: dict[str, Any] = {name: part for name, part in vars(probed).items() if name in own}
        kind, name = probed.target.kind, probed.target.name
        return Facts(**same, target_kind=kind, target_name=name, clock_offset=clock_offset)

    def to_json(self) -> dict[str, Any]:
        fields = (field.name for field in dataclasses.fields(self))
        return {name: encode(getattr(self, name), nones=True) for name in fields}

    def interface(self, name: str) -> Interface | None:
        return next((interface for interface in self.interfaces if interface.name == name), None)

    def same_machine(self, other: Facts) -> bool:
        """One network stack, reached by two names."""
        return bool(self.boot) and (self.boot, self.network) == (other.boot, other.network)
