"""What a node's probe found, as the plan wants it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Address:
    """One address of one of the node's interfaces."""

    interface: str
    address: str
    prefix: int


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
    omp_num_threads: str | None
    library: str  # where the node's program lies there
    port: int | None = None  # the master's: the port reserved for this job, 0 if none was free
    peers_port: int | None = None  # the master's: where the other supervisors will call it
    clock_offset: float = 0.0  # the node's clock minus the head's, seconds

    @staticmethod
    def of(probe: dict[str, Any], clock_offset: float) -> Facts:
        data = dict(probe)
        target = data.pop("target")
        data.pop("time")
        data["addresses"] = tuple(Address(*address) for address in data["addresses"])
        data["routes"] = {peer: tuple(route) for peer, route in data["routes"].items()}
        return Facts(
            **data,
            target_kind=target["kind"],
            target_name=target["name"],
            clock_offset=clock_offset,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
