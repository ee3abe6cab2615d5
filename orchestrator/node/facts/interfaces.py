"""Finds this machine's network interfaces, its addresses, and its routes to other machines.

From the kernel alone, so nothing can hang. `root` stands before /sys, so that tests can bring one.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator

from orchestrator.node.facts import sysfs
from orchestrator.protocol.facts import Address, Interface

RTM_GETADDR = 22
RTM_NEWADDR = 20
NLMSG_DONE = 3
NLM_F_REQUEST_DUMP = 0x301
IFA_ADDRESS = 1
IFA_LOCAL = 2
IFF_UP = 1
KINDS = {32: "infiniband", 772: "loopback"}  # ARPHRD_*
DEVTYPES = {"bridge": "bridge", "bond": "bond", "vlan": "vlan", "wlan": "wireless"}


def interfaces(root: str = "") -> tuple[Interface, ...]:
    net = f"{root}/sys/class/net"
    return tuple(
        interface(f"{net}/{name}", name)
        for name in sysfs.names(net)
        if os.path.isdir(f"{net}/{name}")  # bonding_masters is a file
    )


def interface(path: str, name: str) -> Interface:
    inside = sysfs.names(path)
    state = sysfs.text(f"{path}/operstate")
    if state in ("", "unknown"):  # loopback, tun and some others never tell
        state = "up" if (sysfs.number(f"{path}/flags") or 0) & IFF_UP else "down"
    speed = sysfs.number(f"{path}/speed") if state == "up" else None
    card = f"{path}/device" if "device" in inside else ""
    return Interface(
        name=name,
        kind=kind_of(path, inside),
        state=state,
        speed=speed if speed is not None and speed > 0 else None,  # -1: it does not know
        mtu=sysfs.number(f"{path}/mtu") or 0,
        mac=sysfs.text(f"{path}/address"),
        master=sysfs.target(f"{path}/master") if "master" in inside else "",
        members=tuple(entry[6:] for entry in inside if entry.startswith("lower_")),
        driver=sysfs.target(f"{card}/driver") if card else "",
        vendor=sysfs.text(f"{card}/vendor") if card else "",
        pci=sysfs.target(card) if card else "",
        numa=sysfs.number(f"{card}/numa_node") if card else None,
    )


def kind_of(path: str, inside: list[str]) -> str:
    """Return ethernet, infiniband, loopback, bridge, bond, vlan, wireless, or virtual."""
    known = KINDS.get(sysfs.number(f"{path}/type") or 0)
    if known:
        return known
    for name, kind in (("bridge", "bridge"), ("bonding", "bond"), ("wireless", "wireless")):
        if name in inside:
            return kind
    match = re.search(r"^DEVTYPE=(\S+)", sysfs.text(f"{path}/uevent"), re.MULTILINE)
    if match and match.group(1) in DEVTYPES:
        return DEVTYPES[match.group(1)]
    return "ethernet" if "device" in inside else "virtual"


# -- addresses --------------------------------------------------------------------------------


def interface_addresses() -> list[Address]:
    """Return all addresses, from the kernel over netlink."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(2)
        header = struct.pack("=LHHLL", 17, RTM_GETADDR, NLM_F_REQUEST_DUMP, 1, 0)
        link.send(header + struct.pack("=B", socket.AF_UNSPEC))
        addresses: list[Address] = []
        while True:
            data = link.recv(1 << 18)
            while data:
                size, kind = struct.unpack_from("=LH", data)
                if kind == NLMSG_DONE or size < 16:
                    return addresses
                if kind == RTM_NEWADDR:
                    addresses.extend(address_of(data[16:size]))
                data = data[(size + 3) & ~3 :]


def address_of(message: bytes) -> Iterator[Address]:
    family, prefix, _, _, index = struct.unpack_from("=BBBBL", message)
    attributes = {}
    rest = message[8:]
    while len(rest) >= 4:
        size, kind = struct.unpack_from("=HH", rest)
        if size < 4:
            break
        attributes[kind] = rest[4:size]
        rest = rest[(size + 3) & ~3 :]
    raw = attributes.get(IFA_LOCAL) or attributes.get(IFA_ADDRESS)
    if raw and family in (socket.AF_INET, socket.AF_INET6):
        yield Address(socket.if_indextoname(index), socket.inet_ntop(family, raw), prefix)


def route(peer: str, addresses: list[Address]) -> tuple[str, str]:
    """Return (interface, own address) by which the kernel sends to a peer; empty if it cannot."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect((peer, 9))  # a UDP connect sends nothing
            own: str = probe_socket.getsockname()[0]
    except OSError:
        return "", ""
    for address in addresses:
        if address.address == own:
            return address.interface, own
    return ("lo", own) if own.startswith("127.") else ("", own)
