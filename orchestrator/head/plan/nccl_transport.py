"""Choose NCCL's network: InfiniBand or RoCE cards, or TCP. Pure functions.

All nodes have to use the same kind: a node on InfiniBand cannot connect to one on TCP.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.common.errors import CheckFailed
from orchestrator.head.nodes.facts import Facts, ProbedNode, node_names, version_release
from orchestrator.head.plan.model import EnvSetting
from orchestrator.protocol.facts import Gid, RdmaPort

log = logging.getLogger(__name__)

LAYERS = {"infiniband": "InfiniBand", "roce": "Ethernet"}
SPOKEN = {"infiniband": "InfiniBand", "roce": "RoCE", "ethernet": "TCP"}
# A user who sets one of these variables has chosen the cards.
CARDS = frozenset({"NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN"})
# From this version on NCCL finds the right GID of every port by itself.
FINDS_GIDS = (2, 21)


@dataclass(frozen=True)
class RdmaPorts:
    """A node's ports of one kind: the ports to use, and the names of others with the reason."""

    used: tuple[RdmaPort, ...]
    left: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Fabric:
    """The network that carries NCCL's data."""

    # infiniband, roce or ethernet; yours: the user chose the cards; none: there is one node.
    kind: str
    # The settings of each node.
    settings: tuple[tuple[EnvSetting, ...], ...]
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


def choose_fabric(
    nodes: Sequence[ProbedNode], profile: str, theirs: frozenset[str], hinted: frozenset[str]
) -> Fabric:
    nothing: tuple[tuple[EnvSetting, ...], ...] = ((),) * len(nodes)
    if len(nodes) == 1:
        return Fabric("none", nothing)
    if theirs & CARDS:
        which = ", ".join(sorted(theirs & CARDS))
        return Fabric("yours", nothing, hints=(f"the cards are left to your {which}",))
    if profile == "ethernet":
        return tcp_fabric(nodes, "nccl.profile is ethernet", always=True)
    ports_by_kind = {kind: [select_ports(node.facts, kind) for node in nodes] for kind in LAYERS}
    if profile in ports_by_kind:
        return make_fabric(nodes, profile, required_cards(nodes, profile, ports_by_kind[profile]))
    complete = [kind for kind in ports_by_kind if all(ports.used for ports in ports_by_kind[kind])]
    log.debug("kinds of cards that all nodes have: %s", complete)
    if complete:
        kind = complete[0]
        if kind == "infiniband":
            check_subnets(nodes, ports_by_kind[kind])
        return make_fabric(nodes, kind, ports_by_kind[kind])
    if hinted & CARDS:
        return Fabric("yours", nothing, hints=("the cards are left to your hook",))
    return mixed_fabric(nodes, ports_by_kind)


# -- ports ----------------------------------------------------------------------------------------


def select_ports(facts: Facts, kind: str) -> RdmaPorts:
    """Return a node's ports of a kind that are fit to carry NCCL's data."""
    mine = [port for port in facts.rdma if port.link_layer == LAYERS[kind]]
    left = [(port, reason) for port in mine if (reason := why_port_unfit(port, kind))]
    used = [port for port in mine if not why_port_unfit(port, kind)]
    fastest = max((port.rate for port in used), default=0.0)
    # A port of half the speed or less is for storage or SSH, and would slow the others down.
    slow = [port for port in used if port.rate * 2 <= fastest]
    left += [(port, f"{port.rate:g} Gb/s") for port in slow]
    used = [port for port in used if port not in slow]
    bonds = [port for port in used if is_bond(facts, port)]
    if len(bonds) < len(used):
        left += [(port, "a bond next to single ports: for storage or management") for port in bonds]
        used = [port for port in used if port not in bonds]
    others = [port for port in facts.rdma if port not in mine]
    left += [(port, f"{port.link_layer or 'no link layer'}") for port in others if port.active]
    return RdmaPorts(tuple(used), tuple((port.name, reason) for port, reason in left))


def why_port_unfit(port: RdmaPort, kind: str) -> str:
    if port.software:
        return "software RDMA"
    if not port.active:
        return port.state or "no state"
    if kind == "roce" and port.node_type == "RNIC":
        return "iWARP"
    if kind == "roce" and not any(gid.is_routable_v2 for gid in port.gids):
        return f"no RoCE v2 address: {port.netdev or 'its interface'} has no IP address"
    return ""


