"""Turn facts into each node's address and network settings, each with its reason. Pure.

What cannot work (no common network, one address for two machines) is an error here, with its
reason, instead of a timeout on the nodes. nccl_transport.py chooses the cards, this file the
addresses and interfaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.common.errors import CheckFailed, nearest
from orchestrator.head.nodes.facts import ProbedNode, is_loopback
from orchestrator.head.plan import addresses as node_addresses
from orchestrator.head.plan import nccl_transport
from orchestrator.head.plan.model import EnvSetting, NodeAddress, NodePlan
from orchestrator.head.plan.nccl_transport import Fabric

if TYPE_CHECKING:
    pass

WHOLE_NAMES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")  # hold no beginnings of names
FAST = 25_000  # Mb/s from which one TCP connection, which carries 10 to 20 Gb/s, is not enough
VERY_FAST = 100_000
CLOUDS = {"0x1d0f": "AWS", "0x1ae0": "Google"}  # for whose cards NCCL chooses threads itself
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
    settings: tuple[tuple[EnvSetting, ...], ...]  # per node, what is computed
    notes: tuple[str, ...]  # shown on every launch
    hints: tuple[str, ...]  # shown by `plan --explain`


def make(
    nodes: Sequence[ProbedNode],
    profile: str = "auto",
    theirs: frozenset[str] = frozenset(),
    hinted: frozenset[str] = frozenset(),
    *,
    master: str | None = None,
    first: int = 0,
) -> Network:
    """Choose how the nodes talk: all of a job, or from node `first` on, with the `master` known.

    `theirs` are variables that the user sets on all nodes, `hinted` those that the hook names.
    """
    check_names(nodes)
    addresses = (
        node_addresses.find(nodes)
        if master is None
        else [node_addresses.address_of(node, node, master) for node in nodes]
    )
    chosen = nccl_transport.choose(nodes, profile, theirs, hinted)
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
    """Refuse an ifname= whose interface does not exist, is down or has no address."""
    for node in nodes:
        known = [interface.name for interface in node.facts.interfaces]
        for name in node.ifname.split(",") if node.ifname and known else ():
            interface = node.facts.interface(name)
            if interface is None:
                raise CheckFailed(
                    f"{node.name} has no interface {name!r} (ifname= in the node list); it has "
                    f"{', '.join(known)}{nearest(name, known)}"
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
    return tuple(kept(setting, node.facts.environment) for setting in settings)


def kept(setting: EnvSetting, environment: Mapping[str, str]) -> EnvSetting:
    """Keep what the node itself sets (its login, its nccl.conf): it was meant for that node."""
    value = environment.get(setting.name)
    if value is None or value == setting.value:
        return setting
    reason = f"set on the node itself; computed: {setting.value}"
    return EnvSetting(setting.name, value, reason, yours=True)


def socket_settings(node: ProbedNode, address: NodeAddress, *, is_master: bool) -> list[EnvSetting]:
    """Set the interface for NCCL's and gloo's sockets: the user's, or the one to the master."""
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
    """Use several connections at once where one cannot fill the link."""
    interface = node.facts.interface(name)
    if interface is None or interface.speed is None or interface.speed < FAST:
        return []
    if vendor(node, name) in CLOUDS:
        return []
    count = "4" if interface.speed >= VERY_FAST else "2"  # 4 x 4: NCCL's own advice for 100 Gb/s
    reason = f"TCP at {interface.speed / 1000:g} Gb/s: one connection carries only 10 to 20"
    return [
        EnvSetting("NCCL_SOCKET_NTHREADS", count, reason),
        EnvSetting("NCCL_NSOCKS_PERTHREAD", count, reason),
    ]


def vendor(node: ProbedNode, name: str, depth: int = 0) -> str:
    """Return the vendor of a card, also of the one below a bond, bridge or VLAN."""
    interface = node.facts.interface(name)
    if interface is None or depth > 3:
        return ""
    below = (vendor(node, member, depth + 1) for member in interface.members)
    return interface.vendor or next((name_below for name_below in below if name_below), "")


def is_unmatched(variable: str, value: str, node: ProbedNode) -> bool:
    """Return whether this variable names interfaces, and one that it needs is not there."""
    if variable in WHOLE_NAMES:  # gloo uses each of them
        names = {address.interface for address in node.facts.addresses}
        return any(word not in names for word in value.split(",") if word)
    return variable == "NCCL_SOCKET_IFNAME" and unmatched(value, node)


def unmatched(patterns: str, node: ProbedNode) -> bool:
    """Return whether NCCL_SOCKET_IFNAME fits no interface here: NCCL then gives up."""
    names = {address.interface for address in node.facts.addresses}
    reverse = patterns.startswith("^")
    patterns = patterns.removeprefix("^")
    exact = patterns.startswith("=")
    wanted = [word for word in patterns.removeprefix("=").split(",") if word]

    def fits(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in wanted)

    return not any(fits(name) != reverse for name in names)


# -- what the user sets ---------------------------------------------------------------------------

OF_THE_LAUNCH = {  # A launch sets these for each rank.
    "MASTER_ADDR": "the first node of the list is the master",
    "MASTER_PORT": "--master-port chooses it",
    "WORLD_SIZE": "--nproc and --nnodes choose it",
    "RANK": "the order of the node list numbers the nodes",
    "LOCAL_RANK": "--nproc N starts N ranks per node",
    "NODE_RANK": "the order of the node list numbers the nodes",
}


def warnings(nodes: Iterable[tuple[ProbedNode, NodePlan]]) -> list[str]:
    """Warn of what a user set, and that fits nothing on a node or has no effect."""
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
    """Return True if a list of cards names one that is there, as NCCL or UCX reads it."""
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
