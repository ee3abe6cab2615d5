"""The variables for NCCL and gloo on different clusters."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.common.errors import EXIT_CHECK, CheckFailed
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan import nccl_env, nccl_transport
from orchestrator.head.plan.nccl_env import Network
from orchestrator.protocol.facts import Gid, Interface, RdmaPort
from tests.head.plan.probed import facts, infiniband, interface, roce, software

MIXED_GIDS = (
    roce("mlx5_0", "eth1", "10.1.0.1", index=3),
    roce("mlx5_1", "eth2", "10.2.0.1", index=5),
)


def node(
    number: int,
    *addresses: str,
    name: str = "eth0",
    rdma: Sequence[RdmaPort] = (),
    interfaces: Sequence[Interface] = (),
    nccl: str = "2.27.5",
    ifname: str | None = None,
    **fields: Any,
) -> ProbedNode:
    """gpu01, 10.0.0.1 on eth0, eight GPUs."""
    machine = facts(
        f"{name} 10.0.0.{number}/24",
        *addresses,
        hostname=f"gpu{number:02}",
        gpus=fields.pop("gpus", 8),
        boot=f"boot{number}",
        rdma=tuple(rdma),
        interfaces=(interface(name), *interfaces) if interfaces else (),
        software=software(nccl),
        **fields,
    )
    return ProbedNode(Node(machine.hostname, ifname=ifname), machine, f"10.0.0.{number}")


def told(net: Network, index: int) -> dict[str, str]:
    return {setting.name: setting.value for setting in net.settings[index]}


def why(net: Network, name: str, index: int = 0) -> str:
    (found,) = [setting.why for setting in net.settings[index] if setting.name == name]
    return found


def sockets(name: str = "eth0") -> dict[str, str]:
    return {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name}


OFF = {"NCCL_IB_DISABLE": "1"}


def cards(listed: str, **more: str) -> dict[str, str]:
    return {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": f"={listed}", **more}


@dataclass
class Cluster:
    """Machines, and what is to come of them."""

    nodes: Sequence[ProbedNode]
    kind: str
    told: Sequence[dict[str, str]]  # per node, beside the interface; one dict: the same on all
    sockets: Sequence[str] = ("eth0",)
    # Each text is a part of one note.
    notes: Sequence[str] = ()
    profile: str = "auto"
    # This maps a variable to a part of its reason on the first node.
    why: dict[str, str] = field(default_factory=dict)


EIGHT = [infiniband(f"mlx5_{n}") for n in range(8)]
STORAGE = roce("mlx5_8", "eth1", "10.5.0.1", rate=25.0)
CLUSTERS = {
    "Ethernet only": Cluster([node(1), node(2)], "ethernet", [{}]),
    "one machine alone needs none of it": Cluster([node(1, rdma=EIGHT)], "none", [{}]),
    "other names on every node": Cluster(
        [node(1, name="ens3"), node(2, name="enp5s0f1"), node(3, name="bond0")],
        "ethernet", [{}], sockets=["ens3", "enp5s0f1", "bond0"],
    ),
    "InfiniBand, with Ethernet for files beside it": Cluster(
        [node(n, rdma=[*EIGHT, STORAGE]) for n in (1, 2)],
        "infiniband", [cards(",".join(f"mlx5_{n}:1" for n in range(8)))],
        why={"NCCL_IB_HCA": "the 8 active ports for InfiniBand, 400 Gb/s; not mlx5_8:1 (Ethernet)"},
    ),
    "a port that is down is left out, on its node": Cluster(
        [
            node(1, rdma=[infiniband("mlx5_0"), infiniband("mlx5_1", state="DOWN")]),
            node(2, rdma=[infiniband("mlx5_0"), infiniband("mlx5_1")]),
        ],
        "infiniband", [cards("mlx5_0:1"), cards("mlx5_0:1,mlx5_1:1")],
        why={"NCCL_IB_HCA": "not mlx5_1:1 (DOWN)"},
    ),
    "a port that initializes is no active one": Cluster(
        [node(n, rdma=[infiniband("mlx5_0"), infiniband("mlx5_1", state="INIT")]) for n in (1, 2)],
        "infiniband", [cards("mlx5_0:1")],
    ),
    "the second port of a card, and other names of cards on every node": Cluster(
        [
            node(1, rdma=[infiniband("mlx5_0", port=2)]),
            node(2, rdma=[infiniband("ibp12s0", rate=400)]),
        ],
        "infiniband", [cards("mlx5_0:2"), cards("ibp12s0:1")],
    ),
    "mixed rates on a node: the slow port is for files": Cluster(
        [node(n, rdma=[infiniband("mlx5_0"), infiniband("mlx5_1", rate=100)]) for n in (1, 2)],
        "infiniband", [cards("mlx5_0:1")],
        why={"NCCL_IB_HCA": "not mlx5_1:1 (100 Gb/s)"},
    ),
    "RoCE, where NCCL finds the GID by itself": Cluster(
        [node(n, f"eth1 10.1.0.{n}/24", rdma=[roce("mlx5_0", "eth1", f"10.1.0.{n}")])
         for n in (1, 2)],
        "roce", [cards("mlx5_0:1")],
    ),
    "RoCE with an older NCCL: the index of v2, behind v1, and per node": Cluster(
        [
            node(n, f"eth1 10.1.0.{n}/24", nccl="2.20.5",
                 rdma=[roce("mlx5_0", "eth1", f"10.1.0.{n}", index=1 + 2 * n)])
            for n in (1, 2)
        ],
        "roce",
        [cards("mlx5_0:1", NCCL_IB_GID_INDEX="3"), cards("mlx5_0:1", NCCL_IB_GID_INDEX="5")],
        why={"NCCL_IB_GID_INDEX": "NCCL 2.20.5 takes one number"},
    ),
    "RoCE with an NCCL whose version cannot be seen": Cluster(
        [node(n, f"eth1 10.1.0.{n}/24", nccl="", rdma=[roce("mlx5_0", "eth1", f"10.1.0.{n}")])
         for n in (1, 2)],
        "roce", [cards("mlx5_0:1", NCCL_IB_GID_INDEX="3")],
    ),
    "RoCE with an older NCCL and cards that differ": Cluster(
        [
            node(1, "eth1 10.1.0.1/24", "eth2 10.2.0.1/24", nccl="2.19.3", rdma=MIXED_GIDS),
            node(2, "eth1 10.1.0.2/24", "eth2 10.2.0.2/24", nccl="2.19.3", rdma=[
                roce("mlx5_0", "eth1", "10.1.0.2"), roce("mlx5_1", "eth2", "10.2.0.2")]),
        ],
        "roce",
        [cards("mlx5_0:1", NCCL_IB_GID_INDEX="3"),
         cards("mlx5_0:1,mlx5_1:1", NCCL_IB_GID_INDEX="3")],
        notes=["gpu01: NCCL 2.19.3 takes one GID index for all cards, so it cannot use mlx5_1:1"],
    ),
    "RoCE over IPv6": Cluster(
        [node(n, f"eth1 2001:db8::{n}/64", rdma=[
            roce("mlx5_0", "eth1", f"2001:0db8:0000:0000:0000:0000:0000:000{n}")]) for n in (1, 2)],
        "roce", [cards("mlx5_0:1", NCCL_IB_ADDR_FAMILY="AF_INET6")],
    ),
    "RoCE with a slow bond for management": Cluster(
        [node(n, f"eth1 10.1.0.{n}/24", f"bond0 10.5.0.{n}/24", rdma=[
            roce("mlx5_0", "eth1", f"10.1.0.{n}", rate=400),
            roce("mlx5_bond_0", "bond0", f"10.5.0.{n}", rate=50)]) for n in (1, 2)],
        "roce", [cards("mlx5_0:1")], why={"NCCL_IB_HCA": "not mlx5_bond_0:1 (50 Gb/s)"},
    ),
    "RoCE with a bond as fast as the others": Cluster(
        [node(n, f"eth1 10.1.0.{n}/24", f"bond0 10.5.0.{n}/24", rdma=[
            roce("mlx5_0", "eth1", f"10.1.0.{n}"),
            roce("mlx5_bond_0", "bond0", f"10.5.0.{n}")]) for n in (1, 2)],
        "roce", [cards("mlx5_0:1")], why={"NCCL_IB_HCA": "a bond next to single ports"},
    ),
    "RoCE with a bond and nothing else": Cluster(
        [node(n, name="bond0", rdma=[roce("mlx5_bond_0", "bond0", f"10.0.0.{n}")]) for n in (1, 2)],
        "roce", [cards("mlx5_bond_0:1")], sockets=["bond0"],
    ),
    "RoCE on routed networks: every port has one of its own": Cluster(
        [node(n, f"eth1 10.1.{n}.0/31", f"eth2 10.2.{n}.0/31", rdma=[
            roce("mlx5_0", "eth1", f"10.1.{n}.0"),
            roce("mlx5_1", "eth2", f"10.2.{n}.0")]) for n in (1, 2)],
        "roce", [cards("mlx5_0:1,mlx5_1:1")],
    ),
    "a RoCE port without an IP address": Cluster(
        [node(n, f"eth1 10.1.0.{n}/24", rdma=[
            roce("mlx5_0", "eth1", f"10.1.0.{n}"), roce("mlx5_1", "eth2")]) for n in (1, 2)],
        "roce", [cards("mlx5_0:1")], why={"NCCL_IB_HCA": "eth2 has no IP address"},
    ),
    "RoCE on a VLAN": Cluster(
        [node(n, f"eth1.100 10.1.0.{n}/24", nccl="2.18.3", rdma=[
            roce("mlx5_0", "eth1.100", f"10.1.0.{n}", index=5)]) for n in (1, 2)],
        "roce", [cards("mlx5_0:1", NCCL_IB_GID_INDEX="5")],
    ),
    "RoCE on some nodes only: all use TCP, and it is said": Cluster(
        [node(1, "eth1 10.1.0.1/24", rdma=[roce("mlx5_0", "eth1", "10.1.0.1")]),
         node(2, rdma=[roce("mlx5_0", "eth1", state="DOWN")])],
        "ethernet", [OFF],
        notes=["WARNING: NCCL uses TCP, because gpu01 has RoCE and the others do not: "
               "gpu02 (mlx5_0:1: DOWN)"],
    ),
    "cards that no process can use are switched off": Cluster(
        [node(n, rdma=[infiniband("mlx5_0", state="DOWN")]) for n in (1, 2)], "ethernet", [OFF],
    ),
    "software RDMA is no RDMA": Cluster(
        [node(n, rdma=[roce("rxe0", "eth0", f"10.0.0.{n}", software=True)]) for n in (1, 2)],
        "ethernet", [OFF],
    ),
    "a link layer that NCCL does not know": Cluster(
        [node(n, rdma=[infiniband("efa_0", link_layer="Unspecified")]) for n in (1, 2)],
        "ethernet", [OFF],
    ),
    "without GPUs no node needs the same cards": Cluster(
        [node(1, gpus=0, rdma=EIGHT), node(2, gpus=0)], "ethernet", [OFF],
        notes=["WARNING: NCCL uses TCP, because gpu01 has InfiniBand"],
    ),
    # NCCL takes the first address of an interface; the one of the other family leads nowhere.
    "IPv6 only": Cluster(
        [ProbedNode(Node(f"n{n}"), facts(f"eth0 2001:db8::{n}/64", boot=str(n)), f"2001:db8::{n}")
         for n in (1, 2)],
        "ethernet", [{"NCCL_SOCKET_FAMILY": "AF_INET6"}],
    ),
    "the demo: several nodes on one machine": Cluster(
        [ProbedNode(Node(f"n{n}"), facts(boot="one"), f"127.0.0.{n}") for n in (2, 3)],
        "ethernet", [{}], sockets=["lo"],
    ),
    "docker and libvirt have addresses as well": Cluster(
        [node(n, "docker0 172.17.0.1/16", "virbr0 192.168.122.1/24") for n in (1, 2)],
        "ethernet", [{}],
    ),
    "a VLAN on a bond": Cluster(
        [node(n, name="bond0.42", interfaces=[interface("bond0", "bond")]) for n in (1, 2)],
        "ethernet", [{}], sockets=["bond0.42"],
    ),
    "the profile says TCP": Cluster(
        [node(n, rdma=EIGHT) for n in (1, 2)], "ethernet", [OFF], profile="ethernet",
        why={"NCCL_IB_DISABLE": "nccl.profile is ethernet"},
    ),
    "the profile says RoCE, where there is also InfiniBand": Cluster(
        [node(n, f"eth1 10.1.0.{n}/24", rdma=[*EIGHT, roce("mlx5_8", "eth1", f"10.1.0.{n}")])
         for n in (1, 2)],
        "roce", [cards("mlx5_8:1")], profile="roce",
    ),
    "the profile says debug": Cluster(
        [node(1), node(2)], "ethernet",
        [{"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH",
          "TORCH_DISTRIBUTED_DEBUG": "INFO"}],
        profile="debug",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLUSTERS)
def test_make_sets_variables_for_cluster(name: str) -> None:
    cluster = CLUSTERS[name]
    net = nccl_env.make_network(cluster.nodes, cluster.profile)
    assert net.fabric.kind == cluster.kind
    count = len(cluster.nodes)
    wanted = list(cluster.told) * (count if len(cluster.told) == 1 else 1)
    interfaces = list(cluster.sockets) * (count if len(cluster.sockets) == 1 else 1)
    for index in range(count):
        assert told(net, index) == {**sockets(interfaces[index]), **wanted[index]}
    assert len(net.notes) == len(cluster.notes)
    for part, note in zip(cluster.notes, net.notes, strict=True):
        assert part in note
    for name, part in cluster.why.items():
        assert part in why(net, name)
    assert all(setting.why and not setting.yours for mine in net.settings for setting in mine)


def test_best_gid_prefers_ipv4_on_own_interface() -> None:
    """IPv4 before IPv6, the card's own interface before a VLAN on it, then the lowest."""
    told_v4 = "0000:0000:0000:0000:0000:ffff:0a01:000"
    gids = (
        Gid(1, "2001:0db8:0000:0000:0000:0000:0000:0001", "RoCE v2", "eth1"),
        Gid(3, f"{told_v4}1", "RoCE v2", "eth1.100"),
        Gid(5, f"{told_v4}2", "RoCE v2", "eth1"),
        Gid(7, f"{told_v4}3", "RoCE v2", "eth1"),
    )
    port = roce("mlx5_0", "eth1", gids=gids)
    assert nccl_transport.best_gid(port).index == 5
    assert nccl_transport.best_gid(roce("mlx5_0", "eth1", gids=gids[:2])).index == 3
    assert nccl_transport.best_gid(roce("mlx5_0", "eth1", gids=gids[:1])).index == 1