def is_bond(facts: Facts, port: RdmaPort) -> bool:
    interface = facts.interface(port.netdev)
    return "bond" in port.device or (interface is not None and interface.kind == "bond")


def subnets_of(ports: RdmaPorts) -> set[str]:
    """Return the InfiniBand subnets of these ports."""
    gids = [gid for port in ports.used for gid in port.gids if gid.index == 0]
    return {":".join(gid.gid.split(":")[:4]) for gid in gids}


def check_subnets(nodes: Sequence[ProbedNode], all_ports: Sequence[RdmaPorts]) -> None:
    """Raise for two separate InfiniBand fabrics: NCCL would wait for a connection forever."""
    first = subnets_of(all_ports[0])
    for node, ports in zip(nodes, all_ports, strict=True):
        there = subnets_of(ports)
        if first and there and not first & there:
            raise CheckFailed(
                f"{nodes[0].name} and {node.name} are on different InfiniBand subnets "
                f"({', '.join(sorted(first))} and {', '.join(sorted(there))})",
                "leave one of them out of the node list, or use TCP: --set nccl.profile=ethernet; "
                "if a router connects them, name the cards to use: --set nccl.NCCL_IB_HCA=...",
            )


# -- decisions ------------------------------------------------------------------------------------


def required_cards(
    nodes: Sequence[ProbedNode], kind: str, all_ports: list[RdmaPorts]
) -> list[RdmaPorts]:
    without = [node for node, ports in zip(nodes, all_ports, strict=True) if not ports.used]
    if without:
        raise CheckFailed(
            f"nccl.profile is {kind}, but there is no {SPOKEN[kind]} to use on: "
            + "; ".join(why_no_card(node, kind) for node in without[:8]),
            "fix it, leave the node out of the list, or use what all nodes have: "
            "--set nccl.profile=auto",
        )
    if kind == "infiniband":
        check_subnets(nodes, all_ports)
    return all_ports


def why_no_card(node: ProbedNode, kind: str) -> str:
    """Return why a node has no usable card of this kind, e.g. "gpu03 (mlx5_0:1: DOWN)"."""
    left = select_ports(node.facts, kind).left
    reasons = ", ".join(f"{name}: {reason}" for name, reason in left[:4])
    return f"{node.name} ({reasons or node.facts.problems.get('rdma') or 'no such card'})"


def mixed_fabric(nodes: Sequence[ProbedNode], ports_by_kind: dict[str, list[RdmaPorts]]) -> Fabric:
    """Return TCP with a warning if no kind is on all nodes; raise if some would use InfiniBand."""
    with_infiniband = [
        node for node, p in zip(nodes, ports_by_kind["infiniband"], strict=True) if p.used
    ]
    without = [node for node in nodes if node not in with_infiniband]
    # Without GPUs nothing uses NCCL, and gloo uses TCP anyway.
    if with_infiniband and any(node.facts.gpus for node in nodes):
        raise CheckFailed(
            f"{node_names(with_infiniband)} would use InfiniBand, but there is none to use on: "
            + "; ".join(why_no_card(node, "infiniband") for node in without[:8]),
            "fix it or leave these nodes out of the list; or let all use TCP, which is slower: "
            "--set nccl.profile=ethernet",
        )
    with_roce = [node for node, p in zip(nodes, ports_by_kind["roce"], strict=True) if p.used]
    if not with_roce and not with_infiniband:
        return tcp_fabric(nodes, "no node has InfiniBand or RoCE to use")
    some = with_infiniband or with_roce
    kind = "infiniband" if with_infiniband else "roce"
    lacking = [node for node in nodes if node not in some]
    reason = f"{node_names(lacking)} lack{'s' if len(lacking) == 1 else ''} {SPOKEN[kind]}"
    chosen = tcp_fabric(nodes, f"{reason}, and all nodes must use the same", always=True)
    note = (
        f"WARNING: NCCL uses TCP, because {node_names(some)} ha{'s' if len(some) == 1 else 've'} "
        f"{SPOKEN[kind]} and the others do not: "
        + "; ".join(why_no_card(node, kind) for node in lacking[:8])
    )
    return Fabric(chosen.kind, chosen.settings, (note,))


