from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator.common.errors import EXIT_CHECK, CheckFailed
from orchestrator.head.nodes.facts import Facts, ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan.addresses import find
from orchestrator.head.plan.model import NodeAddress
from tests.head.plan.probed import facts, interface


def places(nodes: Sequence[Facts], reached: Sequence[str]) -> list[NodeAddress]:
    return find(
        [ProbedNode(Node(one.hostname), one, by) for one, by in zip(nodes, reached, strict=True)]
    )


def test_the_usual_cluster() -> None:
    nodes = [facts(f"eth0 10.0.0.{n}/24") for n in (1, 2, 3)]
    reached = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert places(nodes, reached) == [NodeAddress(f"10.0.0.{n}", "eth0") for n in (1, 2, 3)]


def test_the_interface_is_the_one_towards_the_master() -> None:
    """Two networks; the list names them by the slow one, the master by the fast one."""
    nodes = [
        facts("mgmt 192.168.0.1/24", "ib0 10.1.0.1/16"),
        facts("ib0 10.1.0.2/16", "mgmt 192.168.0.2/24", routes={"10.1.0.1": ("ib0", "10.1.0.2")}),
        facts("mgmt 192.168.0.3/24", "ib1 10.1.0.3/16"),  # it was not asked for the way
    ]
    found = places(nodes, ["10.1.0.1", "192.168.0.2", "192.168.0.3"])
    assert found == [
        NodeAddress("10.1.0.1", "ib0"),
        NodeAddress("10.1.0.2", "ib0"),
        NodeAddress("10.1.0.3", "ib1"),
    ]


def test_what_the_kernel_says_of_the_way_wins() -> None:
    """Two interfaces in one network: the routing table knows which one is used."""
    worker = facts(
        "eth0 10.0.0.2/24", "eth1 10.0.0.3/24", routes={"10.0.0.1": ("eth1", "10.0.0.3")}
    )
    nodes = [facts("eth0 10.0.0.1/24"), worker]
    assert places(nodes, ["10.0.0.1", "10.0.0.2"])[1] == NodeAddress("10.0.0.3", "eth1")


def test_a_routed_network() -> None:
    """Racks: no network in common, but a way."""
    worker = facts("eth0 10.0.2.5/24", routes={"10.0.1.5": ("eth0", "10.0.2.5")})
    nodes = [facts("eth0 10.0.1.5/24"), worker]
    assert places(nodes, ["10.0.1.5", "10.0.2.5"])[1] == NodeAddress("10.0.2.5", "eth0")


def test_no_way_to_the_master() -> None:
    lost = facts("eth0 10.9.9.9/24", hostname="gpu07", routes={"gpu01": ("lo", "127.0.0.1")})
    nodes = [facts("eth0 10.0.1.5/24"), lost]
    with pytest.raises(CheckFailed, match=r"gpu07 has no route to .* 10\.0\.1\.5") as failed:
        places(nodes, ["10.0.1.5", "10.9.9.9"])
    assert failed.value.exit_code == EXIT_CHECK
    assert failed.value.fix


# -- loopback ---------------------------------------------------------------------------------


def test_a_cluster_of_loopback_addresses() -> None:
    """The demo: several sshd on one machine that also has other addresses."""
    nodes = [facts("eth0 10.0.0.1/24")] * 3
    reached = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert places(nodes, reached) == [NodeAddress(address, "lo") for address in reached]


@pytest.mark.parametrize("reached", ["127.0.0.1", "::1", "127.0.0.2"])
def test_localhost_alone(reached: str) -> None:
    assert places([facts("eth0 10.0.0.1/24")], [reached]) == [NodeAddress(reached, "lo")]


def test_localhost_as_master_of_others_is_its_address_on_their_network() -> None:
    nodes = [
        facts("docker0 172.17.0.1/16", "eth0 10.0.0.1/24"),
        facts("docker0 172.17.0.1/16", "eth0 10.0.0.2/24"),
    ]
    found = places(nodes, ["127.0.0.1", "10.0.0.2"])
    assert found == [NodeAddress(f"10.0.0.{n}", "eth0") for n in (1, 2)]


# -- NAT and jump hosts -----------------------------------------------------------------------


def test_nat_is_looked_behind() -> None:
    """A cloud: the list has public addresses, the machines know only their private ones."""
    nodes = [facts("ens5 172.31.0.1/20"), facts("ens5 172.31.0.2/20")]
    found = places(nodes, ["54.0.0.1", "54.0.0.2"])
    assert found == [NodeAddress("172.31.0.1", "ens5"), NodeAddress("172.31.0.2", "ens5")]


def test_nat_without_a_network_in_common_is_taken_as_the_list_says() -> None:
    """Two clouds: the public address it must be, and the way there the kernel knows."""
    worker = facts("eth0 192.168.0.2/24", routes={"54.0.0.1": ("eth0", "192.168.0.2")})
    nodes = [facts("ens5 172.31.0.1/20", routes={"54.0.0.1": ("ens5", "172.31.0.1")}), worker]
    found = places(nodes, ["54.0.0.1", "55.0.0.2"])
    assert found[1] == NodeAddress("192.168.0.2", "eth0")
    assert found[0].interface == "ens5"


@pytest.mark.parametrize("reached", ["54.0.0.1", ""])
def test_one_machine_behind_nat_or_a_jump_host_needs_no_way_out(reached: str) -> None:
    """Its public address is not reachable from inside, and no other machine has to reach it."""
    assert places([facts("ens5 172.31.0.1/20")], [reached]) == [NodeAddress("127.0.0.1", "lo")]


def test_behind_a_jump_host_without_a_network_in_common() -> None:
    nodes = [facts("eth0 10.0.1.1/24"), facts("eth0 10.0.2.2/24")]
    with pytest.raises(CheckFailed, match="it is behind a jump host"):
        places(nodes, ["", ""])