# -- sockets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "vendor", "count"),
    [
        (None, "", None), (1000, "", None), (10000, "0x8086", None), (25000, "0x15b3", "2"),
        (100000, "0x15b3", "4"), (400000, "", "4"),
        (100000, "0x1d0f", None), (100000, "0x1ae0", None),  # AWS, Google: NCCL knows them
    ],
)  # fmt: skip
def test_slow_sockets_get_more_connections(
    speed: int | None, vendor: str, count: str | None
) -> None:
    """Below a VLAN and a bond is the card that decides."""
    layers = [
        interface("bond0", "bond", members=("eth0", "eth1")),
        interface("eth0", vendor=vendor),
    ]

    def one(number: int) -> ProbedNode:
        found = node(number, name="v100", interfaces=layers)
        own = interface("v100", "vlan", speed, members=("bond0",))
        machine = facts(
            f"v100 10.0.0.{number}/24", boot=str(number), interfaces=(own, *layers), gpus=8
        )
        return ProbedNode(found.node, machine, found.reached)

    net = nccl_env.make_network([one(1), one(2)])
    assert told(net, 0).get("NCCL_SOCKET_NTHREADS") == count
    assert told(net, 0).get("NCCL_NSOCKS_PERTHREAD") == count
    if count and speed:
        assert f"{speed // 1000} Gb/s" in why(net, "NCCL_SOCKET_NTHREADS")
    cards_instead = nccl_env.make_network([node(n, rdma=EIGHT) for n in (1, 2)])
    assert "NCCL_SOCKET_NTHREADS" not in told(cards_instead, 0)


