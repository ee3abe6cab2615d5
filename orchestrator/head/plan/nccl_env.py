"""Compute each node's address and network settings with their reasons from facts. Pure.

A configuration that cannot work raises an error here, instead of a timeout on the nodes: no common
network, or one address for two machines. nccl_transport.py chooses the cards, this module the
addresses and interfaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.common.errors import CheckFailed, did_you_mean
from orchestrator.common.hosts import is_loopback
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan import addresses as node_addresses
from orchestrator.head.plan import nccl_transport
from orchestrator.head.plan.model import EnvSetting, NodeAddress, NodePlan
from orchestrator.head.plan.nccl_transport import Fabric

if TYPE_CHECKING:
    pass

# These variables hold full names of interfaces, while NCCL's holds prefixes.
WHOLE_NAMES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# From this speed in Mb/s on one TCP connection, which carries 10 to 20 Gb/s, is not enough.
FAST = 25_000
VERY_FAST = 100_000
# NCCL itself chooses the number of threads for the cards of these vendors.
CLOUDS = {"0x1d0f": "AWS", "0x1ae0": "Google"}
DEBUG = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
}


@dataclass(frozen=True)
class Network:
    """The network between the nodes of a job."""

    fabric: Fabric
    addresses: tuple[NodeAddress, ...]
    # The computed settings of each node.
    settings: tuple[tuple[EnvSetting, ...], ...]
    # Lines shown at every launch.
    notes: tuple[str, ...]
    # Lines shown by `plan --explain`.
    hints: tuple[str, ...]


def make_network(
    nodes: Sequence[ProbedNode],
    profile: str = "auto",
    theirs: frozenset[str] = frozenset(),
    hinted: frozenset[str] = frozenset(),
    *,
    master: str | None = None,
    first: int = 0,
) -> Network:
    """Return the network of a job's nodes, or of nodes from `first` on with a known `master`.

    `theirs` are variables that the user sets on all nodes, `hinted` those that the hook mentions.
    """
    check_names(nodes)
    addresses = (
        node_addresses.find_addresses(nodes)
        if master is None
        else [node_addresses.address_of(node, node, master) for node in nodes]
    )
    chosen = nccl_transport.choose_fabric(nodes, profile, theirs, hinted)
    settings = [
        node_settings(node, address, chosen, index, profile, is_master=first + index == 0)
        for index, (node, address) in enumerate(zip(nodes, addresses, strict=True))
    ]
    return Network(
        fabric=chosen,
        addresses=tuple(addresses),
        settings=tuple(settings),
        notes=chosen.notes,
        hints=chosen.hints,
    )


def check_names(nodes: Sequence[ProbedNode]) -> None:
    """Raise for an ifname= whose interface does not exist, is down or has no address."""
    for node in nodes:
        known = [interface.name for interface in node.facts.interfaces]
        for name in node.ifname.split(",") if node.ifname and known else ():
            interface = node.facts.interface(name)
            if interface is None:
                raise CheckFailed(
                    f"{node.name} has no interface {name!r} (ifname= in the node list); it has "
                    f"{', '.join(known)}{did_you_mean(name, known)}"
                )
            addresses = [a for a in node.facts.addresses if a.interface == name]
            if interface.state != "up" or not addresses:
                reason = "has no address" if interface.state == "up" else f"is {interface.state}"
                raise CheckFailed(
                    f"the interface {name} of {node.name} (ifname= in the node list) {reason}",
                    "name another one, or leave ifname= out to use the one towards the master",
                )


# -- one node -------------------------------------------------------------------------------------


def node_settings(
    node: ProbedNode,
    address: NodeAddress,
    chosen: Fabric,
    index: int,
    profile: str,
    *,
    is_master: bool,
) -> tuple[EnvSetting, ...]:
    settings = [*socket_settings(node, address, is_master=is_master), *chosen.settings[index]]
    if chosen.kind == "ethernet" and not is_loopback(address.address):
        settings += thread_settings(node, node.ifname or address.interface)
    if profile == "debug":
        settings += [
            EnvSetting(name, value, "nccl.profile is debug") for name, value in DEBUG.items()
        ]
    return tuple(kept_setting(setting, node.facts.environment) for setting in settings)


def kept_setting(setting: EnvSetting, environment: Mapping[str, str]) -> EnvSetting:
    """Return the setting, or the node's own value (from its login or nccl.conf), which wins."""
    value = environment.get(setting.name)
    if value is None or value == setting.value:
        return setting
    reason = f"set on the node itself; computed: {setting.value}"
    return EnvSetting(setting.name, value, reason, yours=True)


def socket_settings(node: ProbedNode, address: NodeAddress, *, is_master: bool) -> list[EnvSetting]:
    """Return the settings for NCCL's and gloo's interface: ifname=, or the one to the master."""
    interface = node.ifname or address.interface
    if not interface:
        return []
    leads = "the master's address is on it" if is_master else "it leads to the master"
    why = "ifname= in the node list" if node.ifname else leads
    yours = bool(node.ifname)
    settings = [
        # NCCL matches prefixes unless the name begins with "=": eth1 would also mean eth10.
        EnvSetting("NCCL_SOCKET_IFNAME", f"={interface}", why, yours),
        EnvSetting("GLOO_SOCKET_IFNAME", interface, why, yours),
    ]
    if ":" in address.address and not is_loopback(address.address):
        reason = "the master's address is IPv6; NCCL takes an interface's first address"
        settings.append(EnvSetting("NCCL_SOCKET_FAMILY", "AF_INET6", reason))
    return settings


