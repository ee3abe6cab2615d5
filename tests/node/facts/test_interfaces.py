from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from orchestrator.node.facts import interfaces
from orchestrator.protocol.facts import Address, Interface
from tests.node.job.trees import plant


def net(root: Path, name: str, *, kind: int = 1, state: str = "up", **files: str) -> None:
    """An interface, with what every one has."""
    usual = {"type": str(kind), "operstate": state, "mtu": "1500", "flags": "0x1003"}
    given = {key.replace("__", "/"): text for key, text in files.items()}
    plant(root / "sys/class/net" / name, {**usual, "address": "0c:42:a1:00:00:01", **given})


def card(
    root: Path, name: str, pci: str, vendor: str = "0x15b3", driver: str = "mlx5_core"
) -> None:
    device = root / "sys/devices" / pci
    plant(device, {"vendor": vendor, "numa_node": "0", "driver": f"-> ../../bus/drivers/{driver}"})
    (root / "sys/class/net" / name / "device").symlink_to(device)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two cards in a bond with a VLAN, a bridge, a container's end, InfiniBand, and more."""
    net(tmp_path, "lo", kind=772, state="unknown", flags="0x9", mtu="65536")
    for number in (0, 1):
        net(tmp_path, f"eth{number}", speed="100000", master="-> ../bond0", mtu="9000")
        card(tmp_path, f"eth{number}", f"0000:4b:00.{number}")
    net(
        tmp_path, "bond0", speed="200000", bonding__mode="802.3ad 4", uevent="DEVTYPE=bond",
        lower_eth0="-> ../eth0", lower_eth1="-> ../eth1",
    )  # fmt: skip
    net(
        tmp_path, "bond0.42", speed="200000", uevent="DEVTYPE=vlan\nINTERFACE=bond0.42",
        lower_bond0="-> ../bond0",
    )  # fmt: skip
    net(tmp_path, "docker0", state="down", bridge__bridge_id="8000", uevent="DEVTYPE=bridge")
    net(tmp_path, "veth12", speed="10000")
    net(tmp_path, "ib0", kind=32, mtu="4092", speed="400000")
    net(tmp_path, "eth9", state="down", speed="-1")
    card(tmp_path, "eth9", "0000:5e:00.0", vendor="0x8086", driver="ice")
    net(tmp_path, "wlan0", uevent="DEVTYPE=wlan")
    net(tmp_path, "tun0", kind=65534, state="unknown", flags="0x11d1")
    plant(tmp_path, {"sys/class/net/bonding_masters": "bond0"})
    return tmp_path


def test_kinds(machine: Path) -> None:
    found = {one.name: one.kind for one in interfaces.interfaces(str(machine))}
    assert found == {
        "lo": "loopback", "eth0": "ethernet", "eth1": "ethernet", "eth9": "ethernet",
        "bond0": "bond", "bond0.42": "vlan", "docker0": "bridge", "veth12": "virtual",
        "ib0": "infiniband", "wlan0": "wireless", "tun0": "virtual",
    }  # fmt: skip


def test_one_interface(machine: Path) -> None:
    found = {one.name: one for one in interfaces.interfaces(str(machine))}
    assert found["eth0"] == Interface(
        name="eth0", kind="ethernet", state="up", speed=100000, mtu=9000,
        mac="0c:42:a1:00:00:01", master="bond0", members=(), driver="mlx5_core",
        vendor="0x15b3", pci="0000:4b:00.0", numa=0,
    )  # fmt: skip
    assert found["bond0"].members == (
        "eth0",
        "eth1",
    )
    assert found["bond0.42"].members == ("bond0",)
    assert (found["eth9"].state, found["eth9"].speed) == ("down", None)
    assert (found["lo"].state, found["tun0"].state) == ("up", "up")


def test_this_machine_has_loopback() -> None:
    (found,) = [one for one in interfaces.interfaces() if one.kind == "loopback"]
    assert (found.name, found.state) == ("lo", "up")


# -- addresses --------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("ip") is None, reason="no ip(8) to compare with")
def test_addresses_are_those_that_ip_shows() -> None:
    shown = json.loads(subprocess.check_output(["ip", "-j", "address"]))
    wanted = {
        Address(link["ifname"], address["local"], address["prefixlen"])
        for link in shown
        for address in link["addr_info"]
    }
    assert set(interfaces.interface_addresses()) == wanted


def test_an_address_of_a_point_to_point_link_is_its_own_end() -> None:
    """IFA_ADDRESS is the other end there; only IFA_LOCAL is ours."""

    def attribute(kind: int, address: str) -> bytes:
        return struct.pack("=HH", 8, kind) + socket.inet_aton(address)

    message = struct.pack("=BBBBL", socket.AF_INET, 32, 0, 0, 1)
    both = attribute(1, "10.0.0.2") + attribute(2, "10.0.0.1")
    assert list(interfaces.address_of(message + both)) == [Address("lo", "10.0.0.1", 32)]
    assert list(interfaces.address_of(message + attribute(1, "10.0.0.2"))) == [
        Address("lo", "10.0.0.2", 32)
    ]
    assert list(interfaces.address_of(message)) == []
    assert list(interfaces.address_of(message + b"\0\0\0\0")) == []


@pytest.mark.parametrize(
    ("peer", "found"),
    [
        ("127.0.0.1", ("lo", "127.0.0.1")),
        ("127.0.0.77", ("lo", "127.0.0.1")),
        ("localhost", ("lo", "127.0.0.1")),
        ("no.such.host.invalid", ("", "")),
        ("", ("lo", "127.0.0.1")),
        ("255.255.255.255", ("", "")),
    ],
)
def test_the_way_to_a_peer(peer: str, found: tuple[str, str]) -> None:
    assert interfaces.route(peer, interfaces.interface_addresses()) == found