@pytest.mark.parametrize("name", ["NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN"])
def test_user_choice_of_cards_is_kept(name: str) -> None:
    members = [node(1, rdma=EIGHT), node(2)]
    net = nccl_env.make_network(members, theirs=frozenset({name}))
    assert (net.fabric.kind, told(net, 0)) == ("yours", sockets())
    assert name in net.hints[0]
    hinted = nccl_env.make_network(members, hinted=frozenset({name, "NCCL_DEBUG"}))
    assert (hinted.fabric.kind, told(hinted, 0)) == ("yours", sockets())
    with pytest.raises(CheckFailed):
        nccl_env.make_network(members, hinted=frozenset({"NCCL_DEBUG"}))


def test_hint_for_some_nodes_keeps_settings_of_others() -> None:
    net = nccl_env.make_network(
        [node(n, rdma=EIGHT) for n in (1, 2)], hinted=frozenset({"NCCL_IB_HCA"})
    )
    assert "NCCL_IB_HCA" in told(net, 0)


def test_variable_set_on_node_is_kept() -> None:
    own = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "WARN"}
    net = nccl_env.make_network([node(1, environment=own), node(2)])
    assert told(net, 0) == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert why(net, "NCCL_SOCKET_IFNAME") == "set on the node itself; computed: =eth0"
    assert [setting.yours for setting in net.settings[0]] == [True, False]
    assert told(net, 1) == sockets()


