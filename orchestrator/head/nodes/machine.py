"""Describes a machine of the node list, for `orchestrator nodes` and Cluster.nodes()."""

from __future__ import annotations

from collections import Counter
from typing import Any

from orchestrator.common import text
from orchestrator.common.errors import OrchestratorError
from orchestrator.common.hosts import is_loopback
from orchestrator.head.nodes.facts import Facts, ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.facts import NO_PROBLEMS, Checkup, Gpu
from orchestrator.protocol.message import Message, decode_value, encode_value


class MachineGpu(Message):
    """One GPU: its name and memory in bytes, as far as its driver reports them."""

    vendor: str
    model: str
    memory: int | None = None


class MachineNetwork(Message):
    """An interface that has an address, or a port of an RDMA card; speed in Gb/s."""

    name: str
    # "ethernet", "infiniband", "bond", ...; "InfiniBand" or "Ethernet" for an RDMA port.
    kind: str
    speed: float | None = None
    addresses: tuple[str, ...] = ()
    rdma: bool = False


class Machine(Message):
    """One machine of the node list, sizes in bytes; an unreachable one has only its name."""

    # The name as the node list has it.
    name: str
    reached: bool
    spare: bool = False
    # The site as the node list has it.
    site: str = ""
    # The reason why it could not be reached.
    problem: str = ""
    fix: str = ""
    hostname: str = ""
    user: str = ""
    cpus: int = 0
    memory: int = 0
    memory_available: int = 0
    gpu_count: int = 0
    gpus: tuple[MachineGpu, ...] = ()
    # The version of the GPU driver.
    driver: str = ""
    networks: tuple[MachineNetwork, ...] = ()
    python: str = ""
    python_version: str = ""
    torch: str = ""
    workdir: str = ""
    # Free and total bytes of the disk of the workdir.
    disk_free: int | None = None
    disk_total: int | None = None
    kernel: str = ""
    # Facts that could not be measured, each with the reason.
    unmeasured: dict[str, str] = NO_PROBLEMS


def lost_machine(node: Node, error: OrchestratorError) -> Machine:
    """Return the Machine for a node that could not be reached."""
    return Machine(
        name=node.name,
        reached=False,
        spare=node.spare,
        site=node.site or "",
        problem=error.what,
        fix=error.fix,
    )


def describe_machine(node: ProbedNode, checkup: Checkup | None) -> Machine:
    """Return the Machine for a node: its facts, and its GPUs from the checkup if there is one."""
    facts, disk = node.facts, node.facts.disk
    tool = checkup.gpus if checkup and checkup.gpus else ()
    gpus = [
        MachineGpu(vendor=g.vendor, model=g.model, memory=g.memory) for g in tool or facts.cards
    ]
    drivers = {gpu.driver for gpu in tool if gpu.driver}
    installed = facts.software.nvidia_driver or facts.software.amd_driver
    return Machine(
        name=node.name,
        reached=True,
        spare=node.node.spare,
        site=node.node.site or "",
        hostname=facts.hostname,
        user=facts.user,
        cpus=facts.cpus,
        memory=facts.memory_kb << 10,
        memory_available=facts.memory_available_kb << 10,
        gpu_count=facts.gpus,
        gpus=tuple(gpus),
        driver=", ".join(sorted(drivers)) or (installed if facts.gpus else ""),
        networks=machine_networks(facts),
        python=facts.python,
        python_version=facts.python_version,
        torch=facts.torch or "",
        workdir=facts.workdir,
        disk_free=disk.free if disk else None,
        disk_total=disk.total if disk else None,
        kernel=facts.kernel,
        unmeasured={**facts.problems, **(checkup.problems if checkup else {})},
    )


def machine_networks(facts: Facts) -> tuple[MachineNetwork, ...]:
    """Return the interfaces with a routable address, and the active RDMA ports."""
    by_interface: dict[str, list[str]] = {}
    for address in facts.addresses:
        if not is_loopback(address.address) and not address.ip.is_link_local:
            by_interface.setdefault(address.interface, []).append(address.address)
    sockets = []
    for name, addresses in by_interface.items():
        interface = facts.interface(name)
        sockets.append(
            MachineNetwork(
                name=name,
                kind=interface.kind if interface else "",
                speed=interface.speed / 1000 if interface and interface.speed else None,
                addresses=tuple(addresses),
            )
        )
    cards = [
        MachineNetwork(name=port.name, kind=port.link_layer, speed=port.rate or None, rdma=True)
        for port in facts.rdma
        if port.active and not port.software
    ]
    return (*sockets, *cards)


def machine_to_json(machine: Machine) -> dict[str, Any]:
    data: dict[str, Any] = encode_value(machine, nones=True)
    return data


def machine_from_json(data: dict[str, Any]) -> Machine:
    return decode_value(Machine, data)


# -- as text --------------------------------------------------------------------------------------

# Shown for a fact that could not be measured, in place of "none" or 0.
UNKNOWN = "?"


def gpu_text(machine: Machine) -> str:
    """Return the GPUs of a machine as text: 8 x NVIDIA H100 80GB HBM3, 79.6 GiB each."""
    kinds = Counter((gpu.model, gpu.memory) for gpu in machine.gpus)
    groups = []
    for (model, memory), count in kinds.items():
        each = f", {text.format_bytes(memory, binary=True)} each" if memory else ""
        groups.append(f"{count} x {model}{each}")
    described = "; ".join(groups)
    if machine.gpu_count and machine.gpu_count != len(machine.gpus):
        of = f" of {described}" if described else " GPUs"
        return f"{machine.gpu_count}{of}"
    return described or (UNKNOWN if "gpus" in machine.unmeasured else "none")


def network_text(machine: Machine) -> str:
    """Return the networks of a machine as text: eth0 10 Gb/s, mlx5_0:1 400 Gb/s InfiniBand."""
    parts = []
    for network in machine.networks:
        speed = f" {network.speed:g} Gb/s" if network.speed else ""
        shown = network.rdma or network.kind not in ("ethernet", "virtual", "")
        parts.append(f"{network.name}{speed}{' ' + network.kind if shown else ''}")
    parts += [UNKNOWN] * bool({"interfaces", "rdma"} & machine.unmeasured.keys())
    return ", ".join(parts) or "none"


def disk_text(machine: Machine) -> str:
    if machine.disk_free is None or machine.disk_total is None:
        return UNKNOWN
    return f"{text.format_bytes(machine.disk_free)} of {text.format_bytes(machine.disk_total)}"


# -- users of it -------------------------------------------------------------------------------

# The share of used GPU memory from which a process without a name is reported.
SOME_MEMORY = 0.05
# Two ways to count the same CPU time differ by less than this.
SOME_CORES, SOME_OF_ALL = 0.5, 0.1


def hides_users(gpu: Gpu) -> bool:
    """Return True if a GPU is in use, perhaps by a process that its driver does not name."""
    if gpu.used is None or not gpu.memory:
        return gpu.busy != 0
    return gpu.used > SOME_MEMORY * gpu.memory


def unknown_users(checkup: Checkup) -> str:
    """Return the reason why a machine may have users without a name; "" if it has none."""
    gpus, load = checkup.gpus, checkup.load
    if gpus is None or (gpus and checkup.holders is None):
        return checkup.problems.get("gpus") or "its GPUs do not tell"
    if load is None:
        return checkup.problems.get("load") or "its load is not known"
    if load.unseen > max(SOME_CORES, SOME_OF_ALL * load.cores):
        return "in another container, or hidden"
    return ""
