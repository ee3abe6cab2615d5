from collections.abc import Sequence

import pytest

from orchestrator.common.errors import EXIT_CHECK, CheckFailed
from orchestrator.head.nodes.facts import Facts, ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan.addresses import find_addresses
from tests.head.plan.probed import facts, interface


def places(nodes: Sequence[Facts], reached: Sequence[str]) -> list[str]:
    """Return "address interface" of each machine, from the addresses that the head reached."""
    found = find_addresses(
        [ProbedNode(Node(one.hostname), one, by) for one, by in zip(nodes, reached, strict=True)]
    )
    return [f"{place.address} {place.interface}" for place in found]


# docker0 and virbr0 have the same address everywhere; link-local ones are no place to meet.
EVERYWHERE = ("docker0 172.17.0.1/16", "virbr0 192.168.122.1/24")
ONE_MACHINE = facts("eth0 10.0.0.1/24", boot="one", network=1)
# The facts of each machine, the addresses that the head reached, and the places that are planned.
CLUSTERS: dict[str, tuple[list[Facts], list[str], list[str]]] = {
    "the usual cluster": (
        [facts(f"eth0 10.0.0.{n}/24") for n in (1, 2, 3)],
        ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
        ["10.0.0.1 eth0", "10.0.0.2 eth0", "10.0.0.3 eth0"],
    ),
    # The list names the machines by the slow network, the master by the fast one; the last machine
    # was not asked for its way to the master.
    "the interface is the one towards the master": (
        [
            facts("mgmt 192.168.0.1/24", "ib0 10.1.0.1/16"),
            facts(
                "ib0 10.1.0.2/16", "mgmt 192.168.0.2/24", routes={"10.1.0.1": ("ib0", "10.1.0.2")}
            ),
            facts("mgmt 192.168.0.3/24", "ib1 10.1.0.3/16"),
        ],
        ["10.1.0.1", "192.168.0.2", "192.168.0.3"],
        ["10.1.0.1 ib0", "10.1.0.2 ib0", "10.1.0.3 ib1"],
    ),
    "of two interfaces in one network the kernel knows which one is used": (
        [
            facts("eth0 10.0.0.1/24"),
            facts(
                *("eth0 10.0.0.2/24", "eth1 10.0.0.3/24"),
                routes={"10.0.0.1": ("eth1", "10.0.0.3")},
            ),
        ],
        ["10.0.0.1", "10.0.0.2"],
        ["10.0.0.1 eth0", "10.0.0.3 eth1"],
    ),
    "racks have no network in common, but a way": (
        [
            facts("eth0 10.0.1.5/24"),
            facts("eth0 10.0.2.5/24", routes={"10.0.1.5": ("eth0", "10.0.2.5")}),
        ],
        ["10.0.1.5", "10.0.2.5"],
        ["10.0.1.5 eth0", "10.0.2.5 eth0"],
    ),
    "the demo: several sshd on one machine that also has other addresses": (
        [facts("eth0 10.0.0.1/24")] * 3,
        ["127.0.0.2", "127.0.0.3", "127.0.0.4"],
        ["127.0.0.2 lo", "127.0.0.3 lo", "127.0.0.4 lo"],
    ),
    "localhost alone": ([facts("eth0 10.0.0.1/24")], ["127.0.0.1"], ["127.0.0.1 lo"]),
    "localhost alone, by IPv6": ([facts("eth0 10.0.0.1/24")], ["::1"], ["::1 lo"]),
    "another loopback address alone": (
        *([facts("eth0 10.0.0.1/24")], ["127.0.0.2"], ["127.0.0.2 lo"]),
    ),
    "localhost as master of others is its address on their network": (
        [facts("docker0 172.17.0.1/16", f"eth0 10.0.0.{n}/24") for n in (1, 2)],
        ["127.0.0.1", "10.0.0.2"],
        ["10.0.0.1 eth0", "10.0.0.2 eth0"],
    ),
    # A cloud: the list has public addresses, the machines know only their private ones.
    "NAT is looked behind": (
        [facts("ens5 172.31.0.1/20"), facts("ens5 172.31.0.2/20")],
        ["54.0.0.1", "54.0.0.2"],
        ["172.31.0.1 ens5", "172.31.0.2 ens5"],
    ),
    # Two clouds: the kernel of each machine knows the way to the public address of the master.
    "NAT without a network in common is taken as the list says": (
        [
            facts("ens5 172.31.0.1/20", routes={"54.0.0.1": ("ens5", "172.31.0.1")}),
            facts("eth0 192.168.0.2/24", routes={"54.0.0.1": ("eth0", "192.168.0.2")}),
        ],
        ["54.0.0.1", "55.0.0.2"],
        ["172.31.0.1 ens5", "192.168.0.2 eth0"],
    ),
    # Its public address is not reachable from inside, and no other machine has to reach it.
    "one machine behind NAT needs no way out": (
        *([facts("ens5 172.31.0.1/20")], ["54.0.0.1"], ["127.0.0.1 lo"]),
    ),
    "one machine behind a jump host needs no way out": (
        *([facts("ens5 172.31.0.1/20")], [""], ["127.0.0.1 lo"]),
    ),
    "networks that every machine has for itself are none in common": (
        [facts(*EVERYWHERE, f"eth0 fe80::{n}/64", f"eth0 10.0.0.{n}/24") for n in (1, 2)],
        ["", ""],
        ["10.0.0.1 eth0", "10.0.0.2 eth0"],
    ),
    "IPv6": (
        [facts("eth0 2001:db8::1/64"), facts("eth0 2001:db8::2/64")],
        ["2001:db8::1", "2001:db8::2"],
        ["2001:db8::1 eth0", "2001:db8::2 eth0"],
    ),
    # Without its interface it leads nowhere, and torch has no place for that.
    "a link-local address of IPv6 is good for ssh alone": (
        [facts(f"eth0 fe80::{n}/64", f"eth0 10.0.0.{n}/24") for n in (1, 2)],
        ["fe80::1%eth0", "fe80::2%eth0"],
        ["10.0.0.1 eth0", "10.0.0.2 eth0"],
    ),
    "one machine by its link-local address": (
        [facts("eth0 fe80::1/64", "eth0 10.0.0.1/24")],
        *(["fe80::1"], ["127.0.0.1 lo"]),
    ),
    "both families do not mix": (
        [
            facts("eth0 10.0.0.1/24", "eth0 2001:db8::1/64"),
            facts("eth0 2001:db8::2/64", "eth1 10.9.0.2/24"),
        ],
        ["", ""],
        ["2001:db8::1 eth0", "2001:db8::2 eth0"],
    ),
    "one machine twice": ([ONE_MACHINE] * 2, ["10.0.0.1", "10.0.0.1"], ["10.0.0.1 eth0"] * 2),
    "one machine by two names": (
        *([ONE_MACHINE] * 2, ["10.0.0.1", "127.0.0.1"], ["10.0.0.1 eth0"] * 2),
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_ranks_meet_at_common_address(name: str) -> None:
    nodes, reached, planned = CLUSTERS[name]
    assert places(nodes, reached) == planned


# -- what cannot work -------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[Facts], list[str], list[str]]] = {
    "no way to the master": (
        [
            facts("eth0 10.0.1.5/24"),
            facts("eth0 10.9.9.9/24", hostname="gpu07", routes={"gpu01": ("lo", "127.0.0.1")}),
        ],
        ["10.0.1.5", "10.9.9.9"],
        ["gpu07 has no route to ", " 10.0.1.5"],
    ),
    "behind a jump host without a network in common": (
        [facts("eth0 10.0.1.1/24"), facts("eth0 10.0.2.2/24")],
        ["", ""],
        ["it is behind a jump host"],
    ),
    "only link-local addresses of IPv6": (
        [facts(f"eth0 fe80::{n}/64") for n in (1, 2)],
        ["fe80::1%eth0", "fe80::2%eth0"],
        ["the list calls it fe80::1"],
    ),
    # Two networks that use the same addresses: it would call itself and wait for ever.
    "a worker that has the master's address itself": (
        [
            facts("eth0 192.168.1.10/24", boot="one", network=1),
            facts("eth0 10.0.0.2/24", "wlan0 192.168.1.10/24", hostname="gpu02", boot="two"),
        ],
        ["192.168.1.10", "10.0.0.2"],
        [
            "gpu02 itself has the master's address 192.168.1.10 (on wlan0)",
            "two networks use the same addresses",
        ],
    ),
    "two machines with one address": (
        [
            facts("eth0 10.0.0.1/24", boot="one"),
            facts("eth0 10.0.0.7/24", hostname="gpu02", boot="two"),
            facts("eth0 10.0.0.7/24", hostname="gpu03", boot="three"),
        ],
        ["10.0.0.1", "10.0.0.7", "10.0.0.7"],
        ["gpu02 and gpu03 are two machines with one address, 10.0.0.7"],
    ),
    "a worker without the master's family": (
        [facts("eth0 10.0.0.1/24"), facts("eth0 2001:db8::2/64", hostname="gpu02")],
        ["10.0.0.1", "2001:db8::2"],
        ["gpu02 has no route", "it has eth0 2001:db8::2/64"],
    ),
    "a worker without any address": (
        [facts("eth0 10.0.0.1/24"), facts("eth0 fe80::2/64")],
        ["10.0.0.1", ""],
        ["no address other than loopback"],
    ),
    "an interface that is down": (
        [
            facts("eth0 10.0.0.1/24"),
            facts("eth1 10.0.0.2/24", interfaces=(interface("eth1", state="down"),)),
        ],
        ["10.0.0.1", "10.9.0.2"],
        ["no route"],
    ),
    # Each reaches the master; the kernel was asked for the others and knows no way.
    "workers that do not reach each other": (
        [
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
        ],
        ["10.0.0.1", "10.0.1.2", "10.0.2.3"],
        ["gpu02 has no route to gpu03 at 10.0.2.3"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cluster_without_common_network_is_refused(name: str) -> None:
    nodes, reached, words = REFUSED[name]
    with pytest.raises(CheckFailed) as failed:
        places(nodes, reached)
    assert [part for part in words if part not in failed.value.what] == []
    assert failed.value.exit_code == EXIT_CHECK
    assert failed.value.fix