def test_ifname_of_node_list_is_used() -> None:
    net = nccl_env.make_network([node(1, ifname="ib0"), node(2)])
    assert told(net, 0) == sockets("ib0")
    assert [(s.why, s.yours) for s in net.settings[0]] == [("ifname= in the node list", True)] * 2


@pytest.mark.parametrize(
    ("ifname", "words"),
    [
        ("eth", "gpu02 has no interface 'eth' (ifname= in the node list); it has eth0, eth1, eth2;"
                " did you mean"),
        ("eth1", "the interface eth1 of gpu02 (ifname= in the node list) is down"),
        ("eth2", "the interface eth2 of gpu02 (ifname= in the node list) has no address"),
        ("eth0,eth2", "eth2 of gpu02"),
    ],
)  # fmt: skip
def test_invalid_ifname_is_refused(ifname: str, words: str) -> None:
    others = [interface("eth1", state="down"), interface("eth2")]
    with pytest.raises(CheckFailed) as failed:
        nccl_env.make_network([node(1), node(2, interfaces=others, ifname=ifname)])
    assert words in failed.value.what


@pytest.mark.parametrize(
    ("patterns", "misses"),
    [
        ("=eth0", False), ("eth", False), ("e", False), ("ib,eth", False), ("^docker,lo", False),
        ("^=lo", False), ("=eth", True), ("ib0", True), ("ib", True), ("^eth,lo", True), ("", True),
    ],
)  # fmt: skip
def test_unmatched_patterns_agree_with_nccl(patterns: str, misses: bool) -> None:
    assert nccl_env.matches_no_interface(patterns, node(1)) == misses


