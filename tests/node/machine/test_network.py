import json
import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.node.machine import network
from orchestrator.protocol.facts import Address, Interface, RdmaPort
from tests.node.job.trees import hca, plant, roce


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


def test_interfaces_have_kinds(machine: Path) -> None:
    found = {one.name: one.kind for one in network.read_interfaces(str(machine))}
    assert found == {
        "lo": "loopback", "eth0": "ethernet", "eth1": "ethernet", "eth9": "ethernet",
        "bond0": "bond", "bond0.42": "vlan", "docker0": "bridge", "veth12": "virtual",
        "ib0": "infiniband", "wlan0": "wireless", "tun0": "virtual",
    }  # fmt: skip


def test_interface_has_all_fields(machine: Path) -> None:
    found = {one.name: one for one in network.read_interfaces(str(machine))}
    assert found["eth0"] == Interface(
        name="eth0", kind="ethernet", state="up", speed=100000, mtu=9000,
        members=(), vendor="0x15b3",
    )  # fmt: skip
    assert found["bond0"].members == (
        "eth0",
        "eth1",
    )
    assert found["bond0.42"].members == ("bond0",)
    assert (found["eth9"].state, found["eth9"].speed) == ("down", None)
    assert (found["lo"].state, found["tun0"].state) == ("up", "up")


def test_real_machine_has_loopback() -> None:
    (found,) = [one for one in network.read_interfaces() if one.kind == "loopback"]
    assert (found.name, found.state) == ("lo", "up")


# -- addresses --------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("ip") is None, reason="no ip(8) to compare with")
def test_interface_addresses_agree_with_ip() -> None:
    shown = json.loads(subprocess.check_output(["ip", "-j", "address"]))
    wanted = {
        Address(link["ifname"], address["local"], address["prefixlen"])
        for link in shown
        for address in link["addr_info"]
    }
    assert set(network.interface_addresses()) == wanted


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
def test_route_finds_way_to_peer(peer: str, found: tuple[str, str]) -> None:
    assert network.find_route(peer, network.interface_addresses()) == found


def found(root: Path) -> list[RdmaPort]:
    return list(network.rdma_ports(str(root)))


def test_rdma_ports_are_empty_without_cards(tmp_path: Path) -> None:
    assert found(tmp_path) == []


def test_infiniband_card_is_read(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_0")
    (port,) = found(tmp_path)
    assert (port.name, port.link_layer, port.state) == ("mlx5_0:1", "InfiniBand", "ACTIVE")
    assert (port.rate, port.node_type) == (400.0, "CA")
    assert [gid.gid for gid in port.gids] == ["fe80:0000:0000:0000:b8ce:f603:0012:0001"]
    assert port.active and not port.software


def test_rdma_ports_are_ordered(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_1", port=1)
    hca(tmp_path, "mlx5_1", port=2, state="1: DOWN", physical="3: Disabled", rate="10 Gb/sec (4X)")
    hca(tmp_path, "mlx5_0", pci="0000:1b:00.0", state="2: INIT", physical="4: PortConfigurationTr")
    assert [(port.name, port.state, port.rate) for port in found(tmp_path)] == [
        ("mlx5_0:1", "INIT", 400.0),
        ("mlx5_1:1", "ACTIVE", 400.0),
        ("mlx5_1:2", "DOWN", 10.0),
    ]


def test_roce_card_lists_used_gids(tmp_path: Path) -> None:
    """Two versions for each address; empty entries and the default one are left out."""
    roce(tmp_path, "mlx5_2", "10.1.0.7", "ens1f0np0")
    (port,) = found(tmp_path)
    assert (port.link_layer, port.rate, port.netdev) == ("Ethernet", 100.0, "ens1f0np0")
    assert [(gid.index, gid.type) for gid in port.gids] == [
        *((0, "IB/RoCE v1"), (1, "RoCE v2")),
        *((2, "IB/RoCE v1"), (3, "RoCE v2")),
    ]
    assert [str(gid.ip) for gid in port.gids if gid.is_routable_v2] == ["10.1.0.7"]


def test_unreadable_card_has_defaults(tmp_path: Path) -> None:
    plant(tmp_path, {"sys/class/infiniband/broken/ports/1/": "", "sys/class/infiniband/none/": ""})
    (port,) = found(tmp_path)
    assert (port.name, port.state, port.rate, port.gids) == ("broken:1", "", 0.0, ())


@pytest.mark.parametrize(
    ("text", "gbits"),
    [
        ("400 Gb/sec (4X NDR)", 400.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("56 Gb/sec (4X FDR)", 56.0),
        ("800 Gb/sec (8X NDR)", 800.0), ("", 0.0), ("fast", 0.0), ("10", 0.0),
    ],
)  # fmt: skip
def test_rate_is_parsed(text: str, gbits: float) -> None:
    assert network.parse_rate(text) == gbits
