"""Machines for the pure parts of the head: of a few words, complete as a probe makes them."""

from typing import Any

from orchestrator.head.nodes.facts import Facts
from orchestrator.protocol.facts import Address, Gid, Interface, Limits, RdmaPort, Software
from orchestrator.protocol.spec import Target

LOOPBACK = ("lo 127.0.0.1/8", "lo ::1/128")


def facts(*addresses: str, **fields: Any) -> Facts:
    """facts("eth0 10.0.0.1/24", port=29500): a machine with loopback and these addresses."""
    found = []
    for words in (*LOOPBACK, *addresses):
        interface, _, address = words.partition(" ")
        found.append(Address(interface, address.split("/")[0], int(address.split("/")[1])))
    machine = Facts(
        hostname="host",
        user="bob",
        python="/usr/bin/python3",
        python_version="3.11.7",
        torch="2.9.1+cu128",
        cpus=8,
        gpus=0,
        addresses=tuple(found),
        routes={},
        workdir="/job",
        workdir_exists=True,
        target=Target(kind="script", name="train.py"),
        kernel="6.1.0",
        memory_kb=1 << 20,
        memory_available_kb=0,
        omp_num_threads=None,
        library="/home/bob/.orchestrator/lib/0123",
        boot="",
        network=0,
        software=Software(),
        limits=Limits((-1, -1), (-1, -1)),
        environment={},
        problems={},
        disk=None,
        shm=None,
        leftovers=(),
        cards=(),
        interfaces=(),
        rdma=(),
    )
    return machine.replace(**fields)


def interface(
    name: str, kind: str = "ethernet", speed: int | None = None, **fields: Any
) -> Interface:
    """interface("eth0", speed=25000): one that is up."""
    return Interface(name, kind, "up", speed).replace(**fields)


def software(nccl: str = "2.27.5") -> Software:
    return Software(cuda="12.8", nccl=nccl, nvidia_driver="570.86")


SUBNET = "fe80:0000:0000:0000"


def infiniband(device: str, rate: float = 400.0, **fields: Any) -> RdmaPort:
    """An active InfiniBand port; subnet="..." is the first half of its GID."""
    subnet = fields.pop("subnet", SUBNET)
    gid = Gid(0, f"{subnet}:b8ce:f603:0012:3456", "IB/RoCE v1")
    port = RdmaPort(device, 1, "InfiniBand", "ACTIVE", rate, gids=(gid,))
    return port.replace(**fields)


def roce(
    device: str, netdev: str, address: str = "", rate: float = 100.0, index: int = 3, **fields: Any
) -> RdmaPort:
    """An active RoCE port, with the table that mlx5 makes: v1 before v2, link-local before IP."""
    local = "fe80:0000:0000:0000:0ac0:ebff:fe12:3456"
    gids = [Gid(0, local, "IB/RoCE v1", netdev), Gid(1, local, "RoCE v2", netdev)]
    if address:
        mapped = address
        if ":" not in address:
            a, b, c, d = map(int, address.split("."))
            mapped = f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
        gids += [
            Gid(index - 1, mapped, "IB/RoCE v1", netdev),
            Gid(index, mapped, "RoCE v2", netdev),
        ]
    port = RdmaPort(device, 1, "Ethernet", "ACTIVE", rate, netdev, tuple(gids))
    return port.replace(**fields)