# -- what cannot work ---------------------------------------------------------------------------

IMPOSSIBLE: dict[str, tuple[list[ProbedNode], str, str]] = {
    "InfiniBand on one, Ethernet on the other": (
        [node(1, rdma=EIGHT), node(2)], "auto",
        "gpu01 would use InfiniBand, but there is none to use on: gpu02 (no such card)",
    ),
    "InfiniBand on one, RoCE on the other": (
        [node(1, rdma=EIGHT), node(2, "eth1 10.1.0.2/24", rdma=[roce("m", "eth1", "10.1.0.2")])],
        "auto", "none to use on: gpu02 (m:1: Ethernet)",
    ),
    "InfiniBand whose link is down on one": (
        [node(1, rdma=EIGHT), node(2, rdma=[infiniband("mlx5_0", state="DOWN")]), node(3)], "auto",
        "gpu02 (mlx5_0:1: DOWN); gpu03 (no such card)",
    ),
    "InfiniBand that could not be read on one": (
        [node(1, rdma=EIGHT), node(2, problems={"rdma": "it did not answer within 3 s"})], "auto",
        "gpu02 (it did not answer within 3 s)",
    ),
    "two InfiniBand fabrics": (
        [node(1, rdma=EIGHT),
         node(2, rdma=[infiniband("mlx5_0", subnet="fec0:0000:0000:0001")])], "auto",
        "gpu01 and gpu02 are on different InfiniBand subnets",
    ),
    "InfiniBand is asked for and is not there": (
        [node(1), node(2, rdma=EIGHT)], "infiniband",
        "nccl.profile is infiniband, but there is no InfiniBand to use on: gpu01 (no such card)",
    ),
    "RoCE is asked for and has no addresses": (
        [node(n, rdma=[roce("mlx5_0", "eth1")]) for n in (1, 2)], "roce",
        "gpu02 (mlx5_0:1: no RoCE v2 address: eth1 has no IP address)",
    ),
    "RoCE is asked for, and there is v1 only": (
        [node(n, rdma=[roce("mlx4_0", "eth1", gids=(
            Gid(0, "0000:0000:0000:0000:0000:ffff:0a01:0001", "IB/RoCE v1", "eth1"),))])
         for n in (1, 2)], "roce", "no RoCE v2 address",
    ),
    "iWARP is asked for": (
        [node(n, rdma=[roce("irdma0", "eth1", node_type="RNIC")]) for n in (1, 2)], "roce", "iWARP",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_fabric_is_refused(name: str) -> None:
    members, profile, words = IMPOSSIBLE[name]
    with pytest.raises(CheckFailed) as failed:
        nccl_env.make_network(members, profile)
    assert words in failed.value.what
    assert failed.value.fix and "nccl." in failed.value.fix
    assert failed.value.exit_code == EXIT_CHECK


def test_error_counts_many_nodes() -> None:
    members = [node(n, rdma=EIGHT) for n in range(1, 9)] + [node(9)]
    with pytest.raises(CheckFailed, match=r"gpu\[01-08\] would use InfiniBand"):
        nccl_env.make_network(members)
