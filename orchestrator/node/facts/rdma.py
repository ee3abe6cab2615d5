"""Reads InfiniBand and RoCE ports from /sys/class/infiniband; no library, no command."""

from __future__ import annotations

import os
import re

from orchestrator.node.facts import sysfs
from orchestrator.protocol.facts import Gid, RdmaPort

ZERO = re.compile(r"(fe80:0000:0000:0000:)?(0000:)*0000")  # an entry that nobody filled in
INFINIBAND_GIDS = 2  # the port's own, and the routable one; RoCE has one per address and version


def ports(root: str = "") -> tuple[RdmaPort, ...]:
    top = f"{root}/sys/class/infiniband"
    return tuple(
        port(f"{top}/{device}", device, int(number))
        for device in sysfs.names(top)
        for number in sorted(sysfs.names(f"{top}/{device}/ports"))
        if number.isdigit()
    )


def port(path: str, device: str, number: int) -> RdmaPort:
    here = f"{path}/ports/{number}"
    link_layer = sysfs.text(f"{here}/link_layer")
    addresses = gids(here, INFINIBAND_GIDS if link_layer == "InfiniBand" else None)
    return RdmaPort(
        device=device,
        port=number,
        link_layer=link_layer,
        state=word(sysfs.text(f"{here}/state")),
        physical=word(sysfs.text(f"{here}/phys_state")),
        rate=rate(sysfs.text(f"{here}/rate")),
        netdev=next((gid.netdev for gid in addresses if gid.netdev), "")
        or own_netdev(path, number),
        gids=tuple(addresses),
        node_type=word(sysfs.text(f"{path}/node_type")),
        software="/virtual/" in os.path.realpath(path),  # rxe, siw: a driver without a card
        board=sysfs.text(f"{path}/board_id"),
        firmware=sysfs.text(f"{path}/fw_ver"),
        guid=sysfs.text(f"{path}/node_guid"),
        pci=sysfs.target(f"{path}/device"),
        numa=sysfs.number(f"{path}/device/numa_node"),
    )


def word(text: str) -> str:
    """Turn `4: ACTIVE` into ACTIVE."""
    return text.partition(":")[2].strip() or text


def rate(text: str) -> float:
    """Turn `400 Gb/sec (4X NDR)` into 400.0; 0 where it is not known."""
    match = re.match(r"\d+(\.\d+)?(?= ?Gb)", text)
    return float(match.group()) if match else 0.0


def gids(here: str, most: int | None) -> list[Gid]:
    """Return the addresses of a port: a RoCE port has two per IP address, one for each version."""
    addresses = []
    indexes = sorted(int(name) for name in sysfs.names(f"{here}/gids") if name.isdigit())
    for index in indexes[:most]:
        gid = sysfs.text(f"{here}/gids/{index}")
        if not gid or ZERO.fullmatch(gid):
            continue
        attributes = f"{here}/gid_attrs"
        addresses.append(
            Gid(
                index=index,
                gid=gid,
                type=sysfs.text(f"{attributes}/types/{index}"),
                netdev=sysfs.text(f"{attributes}/ndevs/{index}"),
            )
        )
    return addresses


def own_netdev(path: str, number: int) -> str:
    """Return the network interface of a port: of several on a card, the one of its number."""
    net = f"{path}/device/net"
    netdevs = sysfs.names(net)
    for name in netdevs:
        index = sysfs.number(f"{net}/{name}/dev_port") or sysfs.number(f"{net}/{name}/dev_id") or 0
        if index == number - 1:
            return name
    return netdevs[0] if len(netdevs) == 1 else ""
