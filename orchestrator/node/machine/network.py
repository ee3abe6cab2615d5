"""Reads the networks of this machine: interfaces, addresses, routes, InfiniBand and RoCE ports.

Reads only the kernel, so nothing can hang. Tests put `root` before /sys.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator

from orchestrator.node.machine import sysfs
from orchestrator.protocol.facts import Address, Gid, Interface, RdmaPort

RTM_GETADDR = 22
RTM_NEWADDR = 20
NLMSG_DONE = 3
NLM_F_REQUEST_DUMP = 0x301
IFA_ADDRESS = 1
IFA_LOCAL = 2
IFF_UP = 1
# ARPHRD_INFINIBAND and ARPHRD_LOOPBACK.
KINDS = {32: "infiniband", 772: "loopback"}
DEVTYPES = {"bridge": "bridge", "bond": "bond", "vlan": "vlan", "wlan": "wireless"}


def read_interfaces(root: str = "") -> tuple[Interface, ...]:
    net = f"{root}/sys/class/net"
    return tuple(
        read_interface(f"{net}/{name}", name)
        for name in sysfs.list_names(net)
        # Other entries are files, such as bonding_masters.
        if os.path.isdir(f"{net}/{name}")
    )


def read_interface(path: str, name: str) -> Interface:
    inside = sysfs.list_names(path)
    state = sysfs.read_text(f"{path}/operstate")
    # Loopback, tun and some other interfaces report no state.
    if state in ("", "unknown"):
        state = "up" if (sysfs.read_number(f"{path}/flags") or 0) & IFF_UP else "down"
    speed = sysfs.read_number(f"{path}/speed") if state == "up" else None
    return Interface(
        name=name,
        kind=kind_of(path, inside),
        state=state,
        # The kernel writes -1 for an unknown speed.
        speed=speed if speed is not None and speed > 0 else None,
        mtu=sysfs.read_number(f"{path}/mtu") or 0,
        members=tuple(entry[6:] for entry in inside if entry.startswith("lower_")),
        vendor=sysfs.read_text(f"{path}/device/vendor") if "device" in inside else "",
    )


def kind_of(path: str, inside: list[str]) -> str:
    """Return ethernet, infiniband, loopback, bridge, bond, vlan, wireless, or virtual."""
    known = KINDS.get(sysfs.read_number(f"{path}/type") or 0)
    if known:
        return known
    for name, kind in (("bridge", "bridge"), ("bonding", "bond"), ("wireless", "wireless")):
        if name in inside:
            return kind
    match = re.search(r"^DEVTYPE=(\S+)", sysfs.read_text(f"{path}/uevent"), re.MULTILINE)
    if match and match.group(1) in DEVTYPES:
        return DEVTYPES[match.group(1)]
    return "ethernet" if "device" in inside else "virtual"


# -- addresses --------------------------------------------------------------------------------


def interface_addresses() -> list[Address]:
    """Return all addresses, from the kernel by netlink."""
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


def find_route(peer: str, addresses: list[Address]) -> tuple[str, str]:
    """Return (interface, own address) of the kernel's route to a peer; empty if there is none."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe_socket:
            # A UDP connect sends nothing.
            probe_socket.connect((peer, 9))
            source: str = probe_socket.getsockname()[0]
    except OSError:
        return "", ""
    for address in addresses:
        if address.address == source:
            return address.interface, source
    return ("lo", source) if source.startswith("127.") else ("", source)


# An empty entry of the GID table.
ZERO = re.compile(r"(fe80:0000:0000:0000:)?(0000:)*0000")
# The port's own and the routable one. RoCE has one per address and version.
INFINIBAND_GIDS = 2


def rdma_ports(root: str = "") -> tuple[RdmaPort, ...]:
    top = f"{root}/sys/class/infiniband"
    return tuple(
        read_port(f"{top}/{device}", device, int(number))
        for device in sysfs.list_names(top)
        for number in sorted(sysfs.list_names(f"{top}/{device}/ports"))
        if number.isdigit()
    )


def read_port(path: str, device: str, number: int) -> RdmaPort:
    here = f"{path}/ports/{number}"
    link_layer = sysfs.read_text(f"{here}/link_layer")
    addresses = port_gids(here, INFINIBAND_GIDS if link_layer == "InfiniBand" else None)
    return RdmaPort(
        device=device,
        port=number,
        link_layer=link_layer,
        state=state_word(sysfs.read_text(f"{here}/state")),
        rate=parse_rate(sysfs.read_text(f"{here}/rate")),
        netdev=next((gid.netdev for gid in addresses if gid.netdev), "")
        or netdev_of_port(path, number),
        gids=tuple(addresses),
        node_type=state_word(sysfs.read_text(f"{path}/node_type")),
        # The drivers rxe and siw work without a card.
        software="/virtual/" in os.path.realpath(path),
    )


def state_word(text: str) -> str:
    """Return ACTIVE for `4: ACTIVE`."""
    return text.partition(":")[2].strip() or text


def parse_rate(text: str) -> float:
    """Return 400.0 for `400 Gb/sec (4X NDR)`; 0 if it is unknown."""
    match = re.match(r"\d+(\.\d+)?(?= ?Gb)", text)
    return float(match.group()) if match else 0.0


def port_gids(here: str, most: int | None) -> list[Gid]:
    """Return the addresses of a port: a RoCE port has two per IP address, one for each version."""
    addresses = []
    indexes = sorted(int(name) for name in sysfs.list_names(f"{here}/gids") if name.isdigit())
    for index in indexes[:most]:
        gid = sysfs.read_text(f"{here}/gids/{index}")
        if not gid or ZERO.fullmatch(gid):
            continue
        attributes = f"{here}/gid_attrs"
        addresses.append(
            Gid(
                index=index,
                gid=gid,
                type=sysfs.read_text(f"{attributes}/types/{index}"),
                netdev=sysfs.read_text(f"{attributes}/ndevs/{index}"),
            )
        )
    return addresses


def netdev_of_port(path: str, number: int) -> str:
    """Return the network interface of a port: of several on a card, the one with its number."""
    net = f"{path}/device/net"
    netdevs = sysfs.list_names(net)
    for name in netdevs:
        index = (
            sysfs.read_number(f"{net}/{name}/dev_port")
            or sysfs.read_number(f"{net}/{name}/dev_id")
            or 0
        )
        if index == number - 1:
            return name
    return netdevs[0] if len(netdevs) == 1 else ""
