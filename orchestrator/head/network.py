"""Facts in, each node's network settings out: pure, and every value with its reason."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import CheckFailed
from orchestrator.head.facts import Facts


@dataclass(frozen=True)
class Setting:
    """One environment variable, and why it has this value."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Place:
    """Where a node is in the job's network."""

    address: str
    interface: str


def is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def places(facts: Sequence[Facts], reached: Sequence[str]) -> list[Place]:
    """Each node's own address and interface, the master (the first) at the address all others use.

    `reached`: the address by which the head reached each node, or "" behind a jump host.
    """
    master = master_address(facts, reached)
    return [place(one, by, master) for one, by in zip(facts, reached, strict=True)]


def master_address(facts: Sequence[Facts], reached: Sequence[str]) -> str:
    """The master's address that every other node can be expected to reach."""
    own = [address.address for address in facts[0].addresses]
    first = reached[0]
    others = list(zip(facts[1:], reached[1:], strict=True))
    if all(is_loopback(by) for by in reached):
        return first
    if not others:
        return first if first in own else "127.0.0.1"  # NAT does not lead back to the node itself
    if first in own and not is_loopback(first):
        return first
    # The list's address is not one that the master itself has: NAT, a jump host, or localhost.
    shared = [address for address in own if all(_on_link(one, address) for one, _ in others)]
    if shared:
        return shared[0]
    if first and not is_loopback(first):
        return first
    raise CheckFailed(
        "the master has no address that the other nodes can reach: "
        + (f"the list calls it {first}" if first else "it is behind a jump host")
        + f", and none of its own ({', '.join(own)}) is on a network of theirs",
        "write the master's address on the nodes' common network in the first line of the list",
    )


def _on_link(facts: Facts, address: str) -> bool:
    """Is this address on a network the node is attached to? Loopback and link-local are none."""
    target = ipaddress.ip_address(address)
    if target.is_loopback or target.is_link_local:
        return False
    return any(
        target in ipaddress.ip_network(f"{one.address}/{one.prefix}", strict=False)
        for one in facts.addresses
        if one.address != address
    )


def place(facts: Facts, reached: str, master: str) -> Place:
    interfaces = {address.address: address.interface for address in facts.addresses}
    if master in interfaces or (is_loopback(master) and is_loopback(reached)):
        own = reached if is_loopback(master) and is_loopback(reached) else master
        return Place(own, interfaces.get(own, "lo" if is_loopback(own) else ""))
    interface, own = facts.routes.get(master, ("", ""))
    if own:
        return Place(own, interface)
    target = ipaddress.ip_address(master)
    for address in facts.addresses:
        if target in ipaddress.ip_network(f"{address.address}/{address.prefix}", strict=False):
            return Place(address.address, address.interface)
    for interface, own in facts.routes.values():  # asked for by the name in the list
        if own and not is_loopback(own):
            return Place(own, interface)
    raise CheckFailed(
        f"{facts.hostname} has no route to the master's address {master}",
        "write an address of the master in the list that all nodes can reach",
    )


def settings(where: Place, ifname: str | None) -> tuple[Setting, ...]:
    """The interface for NCCL's and gloo's sockets: the one towards the master, or the user's."""
    interface = ifname or where.interface
    if not interface:
        return ()
    why = "ifname= in the node list" if ifname else f"the interface of {where.address}"
    return (
        # NCCL matches prefixes unless the name begins with "=": eth1 would also mean eth10.
        Setting("NCCL_SOCKET_IFNAME", f"={interface}", why),
        Setting("GLOO_SOCKET_IFNAME", interface, why),
    )
