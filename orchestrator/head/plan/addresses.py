"""Find each node's address in the job's network; all others can reach the master's address."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Sequence

from orchestrator.common.errors import CheckFailed
from orchestrator.common.hosts import is_loopback
from orchestrator.head.nodes.facts import OWN_BRIDGES, Facts, ProbedNode
from orchestrator.head.plan.model import NodeAddress
from orchestrator.protocol.facts import Address

COMMON = (
    "put an address of the master that all nodes can reach in the first line of the list, "
    "such as its address on their common network"
)


def find_addresses(nodes: Sequence[ProbedNode]) -> list[NodeAddress]:
    """Return each node's address; the first node is the master, whose address all can reach."""
    master = master_address(nodes)
    addresses = [address_of(node, nodes[0], master) for node in nodes]
    check_distinct(nodes, addresses)
    check_peers(nodes, addresses)
    return addresses


def master_address(nodes: Sequence[ProbedNode]) -> str:
    """Return the master's address that every other node can be expected to reach."""
    master, others = nodes[0], nodes[1:]
    addresses = [address.address for address in master.facts.addresses]
    first = master.reached
    if all(is_loopback(node.reached) for node in nodes):
        return first
    if not others:
        # An address behind NAT does not lead back to the node itself.
        usable = first in addresses and not is_scoped(first)
        return first if usable else "127.0.0.1"
    scoped = is_scoped(first)
    if first in addresses and not is_loopback(first) and not scoped:
        return first
    # The master does not have the list's address itself: it is NAT, a jump host, or localhost.
    shared = [
        address
        for address in master.facts.addresses
        if all(on_link(node.facts, address.address) for node in others)
    ]
    if shared:
        # A container bridge may have the same network on all machines, so it comes last.
        return min(shared, key=lambda a: a.interface.startswith(OWN_BRIDGES)).address
    if first and not is_loopback(first) and not scoped:
        return first
    raise CheckFailed(
        "the master has no address that the other nodes can reach: "
        + (f"the list calls it {first}" if first else "it is behind a jump host")
        + f", and none of its own ({', '.join(addresses)}) is on one of their networks",
        COMMON,
    )


def is_scoped(address: str) -> bool:
    """Return True if an address needs an interface (scope), which ranks are not given."""
    return address.startswith("fe80:") and ipaddress.ip_address(address).is_link_local


def on_link(facts: Facts, address: str) -> bool:
    """Return True if the node is directly attached to the network of this address."""
    target = ipaddress.ip_address(address)
    if target.is_loopback or target.is_link_local:
        return False
    return any(target in node.network for node in facts.addresses if node.address != address)


def address_of(node: ProbedNode, first: ProbedNode, master: str) -> NodeAddress:
    facts = node.facts
    interfaces = {address.address: address.interface for address in facts.addresses}
    if is_loopback(master) and is_loopback(node.reached):
        return NodeAddress(node.reached, interfaces.get(node.reached, "lo"))
    if master in interfaces:
        if node is not first and not node.facts.same_machine(first.facts):
            raise CheckFailed(
                f"{node.name} itself has the master's address {master} (on {interfaces[master]}):"
                " two networks use the same addresses, so it would connect to itself and wait"
                " forever",
                COMMON,
            )
        return NodeAddress(master, interfaces[master])
    interface, from_here = facts.routes.get(master, ("", ""))
    if from_here:
        return NodeAddress(from_here, interface)
    target = ipaddress.ip_address(master)
    for address in facts.addresses:
        if target in address.network and is_usable(facts, address):
            return NodeAddress(address.address, address.interface)
    # The probe looked up the route by the name in the list, before the address was known.
    interface, from_here = next(iter(facts.routes.values()), ("", ""))
    if from_here and not is_loopback(from_here) and (":" in from_here) == (":" in master):
        return NodeAddress(from_here, interface)
    raise no_way(node, master)


def is_usable(facts: Facts, address: Address) -> bool:
    interface = facts.interface(address.interface)
    return interface is None or interface.state == "up"


def no_way(node: ProbedNode, master: str) -> CheckFailed:
    """Return the error for a missing route, with the node's addresses."""
    what = f"{node.name} has no route to the master's address {master}"
    outside = [a for a in node.facts.addresses if not a.ip.is_loopback and not a.ip.is_link_local]
    if not outside:
        return CheckFailed(f"{what}: it has no address other than loopback", COMMON)
    shown = ", ".join(f"{a.interface} {a.address}/{a.prefix}" for a in outside)
    return CheckFailed(f"{what}; it has {shown}", COMMON)


def check_distinct(nodes: Sequence[ProbedNode], addresses: Sequence[NodeAddress]) -> None:
    """Raise if two machines have one address: clones, or two networks with the same range."""
    seen: dict[str, ProbedNode] = {}
    for node, where in zip(nodes, addresses, strict=True):
        other = seen.setdefault(where.address, node)
        known = bool(node.facts.boot) and bool(other.facts.boot)
        if other is node or not known or is_loopback(where.address):
            continue
        if not node.facts.same_machine(other.facts):
            raise CheckFailed(
                f"{other.name} and {node.name} are two machines with one address, "
                f"{where.address} ({where.interface}): two networks use the same addresses",
                "give one of them another address, or list the nodes by their addresses on their "
                "common network",
            )


def check_peers(nodes: Sequence[ProbedNode], addresses: Sequence[NodeAddress]) -> None:
    """Raise if two nodes have no route between them, as all ranks connect to each other.

    Only pairs count for which the kernel was asked and knows no route.
    """
    # The nodes by address; a machine may be listed twice.
    owners: dict[str, list[tuple[ProbedNode, NodeAddress]]] = {}
    for other, where in zip(nodes, addresses, strict=True):
        owners.setdefault(where.address, []).append((other, where))
    for node in nodes:
        lost = (address for address, route in node.facts.routes.items() if route == ("", ""))
        for other, where in itertools.chain.from_iterable(owners.get(each, ()) for each in lost):
            if other is not node:
                raise CheckFailed(
                    f"{node.name} has no route to {other.name} at {where.address}",
                    "all nodes need a route to all others: add it, or list addresses of one "
                    "network",
                )