def test_networks_that_every_machine_has_for_itself_are_none_in_common() -> None:
    """docker0 and virbr0 have the same address everywhere; link-local ones are no place to meet."""
    own = ("docker0 172.17.0.1/16", "virbr0 192.168.122.1/24")
    nodes = [
        facts(*own, "eth0 fe80::1/64", "eth0 10.0.0.1/24"),
        facts(*own, "eth0 fe80::2/64", "eth0 10.0.0.2/24"),
    ]
    assert [place.address for place in places(nodes, ["", ""])] == ["10.0.0.1", "10.0.0.2"]


# -- IPv6 -------------------------------------------------------------------------------------


def test_ipv6() -> None:
    nodes = [facts("eth0 2001:db8::1/64"), facts("eth0 2001:db8::2/64")]
    found = places(nodes, ["2001:db8::1", "2001:db8::2"])
    assert found == [NodeAddress("2001:db8::1", "eth0"), NodeAddress("2001:db8::2", "eth0")]


def test_a_link_local_address_of_ipv6_is_good_for_ssh_alone() -> None:
    """Without its interface it leads nowhere, and torch has no place for that."""
    local = [f"eth0 fe80::{n}/64" for n in (1, 2)]
    reached = ["fe80::1%eth0", "fe80::2%eth0"]
    nodes = [facts(local[0], "eth0 10.0.0.1/24"), facts(local[1], "eth0 10.0.0.2/24")]
    assert places(nodes, reached) == [NodeAddress(f"10.0.0.{n}", "eth0") for n in (1, 2)]
    assert "the list calls it fe80::1" in refused([facts(one) for one in local], reached)
    assert places(nodes[:1], ["fe80::1"]) == [NodeAddress("127.0.0.1", "lo")]


def test_both_families_do_not_mix() -> None:
    nodes = [
        facts("eth0 10.0.0.1/24", "eth0 2001:db8::1/64"),
        facts("eth0 2001:db8::2/64", "eth1 10.9.0.2/24"),
    ]
    found = places(nodes, ["", ""])
    assert found == [NodeAddress("2001:db8::1", "eth0"), NodeAddress("2001:db8::2", "eth0")]


# -- what cannot work -------------------------------------------------------------------------


def refused(nodes: Sequence[Facts], reached: Sequence[str]) -> str:
    with pytest.raises(CheckFailed) as failed:
        places(nodes, reached)
    assert failed.value.fix
    return failed.value.what


def test_a_worker_that_has_the_masters_address_itself() -> None:
    """Two networks that use the same addresses: it would call itself and wait for ever."""
    nodes = [
        facts("eth0 192.168.1.10/24", boot="one", network=1),
        facts("eth0 10.0.0.2/24", "wlan0 192.168.1.10/24", hostname="gpu02", boot="two"),
    ]
    said = refused(nodes, ["192.168.1.10", "10.0.0.2"])
    assert "gpu02 itself has the master's address 192.168.1.10 (on wlan0)" in said
    assert "two networks use the same addresses" in said


def test_one_machine_by_two_names_is_none_of_that() -> None:
    one = facts("eth0 10.0.0.1/24", boot="one", network=1)
    assert places([one, one], ["10.0.0.1", "10.0.0.1"]) == [NodeAddress("10.0.0.1", "eth0")] * 2
    assert places([one, one], ["10.0.0.1", "127.0.0.1"]) == [NodeAddress("10.0.0.1", "eth0")] * 2


def test_two_machines_with_one_address() -> None:
    nodes = [
        facts("eth0 10.0.0.1/24", boot="one"),
        facts("eth0 10.0.0.7/24", hostname="gpu02", boot="two"),
        facts("eth0 10.0.0.7/24", hostname="gpu03", boot="three"),
    ]
    said = refused(nodes, ["10.0.0.1", "10.0.0.7", "10.0.0.7"])
    assert "gpu02 and gpu03 are two machines with one address, 10.0.0.7" in said


def test_a_worker_without_the_masters_family() -> None:
    nodes = [facts("eth0 10.0.0.1/24"), facts("eth0 2001:db8::2/64", hostname="gpu02")]
    said = refused(nodes, ["10.0.0.1", "2001:db8::2"])
    assert "gpu02 has no route" in said and "it has eth0 2001:db8::2/64" in said


def test_a_worker_without_any_address() -> None:
    said = refused([facts("eth0 10.0.0.1/24"), facts("eth0 fe80::2/64")], ["10.0.0.1", ""])
    assert "no address other than loopback" in said


def test_an_interface_that_is_down_is_no_way() -> None:
    down = facts("eth1 10.0.0.2/24", interfaces=(interface("eth1", state="down"),))
    assert "no route" in refused([facts("eth0 10.0.0.1/24"), down], ["10.0.0.1", "10.9.0.2"])


def test_workers_that_do_not_reach_each_other() -> None:
    """Each reaches the master; the kernel was asked for the others and knows no way."""
    nodes = [
        facts("eth0 10.0.0.1/16"),
        facts(
            "eth0 10.0.1.2/24",
            hostname="gpu02",
            routes={"10.0.0.1": ("eth0", "10.0.1.2"), "10.0.2.3": ("", "")},
        ),
        facts(
            "eth0 10.0.2.3/24",
            hostname="gpu03",
            routes={"10.0.0.1": ("eth0", "10.0.2.3"), "10.0.1.2": ("eth0", "10.0.2.3")},
        ),
    ]
    said = refused(nodes, ["10.0.0.1", "10.0.1.2", "10.0.2.3"])
    assert said == "gpu02 has no route to gpu03 at 10.0.2.3"