def thread_settings(node: ProbedNode, name: str) -> list[EnvSetting]:
    """Return the settings for several TCP connections if one cannot fill the link."""
    interface = node.facts.interface(name)
    if interface is None or interface.speed is None or interface.speed < FAST:
        return []
    if vendor_of(node, name) in CLOUDS:
        return []
    # NCCL's documentation advises 4 threads with 4 sockets each for 100 Gb/s.
    count = "4" if interface.speed >= VERY_FAST else "2"
    reason = f"TCP at {interface.speed / 1000:g} Gb/s: one connection carries only 10 to 20"
    return [
        EnvSetting("NCCL_SOCKET_NTHREADS", count, reason),
        EnvSetting("NCCL_NSOCKS_PERTHREAD", count, reason),
    ]


def vendor_of(node: ProbedNode, name: str, depth: int = 0) -> str:
    """Return the vendor of an interface's card, also below a bond, bridge or VLAN."""
    interface = node.facts.interface(name)
    if interface is None or depth > 3:
        return ""
    below = (vendor_of(node, member, depth + 1) for member in interface.members)
    return interface.vendor or next((name_below for name_below in below if name_below), "")


def is_unmatched(variable: str, value: str, node: ProbedNode) -> bool:
    """Return True if the variable names interfaces and the node lacks one that it needs."""
    # Gloo uses every interface that is named.
    if variable in WHOLE_NAMES:
        names = {address.interface for address in node.facts.addresses}
        return any(word not in names for word in value.split(",") if word)
    return variable == "NCCL_SOCKET_IFNAME" and matches_no_interface(value, node)


def matches_no_interface(patterns: str, node: ProbedNode) -> bool:
    """Return True if NCCL_SOCKET_IFNAME matches no interface of the node: NCCL then fails."""
    names = {address.interface for address in node.facts.addresses}
    reverse = patterns.startswith("^")
    patterns = patterns.removeprefix("^")
    exact = patterns.startswith("=")
    wanted = [word for word in patterns.removeprefix("=").split(",") if word]

    def fits(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in wanted)

    return not any(fits(name) != reverse for name in names)


# -- what the user sets ---------------------------------------------------------------------------

# A launch sets these variables for each rank; the values say how to choose them.
OF_THE_LAUNCH = {
    "MASTER_ADDR": "the first node of the list is the master",
    "MASTER_PORT": "--master-port chooses it",
    "WORLD_SIZE": "--nproc and --nnodes choose it",
    "RANK": "the order of the node list numbers the nodes",
    "LOCAL_RANK": "--nproc N starts N ranks per node",
    "NODE_RANK": "the order of the node list numbers the nodes",
}


def setting_warnings(nodes: Iterable[tuple[ProbedNode, NodePlan]]) -> list[str]:
    """Return warnings on settings of the user that match nothing on a node or have no effect."""
    found: dict[str, None] = {}
    for machine, node in nodes:
        for setting in node.settings:
            if setting.yours and node.env.get(setting.name) == setting.value:
                found.update(dict.fromkeys(problems_there(setting, machine)))
            if setting.yours:
                found.update(dict.fromkeys(problems_anywhere(setting)))
    return [f"WARNING: {problem}" for problem in found]


def problems_there(setting: EnvSetting, machine: ProbedNode) -> Iterator[str]:
    name, value = setting.name, setting.value
    shown = f"{name}={value} ({setting.why})"
    if is_unmatched(name, value, machine):
        has = ", ".join(sorted({item.interface for item in machine.facts.addresses}))
        yield f"{shown} fits no interface of {machine.name}: {has}"
    elif name in ("NCCL_IB_HCA", "UCX_NET_DEVICES") and not fits_a_device(name, value, machine):
        cards = ", ".join(sorted({port.device for port in machine.facts.rdma}))
        has = cards or "it has no InfiniBand or RoCE"
        yield f"{shown} fits no device of {machine.name}: {has}"


def fits_a_device(name: str, value: str, machine: ProbedNode) -> bool:
    """Return True if NCCL or UCX finds at least one of the listed cards on the node."""
    cards = {port.device for port in machine.facts.rdma}
    words = [word.partition(":")[0] for word in value.lstrip("^=").split(",") if word]
    if name == "UCX_NET_DEVICES":
        cards |= {interface.name for interface in machine.facts.interfaces}
        cards |= {address.interface for address in machine.facts.addresses}
        return "all" in words or any(word in cards for word in words)
    exact = "=" in value[:2]
    if value.startswith("^") or not words:
        return True
    return any(card == word if exact else card.startswith(word) for card in cards for word in words)


def problems_anywhere(setting: EnvSetting) -> Iterator[str]:
    name = setting.name
    if name in OF_THE_LAUNCH:
        yield f"{name} ({setting.why}) does not reach the ranks: {OF_THE_LAUNCH[name]}"