def tcp_fabric(nodes: Sequence[ProbedNode], reason: str, *, always: bool = False) -> Fabric:
    """Return the fabric for TCP; InfiniBand is disabled if any node has a card NCCL would try."""
    needed = always or any(node.facts.rdma for node in nodes)
    setting = (EnvSetting("NCCL_IB_DISABLE", "1", reason),) if needed else ()
    return Fabric("ethernet", (setting,) * len(nodes))


def make_fabric(nodes: Sequence[ProbedNode], kind: str, all_ports: Sequence[RdmaPorts]) -> Fabric:
    settings = []
    notes: list[str] = []
    for node, ports in zip(nodes, all_ports, strict=True):
        used, gids, problem = with_gids(node, kind, ports)
        if problem:
            notes.append(problem)
        listed = ",".join(port.name for port in used.used)
        hca = EnvSetting("NCCL_IB_HCA", f"={listed}", why_these(kind, used))
        on = EnvSetting("NCCL_IB_DISABLE", "0", f"every node has {SPOKEN[kind]}")
        settings.append((on, hca, *gids))
    return Fabric(kind, tuple(settings), tuple(notes))


def why_these(kind: str, ports: RdmaPorts) -> str:
    rates = sorted({port.rate for port in ports.used}, reverse=True)
    speeds = " and ".join(f"{rate:g}" for rate in rates)
    count = len(ports.used)
    which = "the active port" if count == 1 else f"the {count} active ports"
    without = "; ".join(f"not {name} ({reason})" for name, reason in ports.left)
    return f"{which} for {SPOKEN[kind]}, {speeds} Gb/s" + (f"; {without}" if without else "")


# -- GIDs -----------------------------------------------------------------------------------------


def with_gids(
    node: ProbedNode, kind: str, ports: RdmaPorts
) -> tuple[RdmaPorts, tuple[EnvSetting, ...], str]:
    """Return the RoCE ports to use, the settings that select their GIDs, and a problem or "".

    A recent NCCL finds the GIDs itself and needs at most the address family. An older one takes a
    single GID index for all ports.
    """
    software = node.facts.software
    # A torch for CPUs has no NCCL.
    if kind != "roce" or not (software.cuda or software.hip):
        return ports, (), ""
    version = version_release(software.nccl)
    best = {port.name: best_gid(port) for port in ports.used}
    only_ipv6 = all(gid.ip is not None and gid.ip.version == 6 for gid in best.values())
    if version is not None and version >= FINDS_GIDS:
        reason = "the cards have IPv6 addresses only, and NCCL looks for IPv4 ones"
        family = (EnvSetting("NCCL_IB_ADDR_FAMILY", "AF_INET6", reason),)
        return ports, family if only_ipv6 else (), ""
    ((index, _),) = Counter(gid.index for gid in best.values()).most_common(1)
    apart = [port for port in ports.used if best[port.name].index != index]
    what = software.nccl or "of an unknown version"
    reason = f"RoCE v2 with an address; NCCL {what} takes one number, 0 by default"
    setting = (EnvSetting("NCCL_IB_GID_INDEX", str(index), reason),)
    if not apart:
        return ports, setting, ""
    left = tuple((port.name, f"its GID index is {best[port.name].index}") for port in apart)
    used = tuple(port for port in ports.used if port not in apart)
    problem = (
        f"{node.name}: NCCL {what} takes one GID index for all cards, so it cannot use "
        f"{', '.join(port.name for port in apart)}; NCCL 2.21 can"
    )
    return RdmaPorts(used, ports.left + left), setting, problem


def best_gid(port: RdmaPort) -> Gid:
    """Return the best GID: IPv4 first, the port's own interface before a VLAN, lowest index."""

    def order(gid: Gid) -> tuple[bool, bool, int]:
        assert gid.ip is not None
        return gid.ip.version == 6, gid.netdev not in ("", port.netdev), gid.index

    return min((gid for gid in port.gids if gid.is_routable_v2), key=order)
