from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.node.facts import rdma
from orchestrator.protocol.facts import RdmaPort
from tests.node.job.trees import LOCAL, hca, mapped, plant, roce


def found(root: Path) -> list[RdmaPort]:
    return list(rdma.ports(str(root)))


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert found(tmp_path) == []


def test_an_infiniband_card(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_0")
    (port,) = found(tmp_path)
    assert (port.name, port.link_layer, port.state, port.physical) == (
        *("mlx5_0:1", "InfiniBand"),
        *("ACTIVE", "LinkUp"),
    )
    assert (port.rate, port.pci, port.numa, port.node_type) == (400.0, "0000:1a:00.0", 1, "CA")
    assert (port.board, port.firmware) == ("MT_0000000838", "28.39.1002")
    assert [gid.gid for gid in port.gids] == ["fe80:0000:0000:0000:b8ce:f603:0012:0001"]
    assert port.active and not port.software


def test_ports_in_order_of_their_numbers(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_1", port=1)
    hca(tmp_path, "mlx5_1", port=2, state="1: DOWN", physical="3: Disabled", rate="10 Gb/sec (4X)")
    hca(tmp_path, "mlx5_0", pci="0000:1b:00.0", state="2: INIT", physical="4: PortConfigurationTr")
    assert [(port.name, port.state, port.rate) for port in found(tmp_path)] == [
        ("mlx5_0:1", "INIT", 400.0),
        ("mlx5_1:1", "ACTIVE", 400.0),
        ("mlx5_1:2", "DOWN", 10.0),
    ]


def test_a_roce_card(tmp_path: Path) -> None:
    """Two versions for each address; empty entries and the default one are left out."""
    roce(tmp_path, "mlx5_2", "10.1.0.7", "ens1f0np0")
    (port,) = found(tmp_path)
    assert (port.link_layer, port.rate, port.netdev) == ("Ethernet", 100.0, "ens1f0np0")
    assert [(gid.index, gid.type) for gid in port.gids] == [
        *((0, "IB/RoCE v1"), (1, "RoCE v2")),
        *((2, "IB/RoCE v1"), (3, "RoCE v2")),
    ]
    assert [str(gid.ip) for gid in port.gids if gid.is_routable_v2] == ["10.1.0.7"]


def test_a_table_with_holes_and_a_vlan(tmp_path: Path) -> None:
    gids = {
        1: (LOCAL, "RoCE v2", "eth1"),
        7: (mapped("10.1.0.7"), "RoCE v2", "eth1.100"),
        9: ("fe80:0000:0000:0000:0000:0000:0000:0000", "RoCE v2", "eth1"),
    }
    hca(tmp_path, "mlx5_0", link_layer="Ethernet", gids=gids)
    (port,) = found(tmp_path)
    assert [(gid.index, gid.netdev) for gid in port.gids] == [(1, "eth1"), (7, "eth1.100")]


def test_the_network_interface_of_a_bond_and_of_a_port_that_is_down(tmp_path: Path) -> None:
    """The GID table names bond0; a port that is down has no table, but a place on the card."""
    roce(tmp_path, "mlx5_bond_0", "10.5.0.1", "bond0")
    hca(
        tmp_path, "mlx5_3", link_layer="Ethernet", state="1: DOWN", gids={},
        pci="0000:1c:00.0", netdev="eth3",
    )  # fmt: skip
    assert [port.netdev for port in found(tmp_path)] == ["eth3", "bond0"]


def test_the_network_interfaces_of_a_card_with_two_ports(tmp_path: Path) -> None:
    """By their numbers, not by their order: port 1 is dev_port 0."""
    for port, netdev in ((1, "eth9"), (2, "eth1")):
        hca(tmp_path, "mlx4_0", port=port, netdev=netdev, gids={})
    assert [port.netdev for port in found(tmp_path)] == ["eth9", "eth1"]


def test_software_rdma_is_known(tmp_path: Path) -> None:
    hca(tmp_path, "rxe0", top="sys/devices/virtual/infiniband")
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/rxe0").symlink_to(
        tmp_path / "sys/devices/virtual/infiniband/rxe0"
    )
    (port,) = found(tmp_path)
    assert port.software


def test_a_card_of_which_nothing_can_be_read(tmp_path: Path) -> None:
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
def test_rates(text: str, gbits: float) -> None:
    assert rdma.rate(text) == gbits


@given(st.text(max_size=30))
@settings(deadline=None)  # a busy machine is no defect
def test_no_text_is_too_odd(text: str) -> None:
    assert rdma.rate(text) >= 0
    assert isinstance(rdma.word(text), str)
